"""Rows of JSONL files on their way into a data set folder: where their images are, which split they go to.

Paths are checked against the image root before anything is written; rows are read again when they are written, so that
memory holds their paths and not their texts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contrastors.datacard import FieldTypes
from contrastors.records import BadRow, PathResolver, RecordError, check_bad_rows, dump_json, read_jsonl, read_pairs
from contrastors.shards import IMAGES, check_name, map_paths, row_paths
from contrastors.validation import ImageFact


@dataclass(slots=True)
class Source:
    """One JSONL of the split folder, as far as planning needs it.

    Attributes:
        file: Its path.
        resolver: Finds its images.
        lines: Line of each row.
        paths: Image paths of each row, the positive first.
        queries: Hash of the text of each row.
        labels: Value of --group-field of each row; "" without that flag, and where a row has none.
        splits: Split of each row; "" = skipped.
        counts: What happened to its rows, for the summary.
    """

    file: Path
    resolver: PathResolver
    lines: list[int]
    paths: list[list[str]]
    queries: list[int]
    labels: list[str]
    splits: list[str]
    counts: Counter[str]


def read_source(file: Path, split: str, root: str, group_field: str, names: dict[str, str]) -> Source:
    """Returns what planning needs of a JSONL, and adds path -> name under `images/` to `names`.

    Raises:
        RecordError: The schema is broken, or an image lies outside the image root.
    """
    pairs, resolver = read_pairs(file)
    lines, queries = [pair.line for pair in pairs], [hash(pair.query) for pair in pairs]
    source = Source(file, resolver, lines, [], queries, [], [split] * len(pairs), Counter())
    for record in read_jsonl(file):
        where = f"{file}, line {record.line}"
        if group_field and group_field not in record.data:
            raise RecordError(f"{where}: field '{group_field}' (--group-field) is missing")
        source.labels.append(_label(record.data[group_field]) if group_field else "")
        source.paths.append([resolver(text) for text in row_paths(record.data, where)])
        for path in source.paths[-1]:
            if path not in names:
                names[path] = name_image(path, root, where)
    source.counts["num_rows_read"] = len(pairs)
    return source


def _label(value: Any) -> str:
    if value is None or value == "":
        return ""
    # pandas writes 7 as 7.0 as soon as a row of its column is empty
    return dump_json(int(value) if isinstance(value, float) and value.is_integer() else value)


def name_image(path: str, root: str, where: str) -> str:
    """Returns `images/<relative to root>`; the real place counts, so that neither `..` nor a link leads out."""
    real = os.path.realpath(path) if "\0" not in path else path
    if not real.startswith(os.path.join(root, "")):
        raise RecordError(
            f"{where}: {path} leads to {real}, outside --image-root {root}; copy it there or move the root"
        )
    if os.path.exists(real) and not os.path.isfile(real):
        raise RecordError(f"{where}: {path} is refused: no plain file")
    return check_name(f"{IMAGES}/{os.path.relpath(real, root)}", where)


def skip_bad_rows(source: Source, facts: dict[str, ImageFact], output_dir: str, max_bad_fraction: float) -> None:
    """Takes the rows whose positive cannot be used out of every split; reports and counts them."""
    bad = []
    for index, (positive, *_) in enumerate(source.paths):
        if not facts[positive].ok:
            bad.append(BadRow(source.lines[index], positive, facts[positive].reason))
            source.splits[index] = ""
    # Beside the output, not in it: the report names paths of this machine.
    report = Path(f"{os.path.abspath(output_dir)}.{source.file.stem}.bad_rows.jsonl")
    check_bad_rows(source.file, bad, len(source.lines), max_bad_fraction, report)
    source.counts["num_bad_rows"] = len(bad)


class Exporter:
    """Rewrites rows for the data set folder and remembers which images they use.

    Attributes:
        used: Path -> name under `images/` of every image that a written row names.
        types: Types of the fields.
        absolute: Fields whose text names a place of this machine, with the first such line.
    """

    def __init__(self, names: dict[str, str], facts: dict[str, ImageFact], owners: dict[str, str]):
        self.names, self.facts, self.owners = names, facts, owners
        self.used: dict[str, str] = {}
        self.types = FieldTypes()
        self.absolute: dict[str, str] = {}

    def rows(self, sources: list[Source], split: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of one split in the order of the input."""
        for source in sources:
            for record in read_jsonl(source.file):
                if source.splits[record.index] == split:
                    yield self._rewrite(source, record.data, split, f"{source.file}, line {record.line}")

    def _rewrite(self, source: Source, row: dict[str, Any], split: str, where: str) -> dict[str, Any]:
        def move(text: str) -> str | None:
            path = source.resolver(text)
            if not self.facts[path].ok:
                source.counts["num_bad_paths_left_out"] += 1
            elif self.owners.get(self.facts[path].content, split) != split:
                source.counts["num_paths_of_other_splits_left_out"] += 1
            else:
                return self.used.setdefault(path, self.names[path])
            return None

        moved = map_paths(row, move)
        for key, value in row.items():
            if isinstance(value, str) and key != "chunk_path" and value.startswith("/") and os.path.exists(value):
                self.absolute.setdefault(key, where)
        self.types.add(moved)
        return moved
