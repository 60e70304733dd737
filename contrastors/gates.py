"""What must hold before a number is believed: embeddings that depend on their input alone, an adapter that acts.

Each gate gives figures, or a sentence where something is off; who calls decides what that means.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from PIL import Image
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoProcessor

from contrastors.biqwen3 import BiQwen3
from contrastors.images import pad_small
from contrastors.processing import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION, BiQwen3Processor, Inputs, Item

# Largest cosine deviation of one input embedded in two ways. fp32: the project's promise. bf16 keeps 8 bits, and other
# shapes take other kernels: measured up to 2e-4 on small models, and layers add up.
LARGEST_DEVIATION = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
NO_EFFECT = 1e-7  # cosine deviation that rounding makes; an adapter in use moves vectors by far more


@dataclass(frozen=True, slots=True)
class Probes:
    """A few encoded inputs of unequal lengths."""

    queries: list[Item]
    documents: list[Item]
    pad_id: int


def make_probes(processor: BiQwen3Processor, queries: Sequence[str], images: Sequence[Image.Image]) -> Probes:
    """Returns encoded queries and images, with one short query and one cut image, so that a batch needs padding."""
    first = images[0]
    cut = first.crop((0, 0, first.width, max(1, first.height // 2)))
    texts = [*queries, queries[0][: max(1, len(queries[0]) // 3)]]
    items = [processor.encode_document(image) for image in (*images, cut)]
    return Probes([processor.encode_query(text) for text in texts], items, processor.pad_id)


def pad_left(chunk: dict[str, torch.Tensor], pad_id: int) -> dict[str, torch.Tensor]:
    """Returns the model inputs with their padding moved to the left."""
    mask = chunk["attention_mask"]
    ids = torch.full_like(chunk["input_ids"], pad_id)
    moved = mask.flip(1)
    ids[moved.bool()] = chunk["input_ids"][mask.bool()]  # both read row by row
    return chunk | {"input_ids": ids, "attention_mask": moved}


@torch.no_grad()
def embed_probes(
    model: BiQwen3, items: Sequence[Item], pad_id: int, batch_size: int = 0, left: bool = False
) -> torch.Tensor:
    """Returns the (n, D) vectors of encoded items, all queries or all documents.

    Args:
        model: In eval mode.
        items: Encoded.
        pad_id: Token that pads.
        batch_size: Items of one forward; 0 = all.
        left: Pad on the left.
    """
    device = next(model.parameters()).device
    chunks = Inputs.from_items(items, pad_id).to(device).chunks(batch_size or len(items))
    return torch.cat([model(**(pad_left(chunk, pad_id) if left else chunk)).double().cpu() for chunk in chunks])


def rope_keepers(model: BiQwen3) -> dict[str, torch.nn.Module]:
    """Returns the modules that keep rope offsets of an earlier input now, by name."""
    return {name: m for name, m in model.named_modules() if getattr(m, "rope_deltas", None) is not None}


def embed_fresh(model: BiQwen3, items: Sequence[Item], pad_id: int) -> torch.Tensor:
    """Returns the (n, D) vectors of items, each alone and with no rope offsets left of anything before it."""
    vectors = []
    for item in items:
        for module in rope_keepers(model).values():  # not by the model's own way: that may be what is broken
            module.rope_deltas = None
        vectors.append(embed_probes(model, [item], pad_id))
    return torch.cat(vectors)


def measure_invariance(model: BiQwen3, probes: Probes) -> dict[str, float]:
    """Returns the largest cosine deviation (1 - cosine) of the same input embedded in two ways.

    `batch`: alone against in a batch with longer and shorter neighbours. `padding side`: padded right against left.
    `order`: alone in a fresh model against alone after other inputs (a rope state that was not cleared).

    Args:
        model: In eval mode.
        probes: A few inputs.
    """
    found = {"batch": [], "padding side": [], "order": []}
    for items, others in ((probes.queries, probes.documents), (probes.documents, probes.queries)):
        fresh = embed_fresh(model, items, probes.pad_id)
        together = embed_probes(model, items, probes.pad_id)
        left = embed_probes(model, items, probes.pad_id, left=True)
        embed_probes(model, others, probes.pad_id)
        later = embed_probes(model, items[::-1], probes.pad_id, batch_size=1).flip(0)
        for name, first, second in (
            ("batch", fresh, together),
            ("padding side", together, left),
            ("order", fresh, later),
        ):
            found[name].append(largest_deviation(first, second))
    return {name: largest(values) for name, values in found.items()}


def largest_deviation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns the largest 1 - cosine of rows at the same place; NaN rows give NaN."""
    return float((1 - cosine_similarity(first.double(), second.double(), dim=1)).abs().max())  # max keeps NaN


