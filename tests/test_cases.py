"""What goes wrong for people who do this job, across the scripts: one rule for pictures, rows and paths in all of them.

docs/robustness.md tells every case, what is done about it, and the tests that show it; the last test here keeps that
table true.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import tomllib
import unicodedata
import zlib
from collections.abc import Callable
from importlib.metadata import version as metadata_version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from PIL import Image
from safetensors.torch import load_file, save_file

from contrastors import cli
from tests.conftest import COLOURS, ROOT, make_colour_set, write_rows
from tests.judge_server import JudgeServer, Played, Request, error
from tests.runs import arguments, losses, metrics, same_weights, train, warm_torchrun, weights
from tests.test_verify import model_with

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")

SCRIPTS = ("train", "mine", "verify", "filter", "chunks", "convert", "prepare")
OF_MODEL = ("train", "mine", "verify")


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The colour set with, in `run`, two checkpoints of a short training on both parts of the model."""
    folder = make_colour_set(tmp_path_factory.mktemp("trained"))
    assert train(arguments(tiny_model, folder, folder / "run", lora_vit=True)) == 0
    return folder


def words(flags: dict[str, Any]) -> list[str]:
    """Flags as words; True is a switch, None is left out."""
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in flags.items() if value is not None]
    return [word for flag, value in pairs for word in ([flag] if value is True else [flag, str(value)])]


class Scripts:
    """Runs any script on the rows of DATA/train.jsonl; results go to the folder `out`, bad rows to a file in it."""

    def __init__(self, model: Path, adapter: Path, out: Path):
        self.model, self.adapter, self.out = model, adapter, out
        self.reply: Callable[[Request], Played | str] = lambda request: "CANNOT_ANSWER"
        self.requests: list[Request] = []
        out.mkdir(exist_ok=True)

    def run(self, name: str, source: Path | str, **flags: Any) -> int:
        """Returns the exit code."""
        if name == "train":
            flags = {"max_steps": 1, "save_steps": 0, "eval_steps": 1, "num_hard_negatives": 2} | flags
            rows = {"train_jsonl": source, "eval_jsonl": source}
            return train(arguments(self.model, self.out, self.out, **(rows | flags)))
        main, own = getattr(self, f"_{name}")(source)
        if name not in ("filter", "chunks"):
            return main(words(own | flags))
        with JudgeServer(self.reply) as server:
            code = main(words({"input": source, "base_url": server.url} | own | flags))
            self.requests = server.requests
        return code

    def _mine(self, source: Path | str) -> tuple[Callable, dict[str, Any]]:
        from mine_hard_negatives import main

        own = {"input": source, "output": self.out / "mined.jsonl", "model": self.model, "max_num_visual_tokens": 16}
        return main, own | {"num_workers": 0, "device": "cpu", "num_negatives": 2}

    def _verify(self, source: Path | str) -> tuple[Callable, dict[str, Any]]:
        from verify_embeddings import main

        own = {"adapter": self.adapter, "eval_jsonl": source, "output": self.out / "verify.json"}
        return main, own | {"num_workers": 0, "device": "cpu"}

    def _filter(self, source: Path | str) -> tuple[Callable, dict[str, Any]]:
        from filter_hard_negatives_vqa import main

        return main, {"output": self.out / "kept.jsonl"}

    def _chunks(self, source: Path | str) -> tuple[Callable, dict[str, Any]]:
        from run_filter_hard_negatives_chunks import main

        return main, {"output_dir": self.out, "chunk_size": 20}

    def _convert(self, source: Path | str) -> tuple[Callable, dict[str, Any]]:
        from convert_data_for_swift import main

        return main, {"input": source, "output": self.out / "swift.jsonl", "num_workers": 0}

    def _prepare(self, source: Path | str) -> tuple[Callable, dict[str, Any]]:
        from prepare_hf_dataset import main

        folder = os.path.dirname(os.path.abspath(source))
        own = {"split_dir": folder, "image_root": folder, "output_dir": self.out / "export"}
        return main, own | {"num_workers": 0}

    def bad_rows(self) -> list[dict[str, Any]]:
        return [row for file in self.out.glob("*bad_rows.jsonl") for row in read(file)]


