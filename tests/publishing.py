"""What the tests of publishing share: a split folder with tiles, and ways to run the scripts in this process."""

from __future__ import annotations

import random
from pathlib import Path

from PIL import Image

import extract_hf_image_shards
import package_hf_image_shards
import prepare_hf_dataset
from contrastors.records import read_jsonl
from tests.conftest import write_rows


def draw_tile(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (40, 40), random.Random(seed).randbytes(4800)).save(path)
    return path


def make_split_dir(tmp_path: Path) -> Path:
    """Twelve tiles in three folders; rows with relative, absolute and dotted paths, and fields of their own."""
    tiles, rows = tmp_path / "tiles", tmp_path / "chunks" / "split"
    rows.mkdir(parents=True)
    names = [f"site{number // 4}/page{number:02d}.png" for number in range(12)]
    for number, name in enumerate(names):
        draw_tile(tiles / name, number)
    made = []
    for number, name in enumerate(names):
        other, third = names[(number + 1) % 12], names[(number + 2) % 12]
        paths = [f"../../tiles/{name}", str(tiles / name), f"../split/../../tiles/./{name}"]
        candidates = [{"rank": 1, "path": str(tiles / other), "score": 0.5}]
        row = {"id": number, "query": f"page {number}\u2028two", "chunk_path": paths[number % 3]}
        made.append(row | {"neg_chunk_paths": [f"../../tiles/{third}"], "retrieve_top20": candidates})
    write_rows(rows / "train_hn.jsonl", made[:8])
    write_rows(rows / "train.jsonl", made[:1])
    plain = [{key: row[key] for key in ("query", "chunk_path")} | {"page": {"nr": 1}} for row in made[8:10]]
    write_rows(rows / "eval.jsonl", plain)
    return rows


def prepare(split_dir: Path, *flags: str, root: Path | None = None, output: Path | None = None) -> int:
    root = root or split_dir.parent.parent / "tiles"
    output = output or split_dir.parent.parent / "export"
    command = ["--split-dir", str(split_dir), "--image-root", str(root), "--output-dir", str(output)]
    return prepare_hf_dataset.main([*command, "--num-workers", "0", *flags])


def package(source: Path, output: Path, *flags: str) -> int:
    return package_hf_image_shards.main(["--source-dir", str(source), "--output-dir", str(output), *flags])


def extract(folder: Path, *flags: str) -> int:
    return extract_hf_image_shards.main(["--dataset-dir", str(folder), *flags])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(file: Path) -> list[dict]:
    return [record.data for record in read_jsonl(file)]
