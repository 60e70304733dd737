"""A local search service: it searches real vectors, or plays whatever a test tells it."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np

from tests.judge_server import JudgeServer, Played, Request

Results = list[list[dict[str, Any]]]


def index_of(vectors: np.ndarray, entries: list[dict[str, Any]]) -> Callable[[Request], Results]:
    """Returns a search of vectors (C, D), whose hits have what `entries` say of each document."""

    def search(request: Request) -> Results:
        queries = np.array([query["embedding"] for query in request.body["queries"]], dtype=np.float32)
        scores = queries @ vectors.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, : request.body["n_docs"]]
        return [
            [{**entries[number], "score": float(row[number])} for number in numbers]
            for row, numbers in zip(scores, order, strict=True)
        ]

    return search


class SearchServer(JudgeServer):
    """Serves `reply` as POST /search; lists of hits stand for a good reply.

    Args:
        reply: Called with every search, from several threads.
        health: What GET /health answers.
    """

    def __init__(self, reply: Callable[[Request], Results | Played], health: Played | None = None):
        super().__init__(reply, route="")
        self.health = health or Played({"status": "ok"})

    def _list_models(self, handler: BaseHTTPRequestHandler) -> None:
        assert handler.path == "/health", handler.path
        self.num_listings += 1
        self._send(handler, self.health)

    def _chat(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers["Content-Length"]))
        assert handler.path == "/search", handler.path
        with self.lock:
            request = Request(self.num_calls, json.loads(raw), dict(handler.headers.items()))
            self.num_calls += 1
            self.requests.append(request)
        played = self.reply(request)
        if isinstance(played, list):
            played = Played({"results": [{"hits": hits} for hits in played]})
        self._closing.wait(played.delay_s)
        self._send(handler, played)
