"""Shared fixtures: a tiny random Qwen3-VL checkpoint, a small set of coloured tiles, and ways to run the scripts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The same examples everywhere, however busy the machine; tests/fuzz.py looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

COLOURS = {
    "red": (200, 0, 0), "green": (0, 150, 0), "blue": (0, 0, 220), "white": (255, 255, 255), "black": (0, 0, 0),
    "yellow": (240, 220, 0), "cyan": (0, 220, 220), "magenta": (220, 0, 220), "orange": (255, 140, 0),
    "pink": (255, 150, 180), "brown": (120, 70, 20), "grey": (128, 128, 128),
}  # fmt: skip


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_colour_set(tmp_path: Path) -> Path:
    """F1 of the cases: 12 PNGs of one colour with its name, and rows.jsonl with two negatives each."""
    from PIL import Image, ImageDraw

    rows, names = [], list(COLOURS)
    for number, (name, rgb) in enumerate(COLOURS.items()):
        image = Image.new("RGB", (64, 64), rgb)
        ImageDraw.Draw(image).text((4, 26), name, fill=(255, 255, 255) if sum(rgb) < 380 else (0, 0, 0))
        image.save(tmp_path / f"c{number:02d}.png")
        negatives = [f"c{(number + 1) % 12:02d}.png", f"c{(number + 2) % 12:02d}.png"]
        rows.append({"query": names[number], "chunk_path": f"c{number:02d}.png", "neg_chunk_paths": negatives})
    write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


@pytest.fixture(autouse=True)
def signals_as_before():
    from tests.runs import signals_kept

    with signals_kept():
        yield


@pytest.fixture
def colour_set(tmp_path: Path) -> Path:
    return make_colour_set(tmp_path)


@pytest.fixture
def split_dir(tmp_path: Path) -> Path:
    from tests.publishing import make_split_dir

    return make_split_dir(tmp_path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F3 of the cases: a two-layer Qwen3-VL with random weights, as a checkpoint folder."""
    from contrastors.demo import make_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    return make_model(folder, seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)


@pytest.fixture
def args(tiny_model, colour_set):
    """args(output, **flags) -> argv of a quick training; `colour_set` is the folder of its data."""
    from tests.runs import arguments

    def build(output: str, **flags: object) -> list[str]:
        return arguments(tiny_model, colour_set, colour_set / output, **flags)

    return build


@pytest.fixture
def mine(colour_set, tiny_model):
    """Runs the mining script in this process; returns the rows and the stats."""
    from mine_hard_negatives import main
    from tests.mining import check_counts, flags_of, read

    def run(**flags: object) -> tuple[list[dict], dict]:
        argv = flags_of(colour_set, tiny_model, **flags)
        assert main(argv) == 0
        output = Path(argv[argv.index("--output") + 1])
        stats = json.loads(Path(f"{str(output).removesuffix('.jsonl')}.stats.json").read_text())
        assert stats["completed"]
        check_counts(stats)
        return read(output), stats

    return run
