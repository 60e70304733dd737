"""JSONL records: read with line numbers, check the schema, resolve paths, write so that nothing half-written is seen.

Lines end at LF alone (`str.splitlines` would cut a record at U+2028 inside a string). A BOM, CRLF, blank lines and a
missing last newline are no errors. Rows count non-blank lines from 0; messages name the file's line, from 1.
"""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUERY, POSITIVE, NEGATIVES, CANDIDATES = "query", "chunk_path", "neg_chunk_paths", "retrieve_top20"


class RecordError(ValueError):
    """A row or a file that breaks the data format; the text names file, line and field."""


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object of a JSONL file.

    Attributes:
        index: Row number, counting non-blank lines from 0.
        line: Line of the file, from 1.
        data: The object as it stands in the file; keys keep their order.
    """

    index: int
    line: int
    data: dict[str, Any]


@dataclass(slots=True)
class Pair:
    """A training or evaluation row with paths resolved against the folder of its file.

    Attributes:
        index: Row number from 0.
        line: Line of the file, from 1.
        query: Text of the query, never empty.
        positive: Path of the positive tile.
        negatives: Paths of the hard negatives, in file order.
    """

    index: int
    line: int
    query: str
    positive: str
    negatives: list[str] = field(default_factory=list)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not strict JSON")


def read_jsonl(path: str | Path) -> Iterator[Record]:
    """Yields the records of a JSONL file in order.

    Args:
        path: UTF-8 file, one JSON object a line.

    Raises:
        RecordError: The file is missing, or a line is not UTF-8, not strict JSON or not an object.
    """
    try:
        file = open(path, "rb")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    with file:
        index = 0
        for line, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8").strip(" \t\r\n\ufeff" if line == 1 else " \t\r\n")
                if not text:
                    continue
                data = json.loads(text, parse_constant=_refuse_constant)
            except UnicodeDecodeError as error:
                raise RecordError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise RecordError(
                    f"{path}, line {line}: not a JSON object ({error}); mend or remove the line"
                ) from error
            if not isinstance(data, dict):
                raise RecordError(f"{path}, line {line}: a JSON object is needed, this is {_kind(data)}")
            yield Record(index, line, data)
            index += 1


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _text_field(path: str | Path, record: Record, key: str) -> str:
    value = record.data.get(key)
    if not isinstance(value, str):
        what = _kind(value) if key in record.data else "missing"
        raise RecordError(f"{path}, line {record.line}: field '{key}' must be a string, it is {what}")
    if not value.strip():
        raise RecordError(f"{path}, line {record.line}: field '{key}' is empty")
    if key == QUERY and any("\ud800" <= letter <= "\udfff" for letter in value):
        # No tokenizer takes it. In a path it stands for a byte of a file name that is not UTF-8.
        raise RecordError(f"{path}, line {record.line}: field '{key}' holds half of a surrogate pair; mend the text")
    return value


def _path_list_field(path: str | Path, record: Record, key: str) -> list[str]:
    value = record.data.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RecordError(f"{path}, line {record.line}: field '{key}' must be a list of strings, it is {_kind(value)}")
    for entry in value:
        if not isinstance(entry, str) or not entry:
            what = "an empty string" if entry == "" else _kind(entry)
            raise RecordError(f"{path}, line {record.line}: field '{key}' must be a list of strings, it holds {what}")
    return value


class PathResolver:
    """Turns paths of a JSONL file into paths that can be opened.

    Relative paths belong to the folder of the file. The exact name is tried first, then the other Unicode normal form
    (macOS writes decomposed names); `num_renamed` counts how often that was needed. A path that exists in no form comes
    back as given, so that the message about it shows what was tried.
    """

    def __init__(self, jsonl: str | Path):
        self.folder = os.path.dirname(os.path.abspath(jsonl))
        self.num_renamed = 0
        self._known: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if text not in self._known:
            self._known[text] = self._find(text)
        return self._known[text]

    def _find(self, text: str) -> str:
        exact = os.path.join(self.folder, text)
        if "\0" in exact or os.path.exists(exact) or exact.isascii():
            return exact
        for form in ("NFC", "NFD"):
            other = os.path.join(self.folder, unicodedata.normalize(form, text))
            if os.path.exists(other):
                self.num_renamed += 1
                return other
        return exact


def read_pairs(path: str | Path, max_rows: int = 0) -> tuple[list[Pair], PathResolver]:
    """Returns the (query, positive, negatives) rows of a JSONL file, and the resolver that found their paths.

    Args:
        path: JSONL with `query`, `chunk_path` and, optionally, `neg_chunk_paths`.
        max_rows: Stop after so many rows; 0 = all.

    Raises:
        RecordError: A field has the wrong type or is empty, or the file holds no row.
    """
    resolver = PathResolver(path)
    pairs = []
    for record in read_jsonl(path):
        if max_rows and len(pairs) == max_rows:
            break
        negatives = [resolver(p) for p in _path_list_field(path, record, NEGATIVES)]
        query, positive = _text_field(path, record, QUERY), resolver(_text_field(path, record, POSITIVE))
        pairs.append(Pair(record.index, record.line, query, positive, negatives))
    if not pairs:
        raise RecordError(f"{path}: holds no rows")
    return pairs, resolver


def dump_json(value: Any, indent: int | None = None) -> str:
    """Returns strict JSON in one line (or indented): UTF-8 text kept as it is, NaN and infinity become null."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate from an escape in the input: only its escape is valid UTF-8
        text = json.dumps(_finite(value), allow_nan=False, indent=indent)
    return text


