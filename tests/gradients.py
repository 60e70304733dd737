"""What the gradient tests share: a tiny model whose LoRA has moved, small data, a reference that shares no code."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from contrastors.biqwen3 import BiQwen3, pool_last_token
from contrastors.logit_scale import LogitScale
from contrastors.pixels import unpack_patches
from contrastors.processing import BiQwen3Processor, Inputs
from contrastors.records import Pair

GROUPS = ("language A", "language B", "vision A", "vision B", "logit scale")


def build_model(
    folder: Path, dtype: torch.dtype = torch.float32, dropout: float = 0.0, vision: bool = False
) -> tuple[BiQwen3, LogitScale, BiQwen3Processor]:
    """A tiny BiQwen3 in train mode. B is made non-zero: it starts at zero, which hides every gradient of A."""
    processor = BiQwen3Processor.from_pretrained(str(folder), max_num_visual_tokens=16)
    pixels = processor.image_processor
    model = BiQwen3.from_pretrained(str(folder), pixels.image_mean, pixels.image_std, dtype)
    torch.manual_seed(11)
    model.add_adapter(r=4, alpha=8, dropout=dropout, vision=vision)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.trainable_parameters().items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(dtype).train(), LogitScale(0.2).to(dtype), processor


def make_pairs(folder: Path, num_rows: int, num_negatives: int, seed: int = 3) -> list[Pair]:
    """Rows of noise tiles of several sizes; row 0 and the last share their positive, odd rows may lack negatives."""
    source = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)

    def tile(name: str) -> str:
        path = folder / f"{name}.png"
        size = (source.choice((64, 96, 128)), source.choice((32, 64, 96)))
        noise = bytes(source.randrange(256) for _ in range(8 * 8 * 3))
        Image.frombytes("RGB", (8, 8), noise).resize(size, Image.Resampling.BICUBIC).save(path)
        return str(path)

    pairs = []
    for row in range(num_rows):
        query = " ".join(
            source.choice(("red", "header", "dot", "grey bar:", "x")) for _ in range(source.randint(1, 12))
        )
        positive = pairs[0].positive if row == num_rows - 1 and row else tile(f"p{row}")
        count = num_negatives if row % 4 != 1 else (row // 4) % (num_negatives + 1)
        pairs.append(Pair(row, row + 1, f"{row} {query}", positive, [tile(f"n{row}_{k}") for k in range(count)]))
    return pairs


def split_groups(model: torch.nn.Module, logit_scale: LogitScale) -> dict[str, torch.Tensor]:
    """Gradients, flattened by parameter group."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            part = "vision" if "visual." in name else "language"
            found[f"{part} {'A' if '.lora_A.' in name else 'B'}"].append(gradient.detach().flatten().clone())
    found["logit scale"].append(logit_scale.log_scale.grad.detach().flatten().clone())
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def clear_gradients(*modules: torch.nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = None


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, tuple[float, float, float]]:
    """Group -> relative L2 of the difference, cosine, norm ratio found / wanted."""
    table = {}
    for name, reference in wanted.items():
        a, b = found[name].double(), reference.double()
        assert b.norm() > 0, f"the reference gradient of {name} is zero: the test would show nothing"
        cosine = float(a @ b / (a.norm() * b.norm()))
        table[name] = (float((a - b).norm() / b.norm()), cosine, float(a.norm() / b.norm()))
    return table


def embed_by_hand(model: BiQwen3, processor: BiQwen3Processor, items: list) -> torch.Tensor:
    """Embeddings of a padded batch, written without BiQwen3.forward or the library's normalisation."""
    (chunk,) = Inputs.from_items(items, processor.pad_id).chunks(len(items))
    inputs = {"input_ids": chunk["input_ids"], "attention_mask": chunk["attention_mask"]}
    if "pixel_values" in chunk:
        pixels = unpack_patches(chunk["pixel_values"], model.pixel_mean, model.pixel_std, 2)
        kinds = (chunk["input_ids"] == processor.image_token_id).int()
        inputs |= {"pixel_values": pixels, "image_grid_thw": chunk["image_grid_thw"], "mm_token_type_ids": kinds}
    model.base.rope_deltas = None
    hidden = model.backbone(**inputs).last_hidden_state
    last = chunk["attention_mask"].sum(dim=1) - 1  # right padding
    vectors = torch.stack([row[place] for row, place in zip(hidden, last, strict=True)])
    assert torch.equal(vectors, pool_last_token(hidden, chunk["attention_mask"]))
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors / vectors.pow(2).sum(dim=1, keepdim=True).sqrt()


def reference_loss(
    queries: torch.Tensor,
    document_vector: Callable[[str], torch.Tensor],
    pairs: list[Pair],
    num_negatives: int,
    logit_scale: LogitScale,
    num_groups: int = 1,
) -> torch.Tensor:
    """Sum over `num_groups` equal groups of rows (the ranks) of their mean InfoNCE, column by column."""
    losses = []
    content = {path: Path(path).read_bytes() for pair in pairs for path in [pair.positive, *pair.negatives]}
    for place, pair in enumerate(pairs):
        known = {content[other.positive] for other in pairs if other.query == pair.query}
        logits, label = [], None
        for other_place, other in enumerate(pairs):
            for slot, path in enumerate([other.positive, *other.negatives[:num_negatives]]):
                is_label = other_place == place and slot == 0
                if is_label:
                    label = len(logits)
                elif content[path] in known:
                    continue
                logits.append(queries[place] @ document_vector(path) * torch.exp(logit_scale.log_scale))
        row = torch.stack(logits)
        losses.append(torch.logsumexp(row, dim=0) - row[label])
    size = len(pairs) // num_groups
    assert size * num_groups == len(pairs), math.inf
    return sum(torch.stack(losses[r * size : (r + 1) * size]).mean() for r in range(num_groups))
