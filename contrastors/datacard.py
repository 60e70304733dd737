"""The README of a published data set: the YAML header that `datasets.load_dataset` reads, and a text for people."""

from __future__ import annotations

from typing import Any

import yaml

from contrastors.records import CANDIDATES, NEGATIVES, POSITIVE, QUERY

_SCALARS = {str: "string", bool: "bool", int: "int64", float: "float64"}
_MEANINGS = {
    QUERY: "text of the query",
    POSITIVE: "the tile that answers it, relative to this folder",
    NEGATIVES: "hard negatives: tiles that look right and do not answer it",
    CANDIDATES: "what a search returned, best first: rank, path, score",
}
SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


class FieldTypes:
    """Types of the fields over all rows of all splits.

    Without them `load_dataset` takes the first split's fields for all, and fails where another split has one more.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Widens the types so that they hold this row."""
        for name, value in row.items():
            kind = _kind(value)
            known = self._fields.get(name)
            if kind != known:
                self._fields[name] = kind if known is None else _merge(known, kind)

    def features(self) -> list[dict[str, Any]]:
        """Returns the list that stands under `dataset_info: features:`, in the order of first use."""
        return [{"name": name, **_spell(kind)} for name, kind in self._fields.items()]


def _kind(value: Any) -> Any:
    """A scalar's name, "null", ["list", kind of the entries] or {field: kind}."""
    if isinstance(value, list):
        kinds = [_kind(entry) for entry in value]
        merged = kinds[0] if kinds else "null"
        for kind in kinds[1:]:
            merged = merged if kind == merged else _merge(merged, kind)
        return ["list", merged]
    if isinstance(value, dict):
        return {name: _kind(entry) for name, entry in value.items()}
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "float64"  # what Arrow reads such a number as
    return _SCALARS.get(type(value), "null")


def _merge(one: Any, other: Any) -> Any:
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    if isinstance(one, list) and isinstance(other, list):
        return ["list", _merge(one[1], other[1])]
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {name: _merge(one.get(name, "null"), kind) for name, kind in other.items()}
    return "float64" if {str(one), str(other)} == {"int64", "float64"} else "json"


def _spell(kind: Any) -> dict[str, Any]:
    """The kind in the words of the YAML header."""
    if isinstance(kind, list):
        inner = _spell(kind[1])
        return {"list": inner.get("dtype") or inner.get("struct") or inner}
    if isinstance(kind, dict) and kind:
        return {"struct": [{"name": name, **_spell(inner)} for name, inner in kind.items()]}
    return {"dtype": {"null": "string"}.get(kind, kind) if kind else "json"}


def render_card(
    name: str, licence: str, num_rows: dict[str, int], features: list[dict[str, Any]], num_images: int
) -> str:
    """Returns the text of README.md.

    Args:
        name: Title.
        licence: Identifier as the hub spells it; "" = leave the field out.
        num_rows: Rows of each split, `<split>.jsonl`.
        features: From `FieldTypes.features`.
        num_images: Files under images/.
    """
    total = sum(num_rows.values())
    header = {
        "pretty_name": name,
        "task_categories": ["visual-document-retrieval"],
        "size_categories": [next((text for limit, text in SIZES if total < limit), "n>1M")],
        "configs": [
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"{split}.jsonl"} for split in num_rows],
            }
        ],
        "dataset_info": {"config_name": "default", "features": features},
    }
    if licence:
        header["license"] = licence
    table = "".join(f"| {split} | {rows} |\n" for split, rows in num_rows.items())
    fields = "".join(f"- `{field['name']}`: {_MEANINGS.get(field['name'], 'additional field')}\n" for field in features)
    return f"""---
{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---

# {name}

Queries and the page tiles (screenshots) that answer them, for training a retriever of page images.

| split | rows |
|---|---|
{table}
{num_images} images under `images/`.

## Fields

{fields}
## Use

    from datasets import load_dataset
    rows = load_dataset("path/to/this/folder")

Paths in the rows are relative to this folder. Where the images come as tar files in `shards/`, unpack them here first:

    python extract_hf_image_shards.py --dataset-dir path/to/this/folder

(or `sha256sum -c SHA256SUMS` and `tar xf` each of them; the members are named `images/...`).
"""
