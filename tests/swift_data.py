"""What the tests of the ms-swift path share: a checkpoint with the token ids of Qwen, odd data, a quick run's flags."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import COLOURS, ROOT, make_colour_set, write_rows

FIRST_SPECIAL = 151643  # of Qwen's vocabulary; 151655 and 151656, image and video slots, are written into swift
VISUAL_TOKENS, NUM_NEGATIVES = 16, 2
# Queries that swift would read otherwise, on top of the colours; {image} is a file that exists.
QUERIES = (
    "<|image_pad|> red <|im_end|>", "<img>{image}</img> green", "blue <start-image>",
    "{{ROUND0}} white <image> {{SYSTEM}}", " black\nwith\u2028space ",
    "<|vision_start|><|image_pad|><|vision_end|>", "<think>é e\u0301</think> <<|endoftext|>>",
)  # fmt: skip


def make_checkpoint(folder: Path) -> Path:
    """Writes the demo's model with the ids of Qwen: a vocabulary filled up with words that no text has."""
    from contrastors.demo import SPECIAL_TOKENS, make_model

    make_model(folder, seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<filler {n}>": n for n in range(len(vocabulary), FIRST_SPECIAL)}
    ids = {token: FIRST_SPECIAL + place for place, token in enumerate(SPECIAL_TOKENS)}
    for token in tokenizer["added_tokens"]:
        token["id"] = ids[token["content"]]
    end = "<|endoftext|>"  # which the embedding checkpoints append
    last = {"SpecialToken": {"id": end, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, last],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"] + [last],
        "special_tokens": {end: {"id": end, "ids": [ids[end]], "tokens": [end]}},
    }
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    size = FIRST_SPECIAL + len(SPECIAL_TOKENS)
    config["text_config"] |= {"vocab_size": size, "pad_token_id": ids[end]}
    slots = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    slots |= {f"vision_{side}_token_id": f"<|vision_{side}|>" for side in ("start", "end")}
    config |= {name: ids[token] for name, token in slots.items()}
    file.write_text(json.dumps(config), encoding="utf-8")
    file = folder / "processor_config.json"
    processor = json.loads(file.read_text(encoding="utf-8"))
    processor["image_processor"]["size"]["shortest_edge"] = 65536  # as Qwen3-VL: small images are scaled up
    file.write_text(json.dumps(processor), encoding="utf-8")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (key,) = (key for key in tensors if key.endswith("embed_tokens.weight"))
    generator = torch.Generator().manual_seed(0)
    tensors[key] = torch.randn(size, tensors[key].shape[1], generator=generator) * 0.02
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def prepare(folder: Path) -> None:
    """Writes FOLDER/model and FOLDER/data: the coloured tiles, odd pictures, odd queries, and their conversion."""
    from convert_data_for_swift import main as convert

    make_checkpoint(folder / "model")
    data = folder / "data"
    data.mkdir()
    make_colour_set(data)
    page = Image.new("RGB", (300, 200), "white")
    page.paste((200, 30, 30), (0, 0, 120, 90))
    orientation = Image.Exif()
    orientation[0x0112] = 6
    page.resize((96, 64)).save(data / "turned.jpg", exif=orientation)
    page.save(data / "large.png")
    Image.new("RGBA", (64, 64), (0, 90, 0, 120)).save(data / "transparent.png")
    rows = [
        {"query": query, "chunk_path": f"c{n:02d}.png", "neg_chunk_paths": [f"c{(n + k) % 12:02d}.png" for k in (1, 2)]}
        for n, query in enumerate(COLOURS)
    ]
    for row, query in zip(rows, QUERIES, strict=False):
        row["query"] = query.replace("{image}", str(data / "c05.png"))
    rows[0]["neg_chunk_paths"][1] = "turned.jpg"
    rows[1]["neg_chunk_paths"][0] = "transparent.png"
    write_rows(data / "rows.jsonl", rows)
    argv = ["--input", str(data / "rows.jsonl"), "--output", str(data / "swift.jsonl"), "--num-workers", "0"]
    assert convert([*argv, "--num-hard-negatives", str(NUM_NEGATIVES)]) == 0


def train_flags(folder: Path, output: str) -> list[str]:
    """A quick run of train_swift.py: 12 rows, 4 a step."""
    flags = {
        "model": folder / "model", "train-jsonl": folder / "data" / "swift.jsonl",
        "eval-jsonl": folder / "data" / "swift.jsonl", "output-dir": folder / output, "batch-size": 4,
        "num-hard-negatives": NUM_NEGATIVES, "max-num-visual-tokens": VISUAL_TOKENS, "max-steps": 3, "save-steps": 2,
        "eval-steps": 2, "logging-steps": 1, "warmup-steps": 1, "lr": 1e-2, "lora-r": 4, "lora-alpha": 8,
        "num-workers": 0, "device": "cpu",
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def environment(folder: Path) -> dict[str, str]:
    cache = {"MODELSCOPE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | cache


def only_run(folder: Path) -> Path:
    """The one folder that swift made for a run."""
    (found,) = folder.iterdir()
    return found


def read_rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
