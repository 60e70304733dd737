"""A local OpenAI-compatible server that plays whatever a test tells it: statuses, delays, bodies, cut connections."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

from PIL import Image


@dataclass(frozen=True)
class Request:
    """One chat completion as the server got it; `number` counts them from 0."""

    number: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def model(self) -> str:
        return self.body["model"]

    @property
    def _parts(self) -> list[dict[str, Any]]:
        return self.body["messages"][-1]["content"]

    @property
    def text(self) -> str:
        return "".join(part["text"] for part in self._parts if part["type"] == "text")

    @property
    def query(self) -> str:
        return re.search(r"^Query: (.*?)(?:\nAnswer: |\Z)", self.text, re.DOTALL | re.MULTILINE)[1]

    @property
    def answer(self) -> str:
        return self.text.partition("\nAnswer: ")[2]

    @property
    def is_verdict(self) -> bool:
        return "\nAnswer: " in self.text

    @property
    def media_type(self) -> str:
        return re.match(r"data:([^;]+);base64,", self._url)[1]

    @property
    def _url(self) -> str:
        return next(part["image_url"]["url"] for part in self._parts if part["type"] == "image_url")

    @property
    def image_bytes(self) -> bytes:
        return base64.b64decode(self._url.partition(",")[2])

    @property
    def image(self) -> Image.Image:
        return Image.open(BytesIO(self.image_bytes))


@dataclass(frozen=True)
class Played:
    """What to send back. `cut` closes the connection in the middle of the body."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    cut: bool = False


def chat(content: Any, finish_reason: str = "stop", **message: Any) -> Played:
    """Returns a chat completion with this content."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": content, **message},
    }
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
    return Played({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})


def error(status: int, message: str = "scripted", code: str | None = None, **headers: str) -> Played:
    """Returns an error in OpenAI's shape."""
    return Played({"error": {"message": message, "type": "scripted", "param": None, "code": code}}, status, headers)


class JudgeServer:
    """Serves `reply` on a free port of 127.0.0.1 while the context is open.

    Args:
        reply: Called with every chat request, from several threads; a string stands for `chat(string)`.
        models: Names for GET /models; None = the server has no such route.
        keep: Remember the requests (off for long runs, which only count).
        route: Where the API lies.
        listing_delay_s: Before GET /models is answered.
    """

    def __init__(
        self,
        reply: Callable[[Request], Played | str],
        models: list[str] | None = None,
        keep: bool = True,
        route: str = "/v1",
        listing_delay_s: float = 0.0,
    ):
        self.listing_delay_s = listing_delay_s
        self.reply, self.models, self.keep, self.route = reply, models, keep, route
        self.num_calls = self.num_listings = self.num_at_once = self.max_at_once = 0
        self.requests: list[Request] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        self._closing = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                owner._list_models(self)

            def do_POST(self) -> None:
                owner._chat(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed

        self.server = Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}{self.route}"

    def __enter__(self) -> JudgeServer:
        self.thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def _list_models(self, handler: BaseHTTPRequestHandler) -> None:
        self.num_listings += 1
        self._closing.wait(self.listing_delay_s)
        if self.models is None or handler.path != f"{self.route}/models":
            return self._send(handler, error(404, "no such route"))
        data = [{"id": name, "object": "model"} for name in self.models]
        self._send(handler, Played({"object": "list", "data": data}))

    def _chat(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.path != f"{self.route}/chat/completions":
            return self._send(handler, error(404, "no such route"))
        with self.lock:
            request = Request(self.num_calls, json.loads(raw), {k.lower(): v for k, v in handler.headers.items()})
            self.num_calls += 1
            self.num_at_once += 1
            self.max_at_once = max(self.max_at_once, self.num_at_once)
            if self.keep:
                self.requests.append(request)
                self.times.append(time.monotonic())
        try:
            played = self.reply(request)
            played = chat(played) if isinstance(played, str) else played
            self._closing.wait(played.delay_s)
            self._send(handler, played)
        finally:
            with self.lock:
                self.num_at_once -= 1

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, played: Played) -> None:
        body = played.body.encode() if isinstance(played.body, str) else json.dumps(played.body).encode()
        handler.send_response(played.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **played.headers}
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2] if played.cut else body)
        if played.cut:
            handler.close_connection = True