@pytest.fixture
def scripts(tiny_model: Path, trained: Path, tmp_path: Path) -> Scripts:
    return Scripts(tiny_model, trained / "run" / "checkpoint-4", tmp_path / "out")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().split(b"\n") if line]


def rows_in_a_ring(names: list[str]) -> list[dict[str, Any]]:
    """A row a picture, with the next two as hard negatives and candidates."""
    rows = []
    for place, name in enumerate(names):
        others = [names[(place + step) % len(names)] for step in (1, 2)]
        candidates = [{"rank": rank, "path": path, "score": 0.5} for rank, path in enumerate(others, start=1)]
        row = {"query": f"page {place}", "chunk_path": name, "neg_chunk_paths": others}
        rows.append(row | {"retrieve_top20": candidates})
    return rows


# --- pictures: every script shows the model, the judge or swift the same one ---


UPRIGHT = np.zeros((64, 96, 3), dtype=np.uint8)
UPRIGHT[:32, :48], UPRIGHT[:32, 48:], UPRIGHT[32:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
RAMP = np.arange(0, 65536, 1040, dtype=np.uint16)[:64]


def make_odd_pictures(folder: Path) -> dict[str, np.ndarray]:
    """Writes pictures that loaders get wrong; returns what must be seen of each."""
    across, down = np.tile(RAMP, (64, 1)), np.tile(RAMP[:, None], (1, 64))
    for name, samples in (("across.png", across), ("down.png", down)):
        Image.fromarray(samples).save(folder / name)
    turned = Image.Exif()
    turned[0x0112] = 6
    upright, dark = Image.fromarray(UPRIGHT), Image.fromarray(UPRIGHT // 2)
    dark.transpose(Image.Transpose.ROTATE_90).save(folder / "photo.png", exif=turned)
    Image.new("RGB", (64, 64), (255, 0, 0)).save(folder / "red.png")
    Image.new("CMYK", (64, 64), (0, 255, 255, 0)).save(folder / "cmyk.jpg", quality=100, subsampling=0)
    Image.new("RGBA", (64, 64), (0, 90, 0, 0)).save(folder / "clear.png")
    upright.save(folder / "webp as.jpg", format="WEBP", lossless=True)
    Image.fromarray(255 - UPRIGHT).save(folder / "png as.JPG", format="PNG")
    Image.new("RGB", (64, 64), (9, 8, 7)).save(folder / "bitmap.bmp")
    Image.new("RGB", (64, 64), (77, 77, 77)).save(folder / "real.jpeg", quality=100)
    grey = {name: np.repeat((np.round(s / 257)).astype(np.uint8)[:, :, None], 3, axis=2)
            for name, s in (("across.png", across), ("down.png", down))}  # fmt: skip

    def plain(*rgb: int) -> np.ndarray:
        return np.broadcast_to(np.uint8(rgb), (64, 64, 3))

    return grey | {
        "photo.png": UPRIGHT // 2, "webp as.jpg": UPRIGHT, "png as.JPG": 255 - UPRIGHT, "red.png": plain(255, 0, 0),
        "cmyk.jpg": plain(254, 0, 0), "clear.png": plain(255, 255, 255), "bitmap.bmp": plain(9, 8, 7),
        "real.jpeg": plain(77, 77, 77),
    }  # fmt: skip


def strict(request: Request) -> Played | str:
    """A judge that takes no picture whose bytes are of another type than it is told."""
    kinds = {b"\x89PNG": "image/png", b"\xff\xd8\xff\xe0": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif"}
    is_told_rightly = kinds.get(request.image_bytes[:4]) == request.media_type
    return "CANNOT_ANSWER" if is_told_rightly else error(400, f"no {request.media_type}")


def pictures_for_swift(out: Path) -> list[np.ndarray]:
    rows = read(out / "swift.jsonl")
    paths = {path for row in rows for (path,) in [*row["positive_images"], *row["negative_images"]]}
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]  # as swift opens them


@pytest.mark.parametrize("name", [*OF_MODEL, "filter", "chunks", "convert"])
def test_every_script_sees_the_same_pictures(scripts: Scripts, tmp_path: Path, monkeypatch, name: str):
    """16-bit, turned, CMYK, transparent, and files with another ending than their content."""
    from contrastors.processing import BiQwen3Processor

    wanted = make_odd_pictures(tmp_path)
    source, seen = write_rows(tmp_path / "train.jsonl", rows_in_a_ring(list(wanted))), []
    encode = BiQwen3Processor.encode_document
    monkeypatch.setattr(
        BiQwen3Processor, "encode_document", lambda self, image: seen.append(np.asarray(image)) or encode(self, image)
    )
    scripts.reply = strict
    assert scripts.run(name, source) == 0
    seen += [np.asarray(request.image.convert("RGB")) for request in scripts.requests]
    if name == "convert":
        seen += pictures_for_swift(scripts.out)

    def is_seen(picture: np.ndarray) -> bool:
        return any(picture.shape == s.shape and abs(picture.astype(int) - s).max() <= 2 for s in seen)

    assert [file for file, picture in wanted.items() if not is_seen(picture)] == []


def test_published_pictures_are_the_files_byte_by_byte(scripts: Scripts, tmp_path: Path):
    from extract_hf_image_shards import main as extract
    from package_hf_image_shards import main as package

    names = list(make_odd_pictures(tmp_path))
    assert scripts.run("prepare", write_rows(tmp_path / "train.jsonl", rows_in_a_ring(names))) == 0
    assert package(words({"source_dir": scripts.out / "export", "output_dir": tmp_path / "packed"})) == 0
    assert extract(words({"dataset_dir": tmp_path / "packed"})) == 0
    for row, name in zip(read(tmp_path / "packed" / "train.jsonl"), names, strict=True):
        assert (tmp_path / "packed" / row["chunk_path"]).read_bytes() == (tmp_path / name).read_bytes()


# --- pictures: used, or named; nothing in between ---


def png(width: int, height: int, **chunks: bytes) -> bytes:
    """A 1-bit PNG of zeros with further chunks, made by hand."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = chunk(b"IHDR", width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0]))
    more = b"".join(chunk(kind.encode(), data) for kind, data in chunks.items())
    pixels = chunk(b"IDAT", zlib.compress(bytes((width // 8 + 1) * height), 9))
    return b"\x89PNG\r\n\x1a\n" + header + more + pixels + chunk(b"IEND", b"")


GOOD_SIZES = [(31, 639), (1, 1), (1, 200), (3, 3), (10, 2000), *[(64, 64)] * 7]
BAD = {
    "bomb.png": "15000x15000 is over the limit of 178956970 pixels (--max-image-pixels)",
    "profile.png": "Decompressed data too large",
    "note.png": "Decompressed data too large",
    "strip.png": "1x201 has an aspect ratio over 200",
    "longer.png": "10x2500 has an aspect ratio over 200",
    "cut.png": "truncated",
    "words.png": "not a picture of a known format",
    "gone.png": "No such file or directory",
}


def colour_of(place: int) -> tuple[int, int, int]:
    return place * 9, 250 - place * 9, 40


def make_good_and_bad_pictures(folder: Path) -> Path:
    """Rows with good positives of odd sizes, then one for each bad picture; the others of every row are good."""
    names = [f"{place}.png" for place in range(len(GOOD_SIZES))]
    for place, size in enumerate(GOOD_SIZES):
        Image.new("RGB", size, colour_of(place)).save(folder / names[place])
    (folder / "bomb.png").write_bytes(png(15000, 15000))
    (folder / "profile.png").write_bytes(png(64, 64, iCCP=b"icc\0\0" + zlib.compress(bytes(2_000_000))))
    (folder / "note.png").write_bytes(png(64, 64, zTXt=b"text\0\0" + zlib.compress(bytes(2_000_000))))
    (folder / "strip.png").write_bytes(png(1, 201))
    (folder / "longer.png").write_bytes(png(10, 2500))
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "whole.png")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:4000])
    (folder / "words.png").write_text("no picture")
    rows = rows_in_a_ring(names)
    bad = [row | {"query": f"bad {name}", "chunk_path": name} for name, row in zip(BAD, rows, strict=False)]
    return write_rows(folder / "train.jsonl", [*rows, *bad])


def knows_positives(request: Request) -> str:
    """Judges a picture by its colour: the positive of "page N" answers it."""
    if request.is_verdict:
        return "CORRECT"
    is_positive = request.image.getpixel((0, 0)) == colour_of(int(request.query.split()[-1]))
    return "found" if is_positive else "CANNOT_ANSWER"


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_uses_odd_sizes_and_names_what_it_cannot_use(scripts: Scripts, tmp_path: Path, capfd, name: str):
    """With the smallest limit of visual tokens; the reason names size, limit or damage, and no run ends half-way."""
    source, first_bad = make_good_and_bad_pictures(tmp_path), len(GOOD_SIZES) + 1
    scripts.reply = knows_positives
    flags = {"max_num_visual_tokens": 4} if name in OF_MODEL else {}
    if name in ("filter", "chunks"):
        flags["check_positive"] = True  # it opens no positive otherwise
    assert scripts.run(name, source, max_bad_fraction=0.5, **flags) == 0
    found = {row["line"]: (row["path"], row["reason"]) for row in scripts.bad_rows()}
    assert sorted(found) == list(range(first_bad, first_bad + len(BAD)))
    for line, (file, words_of_reason) in enumerate(BAD.items(), start=first_bad):
        path, reason = found[line]
        assert path == str(tmp_path / file)
        assert words_of_reason in reason or (name in ("filter", "chunks") and file == "gone.png")
    for file in {"mine": ["mined.jsonl"], "filter": ["kept.jsonl"], "chunks": ["filtered_hn.jsonl"]}.get(name, []):
        assert [row["query"] for row in read(scripts.out / file)] == [f"page {n}" for n in range(len(GOOD_SIZES))]
    capfd.readouterr()
    shutil.rmtree(scripts.out)
    assert scripts.run(name, source, **flags) == 1  # 8 of 20 rows are over --max-bad-fraction 0.01
    said = capfd.readouterr().err
    first = "gone.png" if name in ("filter", "chunks") else "bomb.png"  # the filter looks for files before it judges
    assert "rows" in said and str(tmp_path / first) in said and "Traceback" not in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_pixel_limit_of_the_command_line_reaches_every_script(scripts: Scripts, tmp_path: Path, capfd, name: str):
    names = [f"{place}.png" for place in range(12)]
    for place, file in enumerate(names):
        Image.new("RGB", (64, 64 + (place == 11)), colour_of(place)).save(tmp_path / file)
    source = write_rows(tmp_path / "train.jsonl", rows_in_a_ring(names))
    scripts.reply = knows_positives
    flags = {"check_positive": True} if name in ("filter", "chunks") else {}
    assert scripts.run(name, source, max_image_pixels=64 * 64, **flags) == 1
    said = capfd.readouterr().err
    assert "64x65 is over the limit of 4096 pixels (--max-image-pixels)" in said and str(tmp_path / "11.png") in said
    assert "can no longer be read" not in said, "it is to be known before any work"


# --- rows ---


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_file_from_windows_gives_every_script_what_the_clean_one_gives(scripts: Scripts, tmp_path: Path, name: str):
    """BOM, CRLF, blank lines, no last newline, and separators that only look like line ends, unescaped."""
    make_colour_set(tmp_path)
    rows = rows_in_a_ring([f"c{place:02d}.png" for place in range(12)])
    rows[3]["query"], rows[4]["query"] = "two\u2028lines\u0085or three", "\ufeffmark"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    forms = {"clean": "\n".join([*map(json.dumps, rows), ""]), "windows": "\ufeff" + "\r\n\r\n \r\n".join(lines)}
    source, found = tmp_path / "train.jsonl", []
    for form, text in forms.items():
        source.write_bytes(text.encode())
        scripts.out = tmp_path / form
        scripts.out.mkdir()
        assert scripts.run(name, source) == 0
        found.append(outcome(name, scripts.out))
    assert found[0] == found[1]
    if name not in ("train", "verify"):
        text = repr(found[1])
        assert "two\\u2028lines\\x85or three" in text and "\\ufeffmark" in text


def outcome(name: str, out: Path) -> Any:
    """What a script found, as far as it does not name its folder."""
    if name == "train":
        return metrics(out)
    if name == "verify":
        found = json.loads((out / "verify.json").read_text())
        return found["models"][1]["metrics"], [row["rank"] for row in found["queries"]]
    file = {"mine": "mined.jsonl", "filter": "kept.jsonl", "chunks": "filtered_hn.jsonl", "convert": "swift.jsonl",
            "prepare": "export/train.jsonl"}[name]  # fmt: skip
    return read(out / file)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    "content", ["", "\ufeff\r\n \n", "{broken", '{"query": 7}', '{"query": "q", "chunk_path": []}']
)
def test_every_script_names_file_and_line_of_what_it_cannot_read(
    scripts, tmp_path: Path, capfd, name: str, content: str
):
    make_colour_set(tmp_path)
    good = rows_in_a_ring(["c00.png", "c01.png", "c02.png"])
    text = "" if not content.strip("\ufeff\r\n ") else "".join(json.dumps(row) + "\r\n" for row in good)
    (tmp_path / "train.jsonl").write_text(text + content, encoding="utf-8", newline="")
    assert scripts.run(name, tmp_path / "train.jsonl") == 1
    said = capfd.readouterr().err.strip()
    where = f"{tmp_path / 'train.jsonl'}, line 4: " if text else f"{tmp_path / 'train.jsonl'}: holds no rows"
    assert said.startswith("error: ") and where in said and "\n" not in said


# --- paths ---


def test_paths_lead_from_script_to_script_whatever_their_names_and_folders(
    scripts: Scripts, tmp_path: Path, monkeypatch, capsys
):
    """Mined, filtered, trained, converted and verified in one folder each, from a folder with decoys of the same names.

    Names are decomposed on the disk and composed in the rows.
    """
    from contrastors.processing import BiQwen3Processor

    data, decoys, deep = tmp_path / "data", tmp_path / "decoys", tmp_path / "a" / "b"
    names = [f"tiles/\u00e9 #{place} 50%.png" for place in range(12)]
    colours = list(COLOURS.values())
    for folder, palette in ((data, colours), (decoys, [(1, 2, 3)] * 12)):
        (folder / "tiles").mkdir(parents=True)
        for name, rgb in zip(names, palette, strict=True):
            Image.new("RGB", (64, 64), rgb).save(folder / unicodedata.normalize("NFD", name))
    rows = [{"query": f"page {place}", "chunk_path": name} for place, name in enumerate(names)]
    write_rows(data / "pairs.jsonl", rows)
    write_rows(decoys / "pairs.jsonl", rows)
    seen, encode = set(), BiQwen3Processor.encode_document
    monkeypatch.setattr(
        BiQwen3Processor, "encode_document",
        lambda self, image: seen.add(image.getpixel((0, 0))) or encode(self, image),
    )  # fmt: skip
    monkeypatch.chdir(decoys)
    assert scripts.run("mine", "../data/pairs.jsonl", output="../a/mined.jsonl") == 0
    assert scripts.run("filter", "../a/mined.jsonl", output="../a/b/kept.jsonl") == 0
    assert scripts.run("chunks", tmp_path / "a" / "mined.jsonl") == 0
    assert scripts.run("train", "../a/b/kept.jsonl") == 0
    assert "paths were found under their other Unicode form" not in capsys.readouterr().out, "written as on the disk"
    monkeypatch.chdir("/")
    assert scripts.run("verify", scripts.out / "filtered_hn.jsonl") == 0
    assert scripts.run("convert", deep / "kept.jsonl") == 0
    assert seen | {request.image.getpixel((1, 1)) for request in scripts.requests} == set(colours)
    assert {tuple(picture[0, 0].tolist()) for picture in pictures_for_swift(scripts.out)} == set(colours)
    assert [row["query"] for row in read(deep / "kept.jsonl")] == [row["query"] for row in rows]


# --- numbers: finite, or a sentence ---


def is_finite(checkpoint: Path) -> bool:
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"].values()
    tensors = [*weights(checkpoint).values(), *load_file(checkpoint / "logit_scale.safetensors").values()]
    tensors += [value for state in optimizer for value in state.values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_rows_with_0_1_and_3_negatives_in_one_batch_leave_everything_finite(scripts: Scripts, colour_set: Path):
    rows = read(colour_set / "rows.jsonl")
    for place, row in enumerate(rows):
        row["neg_chunk_paths"] = [f"c{(place + step) % 12:02d}.png" for step in (1, 2, 3)][: (0, 1, 3)[place % 3]]
    source = write_rows(colour_set / "train.jsonl", rows)
    flags = {"batch_size": 12, "num_hard_negatives": 3, "max_steps": 3, "save_steps": 1, "eval_steps": 3}
    assert scripts.run("train", source, **flags) == 0
    assert all(is_finite(scripts.out / f"checkpoint-{step}") for step in (1, 2, 3))
    temperatures = [row["train/temperature"] for row in metrics(scripts.out) if "train/temperature" in row]
    assert len(set(temperatures)) == 3 and all(0.01 <= value <= 1 for value in temperatures)


def test_a_model_of_zero_vectors_ends_in_a_sentence_and_leaves_no_checkpoint(
    scripts: Scripts, colour_set: Path, tiny_model: Path, tmp_path: Path, capsys
):
    scripts.model = shutil.copytree(tiny_model, tmp_path / "zero")
    tensors = load_file(scripts.model / "model.safetensors")
    tensors[next(key for key in tensors if key.endswith("language_model.norm.weight"))].zero_()
    save_file(tensors, scripts.model / "model.safetensors", metadata={"format": "pt"})
    assert scripts.run("train", colour_set / "rows.jsonl", max_steps=2) == 1
    printed = capsys.readouterr()
    assert "every B matrix is zero after training" in printed.err
    assert "24 embeddings are zero" in printed.out
    assert all(math.isfinite(loss) for loss in losses(scripts.out)) and not list(scripts.out.glob("checkpoint-*"))
    assert scripts.run("verify", colour_set / "rows.jsonl", model=scripts.model) == 1
    assert "every embedding is zero" in capsys.readouterr().err
    assert scripts.run("mine", colour_set / "rows.jsonl") == 0
    assert "warning: 24 embeddings are zero" in capsys.readouterr().out


def test_a_query_that_embeds_to_nan_stops_mining_by_its_text(
    scripts: Scripts, colour_set: Path, tiny_model: Path, tmp_path: Path, capsys
):
    def poison(matrix: torch.Tensor, tokenizer: Any) -> None:
        others = {token for name in list(COLOURS)[:-1] for token in tokenizer(name)["input_ids"]}
        matrix[next(token for token in tokenizer("grey")["input_ids"] if token not in others)] = math.nan

    scripts.model = model_with(tiny_model, tmp_path / "model", poison)
    assert scripts.run("mine", colour_set / "rows.jsonl") == 1
    assert "the embedding of query 'grey' is not finite (1 such)" in capsys.readouterr().err
    assert not (scripts.out / "mined.jsonl").exists()


def test_a_tile_that_embeds_to_nan_is_counted_and_never_found_by_mining(
    scripts: Scripts, colour_set: Path, monkeypatch, capsys
):
    from contrastors.biqwen3 import BiQwen3

    forward, black = BiQwen3.forward, "../c04.png"  # as the output, one folder deeper, names it

    def overflow(self: BiQwen3, **chunk: torch.Tensor) -> torch.Tensor:
        vectors = forward(self, **chunk)
        if "pixel_values" in chunk:
            pages = chunk["pixel_values"].split(chunk["image_grid_thw"].prod(dim=1).tolist())
            vectors[[not page[0].any() for page in pages]] = math.nan
        return vectors

    monkeypatch.setattr(BiQwen3, "forward", overflow)
    assert scripts.run("mine", colour_set / "rows.jsonl", num_negatives=20) == 0
    assert "1 tiles have an embedding that is not finite" in capsys.readouterr().out
    rows = [json.loads(line, parse_constant=pytest.fail) for line in open(scripts.out / "mined.jsonl")]
    assert not any(black == path for row in rows for path in row["neg_chunk_paths"])
    assert not any(entry["path"] == black for row in rows for entry in row["retrieve_top20"])
    assert [row["positive_score"] is None for row in rows] == [row["chunk_path"] == black for row in rows]


def test_a_measure_that_is_nan_never_makes_a_best_checkpoint(scripts: Scripts, colour_set: Path):
    """One document has nothing to lie apart from: its margin is unknown."""
    alone = write_rows(colour_set / "alone.jsonl", [{"query": "red", "chunk_path": "c00.png"}])
    assert scripts.run("train", colour_set / "rows.jsonl", eval_jsonl=alone, best_metric="margin", max_steps=2) == 0
    found = [json.loads(line, parse_constant=pytest.fail) for line in open(scripts.out / "metrics.jsonl")]
    assert [row["eval/margin"] for row in found if "eval/margin" in row] == [None] * 3
    summary = json.loads((scripts.out / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["best"]["step"] is None and not (scripts.out / "best.json").exists()


def test_an_empty_evaluation_file_is_an_error_before_training(scripts: Scripts, colour_set: Path, capsys):
    (colour_set / "empty.jsonl").write_text("\n")
    assert scripts.run("train", colour_set / "rows.jsonl", eval_jsonl=colour_set / "empty.jsonl") == 1
    assert "empty.jsonl: holds no rows" in capsys.readouterr().err
    assert not (scripts.out / "metrics.jsonl").exists()


def test_retrieval_in_bf16_has_distinct_scores_and_does_not_depend_on_the_order_of_the_file(
    tiny_model: Path, tmp_path: Path
):
    from contrastors.batches import ItemDataset
    from contrastors.distributed import World
    from contrastors.evaluation import build_eval_set, embed, evaluate
    from contrastors.images import MAX_IMAGE_PIXELS
    from contrastors.loading import load_bi_encoder
    from contrastors.metrics import query_metrics
    from contrastors.records import Pair
    from contrastors.validation import check_image

    pages = [str(tmp_path / f"{place:03d}.png") for place in range(60)]
    for place, page in enumerate(pages):
        Image.new("RGB", (32, 32), (100 + place % 4, 100 + place // 4 % 4, 100 + place // 16)).save(page)
    world, facts = World(0, 1, torch.device("cpu")), {page: check_image(page) for page in pages}
    model, processor = load_bi_encoder(str(tiny_model), world.device, "bf16", "auto", 16)
    options, found = (14.0, 64, 0, MAX_IMAGE_PIXELS), []
    for order in (pages, pages[::-1]):  # the positive of "grey" stands last in the corpus, then first
        other = Pair(0, 1, "other", order[0], order[1:])
        data = build_eval_set([other, Pair(1, 2, "grey", pages[-1])], facts)
        assert data.documents.paths == order
        found.append(evaluate(model, processor, data, world, *options).per_query[1])
    numbers = [{name: value for name, value in row.items() if isinstance(value, float)} for row in found]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
    model.eval()
    sources = {"query": ["grey"], "document": pages}
    query, documents = (
        embed(model, ItemDataset(processor, kind, items, MAX_IMAGE_PIXELS), world, 64, 0)
        for kind, items in sources.items()
    )
    scores = (query @ documents.T)[0]
    assert len(scores.unique()) > 20 > len(scores.bfloat16().unique())
    assert found[0]["rank"] == query_metrics(scores.numpy(), [59])["rank"]
    assert found[0]["rank"] != query_metrics(scores.bfloat16().float().numpy(), [59])["rank"]


# --- adapters ---


def test_the_log_tells_how_many_modules_of_each_part_are_adapted(trained: Path):
    saved = [key for key in weights(trained / "run" / "checkpoint-4") if "lora_A" in key]
    num_vision = sum("visual" in key for key in saved)
    line = f"adapter: {len(saved) - num_vision} language and {num_vision} vision modules, {2 * len(saved)} tensors"
    assert num_vision and line in (trained / "run" / "train.log").read_text()


def test_a_resumed_run_trains_the_same_adapter_on_an_untouched_base(trained: Path, tiny_model: Path, tmp_path: Path):
    run, base = tmp_path / "run", {file.name: file.read_bytes() for file in tiny_model.iterdir()}
    shutil.copytree(trained / "run", run)
    assert train(["--resume", str(run / "checkpoint-2")]) == 0
    says = [line for line in (run / "train.log").read_text().splitlines() if line.startswith("adapter: ")]
    assert len(says) == 2 and says[0] == says[1]
    assert losses(run) == losses(trained / "run")
    assert same_weights(run / "checkpoint-4", trained / "run" / "checkpoint-4")
    assert {file.name: file.read_bytes() for file in tiny_model.iterdir()} == base


def test_mining_with_an_adapter_scores_what_training_scored_with_it(scripts: Scripts, trained: Path):
    assert scripts.run("mine", trained / "rows.jsonl", adapter=scripts.adapter) == 0
    mined = [row["positive_score"] for row in read(scripts.out / "mined.jsonl")]
    evaluated = [row["positive_similarity"] for row in read(trained / "run" / "eval_step4.jsonl")]
    assert mined == pytest.approx(evaluated, abs=1e-5)


# What torchrun starts in place of the script: at the end every rank saves what it holds.
EACH_RANK_SAVES = """
import sys
import train_contrastors as script
from safetensors.torch import save_file
loop, folder = script.train, sys.argv.pop(1)
def train(run):
    loop(run)
    held = run.model.trainable_parameters() | dict(run.logit_scale.named_parameters())
    save_file({name: value.detach().clone() for name, value in held.items()}, f"{folder}/{run.world.rank}.safetensors")
script.train = train
sys.exit(script.main(sys.argv[1:]))
"""


@pytest.mark.dist
def test_ranks_hold_equal_weights_after_steps_in_which_one_lacks_negatives(
    tiny_model: Path, colour_set: Path, tmp_path: Path, monkeypatch
):
    """Vision and language adapters; queries have no pixels, and half of the rows no hard negatives."""
    rows = read(colour_set / "rows.jsonl")
    for row in rows[::2]:
        row["neg_chunk_paths"] = []
    write_rows(colour_set / "rows.jsonl", rows)
    (tmp_path / "each_rank.py").write_text(EACH_RANK_SAVES)
    flags = {"num_hard_negatives": 2, "lora_vit": True, "max_steps": 3, "eval_steps": 0, "batch_size": 2}
    argv = arguments(tiny_model, colour_set, tmp_path / "run", **flags)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code, text = warm_torchrun(2, tmp_path / "each_rank.py", tmp_path, *argv)
    assert code == 0, text[-3000:]
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.any() for name, value in first.items() if "lora_B" in name) and len(first) == 41


# --- libraries ---


def test_the_installed_transformers_is_one_that_the_requirement_allows():
    """Lower and other major versions return something else from the calls that are made here."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (allowed,) = (Requirement(text).specifier for text in wanted if Requirement(text).name == "transformers")
    assert metadata_version("transformers") in allowed
    assert not [version for version in ("4.57.1", "5.0.0", "6.0.0") if version in allowed]


@pytest.mark.parametrize("version", ["4.57.1", "5.18.2", "6.0.0", None])
def test_another_transformers_is_named_before_it_does_harm(
    monkeypatch, colour_set: Path, tiny_model: Path, version, capsys
):
    def of(name: str) -> str:
        if version is None:
            raise cli.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(cli.metadata, "version", of)
    assert train(arguments(tiny_model, colour_set, colour_set / "run")) == 1
    said = f"transformers {version} is installed" if version else "transformers is not installed"
    assert f"{said}, needed is 5.19 or newer, below 6" in capsys.readouterr().err.replace(";", ",")


def test_queries_that_evaluation_cut_are_counted(scripts: Scripts, colour_set: Path, capsys):
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    rows[3]["query"] += " and so on" * 20
    source = write_rows(colour_set / "long.jsonl", rows)
    assert scripts.run("train", source, max_query_tokens=40) == 0
    assert json.loads((scripts.out / "eval_step1.json").read_text())["num_truncated_queries"] == 1
    scripts.run("verify", source, max_query_tokens=40)
    assert "1 queries were cut at --max-query-tokens 40" in capsys.readouterr().out


# --- the table of cases ---


def test_the_table_of_cases_names_tests_that_exist():
    text = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| R\d+ ", line)]
    assert [line.split("|")[1].strip() for line in rows] == [f"R{number}" for number in range(1, 30)]
    for line in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", line.split("|")[-2])
        assert named, f"no test shows that {line.split('|')[1].strip()} holds"
    for file, name in re.findall(r"`(tests/\w+\.py)::(\w+)`", text):
        assert name in functions_of(ROOT / file), f"docs/robustness.md names {file}::{name}, which does not exist"
    assert len(re.findall(r"::test_", text)) == len(re.findall(r"`tests/\w+\.py::test_\w+`", text)), (
        "a name is not whole"
    )


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
