"""A demo judge: an OpenAI-compatible server on 127.0.0.1 that knows what the demo's tiles show.

    python -m contrastors.demo_judge --facts demo/data/facts.jsonl --address-file demo/judge.txt

It is no model. It decodes the picture that the filter sent over HTTP, looks its pixels up in the facts, answers with
what the tile shows, and judges that answer CORRECT where the tile shows just what the query asks for. The filter, the
HTTP client and the pictures are real; the judgement is a look-up, and a perfect one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from contrastors.images import open_image
from contrastors.records import read_jsonl, write_text

MODEL = "demo-judge"
QUERY = re.compile(r"\w+ header, \w+ footer, \w+ bar: \w+ dot (?:top|bottom) (?:left|right)")


def hash_pixels(image: Image.Image) -> str:
    """Returns a hash of size and RGB pixels: what survives a lossless re-encoding."""
    rgb = image.convert("RGB")
    return hashlib.blake2b(repr(rgb.size).encode() + rgb.tobytes(), digest_size=16).hexdigest()


def read_facts(path: str | Path) -> dict[str, str]:
    """Returns hash of pixels -> the query that the tile answers."""
    return {record.data["pixels"]: record.data["query"] for record in read_jsonl(path)}


def judge(body: dict[str, Any], facts: dict[str, str]) -> str:
    """Returns the answer, or the verdict where the request holds an answer.

    Raises:
        ValueError: The request holds no query or no picture of the demo.
    """
    parts = [part for message in body["messages"] for part in _parts(message["content"])]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    (url,) = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    shown = facts.get(hash_pixels(open_image(base64.b64decode(url.partition(",")[2]))))
    asked = QUERY.search(text)
    if shown is None or asked is None:
        raise ValueError("the demo judge knows the demo's tiles and queries only")
    if "\nAnswer:" not in text:
        return f"The page shows: {shown}."
    return "CORRECT" if shown == asked[0] else "WRONG"


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def make_server(facts: dict[str, str]) -> ThreadingHTTPServer:
    """Returns a server on a free port of 127.0.0.1, not yet serving."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = judge(body, facts)
            except (KeyError, ValueError) as error:
                self._send(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
                return
            if body.get("response_format", {}).get("type") == "json_schema":
                text = json.dumps({"verdict": text})
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            reply = {"id": "demo", "object": "chat.completion", "created": 0, "model": MODEL, "usage": usage}
            self._send(200, reply | {"choices": [choice]})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def main(argv: list[str] | None = None) -> int:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m contrastors.demo_judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--facts", required=True, help="facts.jsonl of the demo's data")
    parser.add_argument("--address-file", required=True, help="file that receives the base URL once it serves")
    args = parser.parse_args(argv)
    server = make_server(read_facts(args.facts))
    address = f"http://127.0.0.1:{server.server_address[1]}/v1"
    print(f"demo judge (a look-up, no model) at {address}", flush=True)
    write_text(args.address_file, address + "\n")
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
