"""A corpus to search: the tiles of a folder, a glob, a text file or a JSONL, in a fixed order."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contrastors.records import POSITIVE, PathResolver, RecordError, _kind, _text_field, read_jsonl

SUFFIXES = (
    ".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".jp2", ".jpe", ".png", ".pbm", ".pgm", ".ppm", ".tif", ".tiff", ".webp"
)  # fmt: skip
ARTICLE = "article_id"


@dataclass(frozen=True, slots=True)
class Tile:
    """One entry of a corpus.

    Attributes:
        line: Line of the file, or place in the sorted listing, from 1.
        text: Path as it is written there.
        path: Path that can be opened.
        article_id: Page or article that the tile belongs to; None where it is not known.
    """

    line: int
    text: str
    path: str
    article_id: str | int | None = None


def read_article_id(where: str, data: dict[str, Any]) -> str | int | None:
    """Returns `article_id` of a row.

    Raises:
        RecordError: It is neither a string nor a whole number.
    """
    value = data.get(ARTICLE)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise RecordError(f"{where}: field '{ARTICLE}' must be a string or a whole number, it is {_kind(value)}")
    return value


def read_corpus(source: str) -> tuple[list[Tile], PathResolver]:
    """Returns the tiles of a corpus, and the resolver that found their paths.

    Args:
        source: Folder (searched to the bottom), glob, text file with one path a line, or JSONL with `chunk_path` and
            optionally `article_id`. Paths in a file belong to its folder, others to the current one.

    Raises:
        RecordError: Nothing is there, or a line has the wrong form.
    """
    if os.path.isdir(source):
        found = sorted(str(path) for path in Path(source).rglob("*") if path.suffix.lower() in SUFFIXES)
        tiles, resolver = _tiles(source, enumerate(found, start=1), "corpus")
    elif not os.path.exists(source) and glob.has_magic(source):
        found = sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
        tiles, resolver = _tiles(source, enumerate(found, start=1), "corpus")
    elif source.endswith(".jsonl"):
        tiles, resolver = _read_rows(source)
    else:
        tiles, resolver = _tiles(source, _read_lines(source), source)
    if not tiles:
        raise RecordError(f"--corpus {source}: holds no tile ({', '.join(SUFFIXES[:5])} ... of a folder)")
    return tiles, resolver


def _tiles(source: str, texts: Any, file: str) -> tuple[list[Tile], PathResolver]:
    resolver = PathResolver(file)
    return [Tile(line, text, resolver(text)) for line, text in texts], resolver


def _read_lines(source: str) -> list[tuple[int, str]]:
    try:
        text = Path(source).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RecordError(f"--corpus {source}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"--corpus {source}: no text file in UTF-8; a JSONL's name ends in .jsonl") from error
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    return [(number, line) for number, line in lines if line.strip()]


def _read_rows(source: str) -> tuple[list[Tile], PathResolver]:
    resolver, tiles = PathResolver(source), []
    for record in read_jsonl(source):
        text = _text_field(source, record, POSITIVE)
        article_id = read_article_id(f"{source}, line {record.line}", record.data)
        tiles.append(Tile(record.line, text, resolver(text), article_id))
    return tiles, resolver