def largest(values: list[float]) -> float:
    """Returns the largest value; NaN wins, which Python's max may lose."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def check_invariance(found: dict[str, float], dtype: torch.dtype) -> list[str]:
    """Returns a sentence for each kind of deviation above the bound of the dtype."""
    bound = LARGEST_DEVIATION.get(dtype, LARGEST_DEVIATION[torch.bfloat16])
    meaning = {
        "batch": "embeddings depend on their neighbours in a batch",
        "padding side": "embeddings depend on the side of the padding",
        "order": "embeddings depend on what was embedded before",
    }
    return [
        f"{meaning[name]}: cosine deviation {value:.2g}, at most {bound:g} in {str(dtype).removeprefix('torch.')}"
        for name, value in found.items()
        if not value <= bound  # NaN is off too
    ]


def check_effect(base: torch.Tensor, adapted: torch.Tensor) -> list[str]:
    """Returns a sentence if an adapter changes no vector.

    Args:
        base: (n, D) vectors without it.
        adapted: (n, D) vectors of the same inputs with it.
    """
    if not torch.linalg.vector_norm(adapted, dim=1).any():
        return ["every embedding is zero: the model gives no input a direction"]
    if largest_deviation(base, adapted) <= NO_EFFECT:
        return ["the adapter has no effect: every embedding is that of the base model"]
    return []


@torch.no_grad()
def embed_by_transformers(
    model: BiQwen3, checkpoint: str, processor: BiQwen3Processor, queries: Sequence[str], images: Sequence[Image.Image]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (Q, D) and (n, D) vectors by a second way from text and pixels to a vector: plain transformers.

    The checkpoint's processor renders, tokenizes, resizes and normalises in one call, padding stands on the left, the
    last place is pooled. Only the weights, the instructions and the pixel limits are shared with our own way.

    Args:
        model: In eval mode, with or without an adapter.
        checkpoint: Hub name or folder of the base model.
        processor: Gives instructions and limits.
        queries: Texts within the token limit.
        images: RGB, no smaller than one visual token.
    """
    plain = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=False, padding_side="left")
    size = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    device = next(model.parameters()).device
    vectors = []
    for instruction, contents in (
        (QUERY_INSTRUCTION, [{"type": "text", "text": text} for text in queries]),
        (DOCUMENT_INSTRUCTION, [{"type": "image", "image": image} for image in images]),
    ):
        system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
        inputs = plain.apply_chat_template(
            [[system, {"role": "user", "content": [content]}] for content in contents],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "images_kwargs": {"size": size}},
        )
        with torch.autocast(device.type, model.autocast_dtype or torch.bfloat16, enabled=bool(model.autocast_dtype)):
            hidden = model.backbone(**inputs.to(device)).last_hidden_state
        vectors.append(normalize(hidden[:, -1].double(), dim=1).cpu())
    return vectors[0], vectors[1]


def is_plain(processor: BiQwen3Processor, text: str) -> bool:
    """Tells texts that every loader reads alike from those with control markers or addresses of images."""
    markers = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    split = processor.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return markers == split and "://" not in text and not text.startswith("data:") and not os.path.exists(text)


def compare_with_transformers(
    model: BiQwen3, checkpoint: str, processor: BiQwen3Processor, queries: Sequence[str], images: Sequence[Image.Image]
) -> dict[str, float]:
    """Returns the largest cosine deviation of `queries` and of `documents` between our way and plain transformers.

    Compared is what both must read alike: texts that are plain and within the token limit, and images with the padding
    that ours gives to small ones. Where no text is left, a letter stands in.

    Args:
        model: In eval mode, with or without an adapter.
        checkpoint: Hub name or folder of the base model.
        processor: Its processor.
        queries: Any; as many of them are taken as there are images.
        images: RGB.
    """
    whole = (text for text in queries if is_plain(processor, text) and not processor.encode_query(text).truncated)
    texts = list(islice(whole, len(images))) or ["a"]
    side = processor.patch_size * processor.merge_size
    pages = [pad_small(image, side, processor.max_num_visual_tokens) for image in images]
    ours = ([processor.encode_query(text) for text in texts], [processor.encode_document(page) for page in pages])
    theirs = embed_by_transformers(model, checkpoint, processor, texts, pages)
    return {
        kind: largest_deviation(vectors, embed_probes(model, items, processor.pad_id))
        for kind, items, vectors in zip(("queries", "documents"), ours, theirs, strict=True)
    }
