"""What the scripts that publish a data set agree on: names, layout, safe paths, checksum list, paths inside rows.

A prepared folder holds README.md, dataset_summary.json, one JSONL a split and `images/`. A packaged one holds the same
texts, `shards/images-00000.tar` and so on (members named `images/...`), shard_summary.json and SHA256SUMS.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contrastors.records import CANDIDATES, NEGATIVES, POSITIVE, RecordError, sync_file, write_text

IMAGES, SHARDS = "images", "shards"
SUMMARY, SHARD_SUMMARY = "dataset_summary.json", "shard_summary.json"
CHECKSUMS = "SHA256SUMS"

_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")


def shard_name(number: int) -> str:
    """Returns the name of a shard inside the data set; the numbers make WebDataset's brace notation work."""
    return f"{SHARDS}/images-{number:05d}.tar"


def check_name(name: str, source: str | Path) -> str:
    """Returns `name` where it is a relative path that stays inside any folder, on any system.

    Args:
        name: Path with forward slashes.
        source: Where it was read; named in the message.

    Raises:
        ValueError: Absolute, with `..`, an empty part, a backslash, a control character, or no valid UTF-8.
    """
    parts = name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{source}: {name!r} is refused: only paths that stay inside the data set are taken")
    if _CONTROL.search(name) or not _is_utf8(name):
        what = "a backslash, a control character or a drive"
        raise ValueError(f"{source}: {name!r} is refused: it holds {what}; rename the file")
    return name


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def list_files(folder: str | Path, follow_links: bool = False) -> list[str]:
    """Returns the names of all files below a folder, sorted by (folder, name).

    Files and folders at the top whose name begins with a dot or holds `.tmp-` are no part of a data set.

    Args:
        folder: Root; the names are relative to it, with forward slashes.
        follow_links: Take a link to a file for the file.

    Raises:
        ValueError: A link, a device or the like, or a name that `check_name` refuses.
    """
    names, waiting = [], [""]
    while waiting:
        parent = waiting.pop()
        with os.scandir(os.path.join(folder, parent)) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not parent and (entry.name.startswith(".") or ".tmp-" in entry.name):
                    continue
                name = check_name(posixpath.join(parent, entry.name), folder)
                if entry.is_symlink() and not (follow_links and entry.is_file()):
                    raise ValueError(
                        f"{folder}: {name!r} is refused: it is a link, which may lead anywhere; put the file itself "
                        "there, or pack with --follow-links (links to files only)"
                    )
                if entry.is_dir():
                    waiting.append(name)
                elif entry.is_file():
                    names.append(name)
                else:
                    raise ValueError(f"{folder}: {name!r} is refused: neither a file nor a folder")
    return sorted(names, key=posixpath.split)


def row_paths(row: dict[str, Any], where: str) -> list[str]:
    """Returns every image path of a row: positive, hard negatives, candidates.

    Args:
        row: JSON object; absent fields give no paths.
        where: File and line for the message.

    Raises:
        RecordError: A path is no string, or a field no list.
    """
    for name in (NEGATIVES, CANDIDATES):
        if not isinstance(row.get(name) or [], list):
            raise RecordError(f"{where}: '{name}' must be a list")
    paths = [row[POSITIVE]] if POSITIVE in row else []
    paths += row.get(NEGATIVES) or []
    paths += [entry.get("path") if isinstance(entry, dict) else None for entry in row.get(CANDIDATES) or []]
    if not all(isinstance(path, str) and path for path in paths):
        raise RecordError(f"{where}: every '{CANDIDATES}' entry needs a 'path', and every path must be a string")
    return paths


def map_paths(row: dict[str, Any], move: Callable[[str], str | None]) -> dict[str, Any]:
    """Returns the row with `move(path)` for every image path; every other key stays as it is.

    Args:
        row: Row that `row_paths` accepts, with a positive.
        move: Gives the new path; None leaves a hard negative or a candidate out.
    """
    moved = row | {POSITIVE: move(row[POSITIVE])}
    if row.get(NEGATIVES):
        moved[NEGATIVES] = [new for path in row[NEGATIVES] if (new := move(path)) is not None]
    if row.get(CANDIDATES):
        moved[CANDIDATES] = [
            entry | {"path": new} for entry in row[CANDIDATES] if (new := move(entry["path"])) is not None
        ]
    return moved


def file_sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: str | Path, checksums: dict[str, str]) -> None:
    """Writes SHA256SUMS in the format of `sha256sum`; names are relative to the folder."""
    write_text(Path(folder) / CHECKSUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(checksums.items())))


def read_checksums(folder: str | Path) -> dict[str, str]:
    """Returns name -> SHA-256 of the SHA256SUMS of a folder.

    Raises:
        ValueError: The list is missing, or a line is no checksum with a safe name.
    """
    path = Path(folder) / CHECKSUMS
    if not path.is_file():
        raise ValueError(f"{path}: not found; a packaged data set has one (package_hf_image_shards.py writes it)")
    checksums = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line:
            match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
            if not match:
                raise ValueError(f"{path}, line {number}: not '<sha256>  <name>'; download the file again")
            checksums[check_name(match[2], path)] = match[1]
    return checksums


@contextmanager
def folder_output(path: str | Path, overwrite: bool, marker: str) -> Iterator[Path]:
    """Yields a temporary folder that takes the place of `path` when all went well; on an error it is removed.

    Args:
        path: The folder to make.
        overwrite: Replace an existing one.
        marker: File that every folder of this kind holds; a folder without it is never replaced.

    Raises:
        ValueError: The folder exists and may not be replaced.
    """
    path = Path(os.path.realpath(path))  # a link to another disk stays a link
    temporary, old = path.with_name(f"{path.name}.tmp-partial"), path.with_name(f"{path.name}.tmp-old")
    if old.exists() and not path.exists():
        old.rename(path)  # a run was killed between the two renames below
    _check_replaceable(path, overwrite, marker)
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)  # what a killed run left
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _check_replaceable(path, overwrite, marker)  # it may have come meanwhile
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        sync_file(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(path: Path, overwrite: bool, marker: str) -> None:
    if not path.exists():
        return
    if not overwrite:
        raise ValueError(f"{path}: exists; choose another folder or give --overwrite")
    if not (path / marker).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path}: holds no {marker}, so it is not replaced; choose another folder")