def _finite(value: Any) -> Any:
    if hasattr(value, "item") and not isinstance(value, (dict, list, tuple)):
        value = value.item()  # numpy and torch scalars
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


@contextmanager
def atomic_output(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; on success it is fsynced and renamed, on an error it is removed.

    Raises:
        ValueError: A pipe or a device stands there, such as /dev/null, which must not become a file.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: is neither a file nor a folder, so it is not replaced; give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
        sync_file(path.parent)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def sync_file(path: str | Path) -> None:
    """Flushes a file or folder entry to the disk, so that a rename after it never shows an empty file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle_files(folder: Path) -> None:
    """Flushes every file of a new folder, and gives each the rights of a file that is made here.

    safetensors makes files that only their owner can read; a server, or a colleague, is another user.
    """
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(OSError):  # some mounts know no rights
                path.chmod(0o666 & ~umask)
        sync_file(path)
    sync_file(folder)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_output(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes rows atomically, one strict JSON object a line, and returns their number."""
    num_rows = 0
    with atomic_output(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(dump_json(row) + "\n")
            num_rows += 1
    return num_rows


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that was skipped.

    Attributes:
        line: Line of the file, from 1.
        path: The file that could not be used.
        reason: Why.
    """

    line: int
    path: str
    reason: str


def check_bad_rows(source: str | Path, bad: list[BadRow], num_rows: int, max_fraction: float, report: Path) -> None:
    """Writes the skipped rows to `report` and stops where there are too many to go on without them.

    Args:
        source: The JSONL they come from.
        bad: Skipped rows; none = no report, and an older one is removed.
        num_rows: Rows of the file.
        max_fraction: `--max-bad-fraction`.
        report: bad_rows.jsonl.

    Raises:
        ValueError: More than the allowed share of rows is bad, or all of them are.
    """
    if not bad:
        report.unlink(missing_ok=True)  # an older run's
        return
    write_jsonl(report, ({"line": row.line, "path": row.path, "reason": row.reason} for row in bad))
    if len(bad) > max_fraction * num_rows or len(bad) == num_rows:
        first = bad[0]
        raise ValueError(
            f"{source}: {len(bad)} of {num_rows} rows cannot be used (--max-bad-fraction {max_fraction}), first line "
            f"{first.line}: {first.path}: {first.reason}; all of them are in {report}"
        )


def relocate_row(row: dict[str, Any], resolver: PathResolver, folder: str | Path) -> dict[str, Any]:
    """Returns the row for a JSONL in another folder: relative paths are rewritten so that they find the same images.

    Absolute paths and every other key stay as they are.

    Args:
        row: Row of the old file.
        resolver: Resolver of the old file.
        folder: Folder of the new file.
    """
    # Real folders: the steps up of a relative path leave a linked folder for the parent of what it links to.
    old, new = os.path.realpath(resolver.folder), os.path.realpath(folder)
    if old == new:
        return row

    def move(path: Any) -> Any:
        if not isinstance(path, str) or os.path.isabs(path):
            return path
        return os.path.relpath(os.path.join(old, os.path.relpath(resolver(path), resolver.folder)), new)

    moved = dict(row)
    if POSITIVE in row:
        moved[POSITIVE] = move(row[POSITIVE])
    if isinstance(row.get(NEGATIVES), list):
        moved[NEGATIVES] = [move(path) for path in row[NEGATIVES]]
    if isinstance(row.get(CANDIDATES), list):
        moved[CANDIDATES] = [
            entry | {"path": move(entry["path"])} if isinstance(entry, dict) and "path" in entry else entry
            for entry in row[CANDIDATES]
        ]
    return moved
