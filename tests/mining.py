"""What the tests of mining share: flags of a quick run, plain embeddings, and sums that must come out."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from contrastors.batches import ItemDataset
from contrastors.distributed import World
from contrastors.evaluation import embed
from contrastors.loading import load_encoder
from contrastors.negatives import FILTER_MODES
from tests.conftest import write_rows

WORLD = World(0, 1, torch.device("cpu"))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def flags_of(folder: Path, checkpoint: Path, **flags: object) -> list[str]:
    """A quick run over 12 coloured tiles; a flag set to None is left out, True is a switch."""
    defaults = {
        "input": folder / "rows.jsonl", "output": folder / "hn.jsonl", "model": checkpoint, "max_num_visual_tokens": 16,
        "num_workers": 0, "device": "cpu", "batch_size": 4, "num_negatives": 3,
    }  # fmt: skip
    argv: list[str] = []
    for name, value in (defaults | flags).items():
        if value is not None:
            argv += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return argv


def check_counts(stats: dict) -> None:
    """Every row and every candidate is accounted for."""
    rows, funnel = stats["rows"], Counter(stats["funnel"])
    assert rows["input"] == rows["written"] + rows["bad"] + rows["failed"]
    dropped = sum(funnel[f"dropped_by_{mode}"] for mode in FILTER_MODES)
    assert funnel["retrieved"] == funnel["positives"] + funnel["copies"] + dropped + funnel["kept"]
    assert funnel["kept"] == funnel["written"] + funnel["surplus"]


def embed_all(model: Path, kind: str, sources: list[str], dtype: str = "fp32") -> np.ndarray:
    """Embeddings by another way than the script's store."""
    encoder = load_encoder(str(model), None, WORLD, dtype, 16, 512)
    dataset = ItemDataset(encoder.processor, kind, list(map(str, sources)), 2**30)
    return embed(encoder.model, dataset, WORLD, 3, 0).numpy()


def same_but_scores(first: list[dict], second: list[dict], tolerance: float = 1e-5) -> None:
    """Compares rows whose scores may differ in their last digits."""

    def strip(row):
        entries = [{k: v for k, v in entry.items() if k != "score"} for entry in row["retrieve_top20"]]
        return row | {"retrieve_top20": entries, "positive_score": None}

    assert list(map(strip, first)) == list(map(strip, second))
    for a, b in zip(first, second, strict=True):
        assert a["positive_score"] == pytest.approx(b["positive_score"], abs=tolerance)
        scores = [[entry["score"] for entry in row["retrieve_top20"]] for row in (a, b)]
        assert scores[0] == pytest.approx(scores[1], abs=tolerance)


def write_spellings(folder: Path) -> list[dict]:
    """O21: one page under three spellings and as a byte copy, two pages for one query."""
    shutil.copy(folder / "c01.png", folder / "copy.png")
    shutil.copy(folder / "c05.png", folder / "copy_of_five.png")
    rows = [
        {"query": "red", "chunk_path": "c00.png"},
        {"query": "red", "chunk_path": "c01.png"},
        {"query": "blue", "chunk_path": "./c01.png"},
        {"query": "blue", "chunk_path": str(folder / "c02.png")},
        {"query": "white", "chunk_path": "c02.png"},
        *[{"query": f"more {n}", "chunk_path": f"c{n:02d}.png"} for n in range(3, 12)],
    ]
    write_rows(folder / "rows.jsonl", rows)
    return rows


def check_spellings(folder: Path, rows: list[dict]) -> None:
    forbidden = {"red": {"c00", "c01", "copy"}, "blue": {"c01", "copy", "c02"}, "white": {"c02"}, "more 5": {"c05"}}
    for row in rows:
        names = [Path(path).stem for path in row["neg_chunk_paths"]]
        assert not forbidden.get(row["query"], set()) & set(names), (row["query"], names)
        assert len(names) == len({(folder / f"{name}.png").read_bytes() for name in names})  # no negative twice
        assert len(names) >= 8
