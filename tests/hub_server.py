"""A hub on 127.0.0.1 for tests of uploads: repositories, branches, preupload, LFS and xet storage, commits, trees.

LFS contents are kept and checked against their address. Of the xet protocol the calls are played, not the storage:
blocks are taken as they come, and a file committed through it is known by its SHA-256 alone. Every call is counted.

`faults` holds a list of actions for a (method, route), taken one a call: an HTTP status (sent with Retry-After: 0),
"cut" (the connection ends unanswered after part of the body), "hold" (no answer until `released`), None (a good call).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_testtoken0123456789"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[
            str, dict
        ] = {}  # id -> {"private": bool, "branches": {name: {path: contents, or SHA-256 of what is in xet storage}}}
        self.objects: dict[str, bytes] = {}  # LFS storage: SHA-256 -> contents
        self.xorbs: dict[str, bytes] = {}  # xet storage: hash -> block as sent
        self.ignored: set[str] = set()  # what the repository's .gitignore keeps out
        self.calls: list[tuple[str, str]] = []
        self.faults: dict[tuple[str, str], list] = {}
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self.thread.join()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # connections cut on purpose

    def count(self, method: str, route: str) -> int:
        return self.calls.count((method, route))

    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] != "GET"]


ROUTES = [
    ("whoami", r"/api/whoami-v2"),
    ("create", r"/api/repos/create"),
    ("validate-yaml", r"/api/validate-yaml"),
    ("preupload", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)"),
    ("commit", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)"),
    ("branch", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)"),
    ("tree", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)/?"),
    ("info", r"/api/datasets/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?"),
    ("batch", r"/datasets/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("verify", r"/lfs-verify"),
    ("xet-token", r"/api/datasets/(?P<repo>[^/]+/[^/]+)/xet-write-token/(?P<revision>[^/]+)"),
    ("xorb", r"/v1/xorbs/default/(?P<oid>[0-9a-f]{64})"),
    ("shard", r"/(?:v1/)?shards"),
    ("storage", r"/storage/(?P<oid>[0-9a-f]{64})"),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.dispatch("GET")

    def do_POST(self) -> None:
        self.dispatch("POST")

    def do_PUT(self) -> None:
        self.dispatch("PUT")

    def dispatch(self, method: str) -> None:
        path = urlsplit(self.path).path
        matches = ((name, re.fullmatch(pattern, path)) for name, pattern in ROUTES)
        route, match = next(((name, match) for name, match in matches if match), (path, None))
        if match is None:
            self.server.calls.append((method, path))
            self.read_body()
            return self.answer(404, {"error": "no such route"})
        with self.server.lock:
            self.server.calls.append((method, route))
            actions = self.server.faults.get((method, route))
            action = actions.pop(0) if actions else None
        if action == "cut":
            self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            return None
        if action == "hold":
            self.server.released.wait(600)
            self.close_connection = True
            return None
        body = self.read_body()
        if action:
            return self.answer(action, {"error": "asked for by the test"}, {"Retry-After": "0"})
        if (
            route not in ("storage", "verify", "xorb", "shard")
            and self.headers.get("Authorization") != f"Bearer {TOKEN}"
        ):
            return self.answer(401, {"error": "Invalid credentials in Authorization header"})
        parts = {key: unquote(value) for key, value in match.groupdict().items() if value}
        if "repo" in parts and parts["repo"] not in self.server.repos:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        with self.server.lock:
            status, data = getattr(self, "on_" + route.replace("-", "_"))(body=body, **parts)
        return self.answer(status, data)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, status: int, data: object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(text))} | (headers or {})
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def files(self, repo: str, revision: str) -> dict[str, bytes]:
        return self.server.repos[repo]["branches"][revision]

    def on_whoami(self, body: bytes) -> tuple[int, object]:
        return 200, {"type": "user", "name": "tester", "orgs": []}

    def on_create(self, body: bytes) -> tuple[int, object]:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        address = {"url": f"{self.server.url}/datasets/{repo}"}
        if repo in self.server.repos:
            return 409, address | {"error": "You already created this dataset repo"}
        private = asked.get("private") or asked.get("visibility") == "private"
        self.server.repos[repo] = {"private": private, "branches": {"main": {}}}
        return 200, address

    def on_validate_yaml(self, body: bytes) -> tuple[int, object]:
        return 200, {"errors": [], "warnings": []}

    def on_branch(self, body: bytes, repo: str, revision: str) -> tuple[int, object]:
        branches = self.server.repos[repo]["branches"]
        if revision in branches:
            return 409, {"error": "Reference already exists"}
        branches[revision] = dict(branches["main"])
        return 200, {}

    def on_info(self, body: bytes, repo: str, revision: str = "main") -> tuple[int, object]:
        found = self.server.repos[repo]
        return 200, {"id": repo, "private": found["private"], "sha": "0" * 40, "downloads": 0, "likes": 0, "tags": []}

    def on_tree(self, body: bytes, repo: str, revision: str) -> tuple[int, object]:
        files = self.files(repo, revision)
        return 200, [
            {"type": "file", "path": path, "size": len(data), "oid": file_oid(path, data)}
            for path, data in files.items()
        ]

    def on_preupload(self, body: bytes, repo: str, revision: str) -> tuple[int, object]:
        known, answers = self.files(repo, revision), []
        for file in json.loads(body)["files"]:
            mode = "lfs" if is_large(file["path"]) else "regular"
            answer = {"path": file["path"], "uploadMode": mode, "shouldIgnore": file["path"] in self.server.ignored}
            if file["path"] in known:
                answer["oid"] = file_oid(file["path"], known[file["path"]])
            answers.append(answer)
        return 200, {"files": answers}

    def on_batch(self, body: bytes, repo: str) -> tuple[int, object]:
        objects = []
        for item in json.loads(body)["objects"]:
            if item["oid"] not in self.server.objects:
                upload = {"href": f"{self.server.url}/storage/{item['oid']}"}
                item = item | {"actions": {"upload": upload, "verify": {"href": f"{self.server.url}/lfs-verify"}}}
            objects.append(item)
        return 200, {"transfer": "basic", "objects": objects}

    def on_storage(self, body: bytes, oid: str) -> tuple[int, object]:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "content does not match its address"}
        self.server.objects[oid] = body
        return 200, {}

    def on_xet_token(self, body: bytes, repo: str, revision: str) -> tuple[int, object]:
        return 200, {"accessToken": "xet-token", "exp": int(time.time()) + 3600, "casUrl": self.server.url}

    def on_xorb(self, body: bytes, oid: str) -> tuple[int, object]:
        self.server.xorbs[oid] = body
        return 200, {"was_inserted": True}

    def on_shard(self, body: bytes) -> tuple[int, object]:
        return 200, {"result": 1}

    def on_verify(self, body: bytes) -> tuple[int, object]:
        return (200 if json.loads(body)["oid"] in self.server.objects else 404), {}

    def on_commit(self, body: bytes, repo: str, revision: str) -> tuple[int, object]:
        files = dict(self.files(repo, revision))
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.server.objects and not self.server.xorbs:
                    return 400, {"error": f"LFS object {value['oid']} was never uploaded"}
                files[value["path"]] = self.server.objects.get(value["oid"], value["oid"])
        self.server.repos[repo]["branches"][revision] = files
        oid = hashlib.sha1(body).hexdigest()
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/datasets/{repo}/commit/{oid}"}


def is_large(path: str) -> bool:
    return path.endswith(".tar")


def file_oid(path: str, data: bytes | str) -> str:
    if isinstance(data, str):
        return data
    return (
        hashlib.sha256(data).hexdigest()
        if is_large(path)
        else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )
