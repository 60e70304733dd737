"""Rows with candidates: their schema and identity, and which documents are no candidates because they are positives."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contrastors.images import BadImage, content_hash, read_image_bytes
from contrastors.records import (
    CANDIDATES,
    POSITIVE,
    QUERY,
    Record,
    RecordError,
    _kind,
    _text_field,
    read_jsonl,
    write_jsonl,
)

MISSING, UNREADABLE = "MISSING", "UNREADABLE"


def check_row(path: str | Path, record: Record) -> Record:
    """Returns the record, whose query, positive and candidates have the right types.

    Raises:
        RecordError: A field is missing or has another type.
    """
    _text_field(path, record, QUERY)
    _text_field(path, record, POSITIVE)
    where = f"{path}, line {record.line}: field '{CANDIDATES}'"
    entries = record.data.get(CANDIDATES)
    if not isinstance(entries, list):
        what = _kind(entries) if CANDIDATES in record.data else "missing; mine_hard_negatives.py writes it"
        raise RecordError(f"{where} must be a list of objects with a 'path', it is {what}")
    for entry in entries:
        found = entry.get("path") if isinstance(entry, dict) else entry
        if not isinstance(entry, dict) or not isinstance(found, str) or not found:
            what = "an object without one" if isinstance(entry, dict) and "path" not in entry else _kind(found)
            raise RecordError(f"{where} must be a list of objects with a 'path', it holds {what}")
    return record


def read_rows(path: str | Path, offset: int = 0, limit: int = 0) -> Iterator[Record]:
    """Yields the checked rows from number `offset` on, `limit` of them at most (0 = all)."""
    for record in read_jsonl(path):
        if limit and record.index >= offset + limit:
            return
        if record.index >= offset:
            yield check_row(path, record)


class KnownPositives:
    """Every positive of each query text, as written; a page listed for one row is no negative of another."""

    def __init__(self):
        self._positives: dict[bytes, tuple[str, ...]] = {}

    def add(self, query: str, positive: str) -> None:
        """Remembers one."""
        key = self._key(query)
        known = self._positives.get(key, ())
        if positive not in known:
            self._positives[key] = tuple(sorted((*known, positive)))

    def write(self, path: str | Path) -> None:
        """Writes the queries with several positives, by the hash of their text, for runs that see some rows only."""
        several = ((key, known) for key, known in self._positives.items() if len(known) > 1)
        write_jsonl(path, ({"query_hash": key.hex(), "chunk_paths": known} for key, known in several))

    def read(self, path: str | Path) -> None:
        """Adds what `write` wrote.

        Raises:
            RecordError: It is another file.
        """
        for record in read_jsonl(path):
            try:
                key, known = bytes.fromhex(record.data["query_hash"]), record.data["chunk_paths"]
            except (KeyError, ValueError, TypeError) as error:
                raise RecordError(f"{path}, line {record.line}: 'query_hash' and 'chunk_paths' are needed") from error
            self._positives[key] = tuple(sorted({*self._positives.get(key, ()), *known}))

    def of(self, query: str) -> tuple[str, ...]:
        """Returns the positives of a query, sorted."""
        return self._positives[self._key(query)]

    @staticmethod
    def _key(query: str) -> bytes:
        return hashlib.blake2b(query.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def row_key(row: dict[str, Any], positives: tuple[str, ...]) -> str:
    """Returns 16 hex digits that change with the query, any of its positives, or the candidates and their order."""
    content = [row[QUERY], row[POSITIVE], positives, [entry["path"] for entry in row[CANDIDATES]]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Document:
    """A file on its way to the judge; `verdict` and `reason` tell why there is nothing to send."""

    path: str
    content: str = ""
    data: bytes = b""
    verdict: str = ""
    reason: str = ""


def load_document(path: str) -> Document:
    """Returns the bytes and the content hash of a file."""
    try:
        data = read_image_bytes(path)
    except BadImage as error:
        return Document(path, "", b"", UNREADABLE if os.path.isfile(path) else MISSING, str(error))
    return Document(path, content_hash(data), data)


@functools.lru_cache(maxsize=100_000)
def file_content(path: str) -> str:
    """Returns the content hash of a positive; its path where it cannot be read, which equals no hash."""
    return load_document(path).content or path


def content_now(path: str) -> str:
    """Returns the content hash of a file, read once while size and time of change stay; "" where it cannot be read."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return _content_of(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1_000_000)
def _content_of(path: str, size: int, mtime: int) -> str:
    return load_document(path).content


def place(row: dict[str, Any], position: int | None) -> dict[str, Any]:
    """Returns the candidate at a position; None stands for the row's positive."""
    return {"path": row[POSITIVE]} if position is None else row[CANDIDATES][position]
