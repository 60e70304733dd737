"""Client of a search service that takes vectors, and the journal of its replies.

    GET  /health  -> {"status": "ok"}
    POST /search  {"queries": [{"embedding": [...]}], "n_docs": k, "nprobe": n}
                  -> {"results": [{"hits": [{"path", "score", "article_id", "tile_index", "chunk_index", ...}]}]}

What passes (429, 5xx, time-outs, broken connections, cut bodies) is asked again, later and later; a batch for which
that does not help is `SearchFailed`; what no later request can cure is `SearchStopped`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contrastors.vlm import is_loopback, retry_delay

BATCH_SIZE = 32


class SearchStopped(ValueError):
    """The service cannot be used: wrong address, refused requests, or replies of another form."""


class SearchFailed(Exception):
    """All tries for one batch failed; the text tells how the last one did."""


class SearchClient:
    """Asks one search service; use it as a context, and `check` first.

    Attributes:
        requests: `calls` (every request for a search) and `retries` (those after a failure that passes).
    """

    def __init__(
        self,
        url: str,
        n_docs: int,
        nprobe: int,
        batch_size: int = BATCH_SIZE,
        max_retries: int = 5,
        timeout_s: float = 60.0,
    ):
        import httpx

        self.url = url.rstrip("/").removesuffix("/search")
        self.n_docs, self.nprobe, self.batch_size, self.max_retries = n_docs, nprobe, batch_size, max_retries
        self.requests: Counter[str] = Counter(calls=0, retries=0)
        # A proxy of the environment has no business with this machine.
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)), trust_env=not is_loopback(self.url)
        )

    def __enter__(self) -> SearchClient:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._client.close()

    def check(self) -> None:
        """Asks for the health of the service.

        Raises:
            SearchStopped: It does not answer, or is not well.
        """
        try:
            reply = self._ask("GET", "/health", None, min(self.max_retries, 2))
        except SearchFailed as error:
            raise SearchStopped(f"{self.url}/health: {error}; start the service or mend --search-api-url") from error
        if not isinstance(reply, dict) or reply.get("status") != "ok":
            raise SearchStopped(f'{self.url}/health answered {str(reply)[:100]} and not {{"status": "ok"}}')

    def search(self, embeddings: Sequence[Sequence[float]], num_extra: int = 0) -> list[list[dict[str, Any]]]:
        """Returns the hits of each embedding, best first, as the service sent them.

        Args:
            embeddings: At most `batch_size` vectors.
            num_extra: Hits to ask for beside `n_docs`.

        Raises:
            SearchFailed: All tries failed.
            SearchStopped: The service refuses the request, or its reply has another length or form.
        """
        assert 0 < len(embeddings) <= self.batch_size, len(embeddings)
        queries = [{"embedding": [float(x) for x in embedding]} for embedding in embeddings]
        body = {"queries": queries, "n_docs": self.n_docs + num_extra, "nprobe": self.nprobe}
        reply = self._ask("POST", "/search", body, self.max_retries)
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list):
            raise SearchStopped(f"{self.url}/search: the reply has no list 'results'")
        if len(results) != len(queries):
            raise SearchStopped(f"{self.url}/search: {len(results)} results came for {len(queries)} queries")
        return [self._check_hits(result)[: body["n_docs"]] for result in results]

    def _check_hits(self, result: Any) -> list[dict[str, Any]]:
        hits = result.get("hits") if isinstance(result, dict) else None
        if not isinstance(hits, list):
            raise SearchStopped(f"{self.url}/search: a result has no list 'hits'")
        last = math.inf
        for hit in hits:
            path, score = (hit.get("path"), hit.get("score")) if isinstance(hit, dict) else (None, None)
            if not isinstance(path, str) or not path or not _is_number(score):
                raise SearchStopped(
                    f"{self.url}/search: a hit needs 'path' (text) and 'score' (number), got {str(hit)[:100]}"
                )
            if score > last + 1e-6 * max(1.0, abs(last)):
                raise SearchStopped(
                    f"{self.url}/search: scores rise from hit to hit ({last} then {score}); inner products, best "
                    "first, are needed, and this looks like distances"
                )
            last = score
        return hits

    def _ask(self, method: str, route: str, body: Any, max_retries: int) -> Any:
        import httpx

        attempt = 0
        while True:
            headers: Mapping[str, str] = {}
            self.requests["calls"] += route == "/search"
            try:
                response = self._client.request(method, self.url + route, json=body)
                status, headers = response.status_code, response.headers
                if status == 200:
                    return json.loads(response.content)
                failure = f"answered {status} {' '.join(response.text.split())[:200]}".rstrip()
                if status not in (408, 425, 429) and status < 500:
                    raise SearchStopped(
                        f"{self.url}{route} {failure}; mend --search-api-url, or use the index's own --model"
                    )
            except httpx.InvalidURL as error:
                raise SearchStopped(f"--search-api-url {self.url}: {error}") from error
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__} {error}".strip()
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
                failure = "answered no JSON"
            if attempt == max_retries:
                raise SearchFailed(f"{attempt + 1} tries failed, the last: {failure}")
            time.sleep(retry_delay(attempt, headers))
            attempt += 1
            self.requests["retries"] += 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class HitJournal:
    """Replies kept as they come, one line a query, so that a stopped run asks only for the rest.

    Args:
        file: JSONL; a torn last line is dropped.
        resume: Keep what is there; otherwise it begins empty.
    """

    def __init__(self, file: str | Path, resume: bool):
        self.file = Path(file)
        self.hits: dict[str, list[dict[str, Any]]] = {}
        if resume and self.file.exists():
            data = self.file.read_bytes()
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].split(b"\n")[:-1]:
                key, hits = json.loads(line)
                self.hits[key] = hits
            os.truncate(self.file, whole)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._out = open(self.file, "ab" if resume else "wb")

    def add(self, keys: Sequence[str], results: Sequence[list[dict[str, Any]]]) -> None:
        """Writes the hits of a batch of queries."""
        self.hits.update(zip(keys, results, strict=True))
        self._out.write(b"".join(json.dumps(pair).encode() + b"\n" for pair in zip(keys, results, strict=True)))
        self._out.flush()

    def close(self) -> None:
        """Closes the file."""
        self._out.close()
