"""Reads an export back in a fresh process and compares its embeddings with those of base and adapter.

    python -m contrastors.export_check EXPORT FORMAT PROBES DEVICE

is that process: it loads the folder as others would (sentence-transformers, or Qwen3VLForConditionalGeneration with or
without PEFT) and writes the vectors of the probes into the folder PROBES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity
from transformers import Qwen3VLForConditionalGeneration

from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import ADAPTER_FILE, load_adapter
from contrastors.export_files import CONFIG_FILE, EXPORT_FILE, Source
from contrastors.gates import check_effect, embed_probes, is_plain
from contrastors.images import BadImage, open_image, pad_small
from contrastors.loading import load_bi_encoder
from contrastors.processing import BiQwen3Processor
from contrastors.records import dump_json, read_pairs, write_text

NUM_ROWS, BATCH_SIZE = 4, 4
# Smallest cosine to base + adapter, and largest share of the adapter's own effect that may be lost. fp32: rounding of
# sums. bf16: a weight keeps 8 bits, so each merged one moves by up to 0.2 %, and changes below that vanish.
SMALLEST_COSINE = {"fp32": 0.9999, "bf16": 0.999}
LARGEST_LOSS = {"fp32": 0.02, "bf16": 0.25}
_PROBES, _VECTORS = "probes.json", "vectors.safetensors"
_QUERIES = ("annual revenue by region, as a bar chart", "Wo steht die Größe der Fläche in m²?")


@dataclass(frozen=True, slots=True)
class Probes:
    """A few inputs: queries, one of them over the token limit, and images, one of them over the pixel limit."""

    queries: list[str]
    images: list[Image.Image]


@dataclass(frozen=True, slots=True)
class Reference:
    """What base and adapter say of the probes.

    Attributes:
        probes: The inputs.
        base: (n, D) by the base alone, queries before images.
        adapted: (n, D) by base + adapter.
        limits: From `BiQwen3Processor.describe`.
        longest_prompt: Tokens of a document at the visual-token limit, its instruction included.
    """

    probes: Probes
    base: torch.Tensor
    adapted: torch.Tensor
    limits: dict[str, Any]
    longest_prompt: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What an export keeps of an adapter.

    Attributes:
        smallest_cosine: Of export and base + adapter, over all probes.
        base_cosine: Smallest of base and base + adapter: how far the adapter moves embeddings.
        lost: Distance of the export from base + adapter, as a share of the base's.
        num_queries: Queries compared.
        num_images: Images compared.
    """

    smallest_cosine: float
    base_cosine: float
    lost: float
    num_queries: int
    num_images: int


def choose_probes(processor: BiQwen3Processor, train_jsonl: str | None) -> Probes:
    """Returns generated probes, and the first usable of the adapter's training rows where they can be read.

    Args:
        processor: With its limits.
        train_jsonl: Of the training; None, or gone, = generated ones alone.
    """
    side = processor.patch_size * processor.merge_size
    length = int((2 * processor.max_pixels) ** 0.5) // side * side + side
    queries = [*_QUERIES, "a query that is longer than the limit " * processor.max_query_tokens]
    images = [_draw_page(length, length + 3 * side), _draw_page(3 * side, 2 * side)]
    pairs = read_pairs(train_jsonl, NUM_ROWS)[0] if train_jsonl and os.path.isfile(train_jsonl) else []
    for pair in pairs:
        if is_plain(processor, pair.query):
            queries.append(pair.query)
        try:
            # Other loaders know nothing of this padding, which only images below one visual token need.
            images.append(pad_small(open_image(pair.positive), side, processor.max_num_visual_tokens))
        except BadImage:
            continue
    return Probes(queries, images)


def _draw_page(width: int, height: int) -> Image.Image:
    page = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(page)
    draw.rectangle((0, 0, width, height // 8), fill=(38, 84, 200))
    for line, top in enumerate(range(height // 6, height, max(12, height // 20))):
        draw.text((width // 12, top), f"{line}. The quick brown fox: {line * 7919 % 1000} EUR", fill=(20, 20, 20))
    draw.ellipse((width // 2, height // 2, width * 3 // 4, height * 3 // 4), fill=(214, 40, 40))
    return page


def embed(model: BiQwen3, processor: BiQwen3Processor, probes: Probes) -> torch.Tensor:
    """Returns the (n, D) vectors of all queries, then all images.

    Args:
        model: In eval mode.
        processor: Its processor.
        probes: What to embed.
    """
    queries = [processor.encode_query(text) for text in probes.queries]
    documents = [processor.encode_document(image) for image in probes.images]
    return torch.cat([embed_probes(model, items, processor.pad_id, BATCH_SIZE) for items in (queries, documents)])


def embed_reference(source: Source, device: torch.device) -> Reference:
    """Returns the embeddings that an export must give, in fp32; the model is gone afterwards.

    Args:
        source: Base and adapter.
        device: Where it computes.

    Raises:
        ValueError: The adapter does not fit the base model, or changes nothing.
    """
    limits = (source.max_num_visual_tokens, source.max_query_tokens)
    model, processor = load_bi_encoder(source.model, device, "fp32", "auto", *limits)
    probes = choose_probes(processor, source.record.get("args", {}).get("train_jsonl"))
    base = embed(model.eval(), processor, probes)
    load_adapter(model, source.adapter, trainable=False)
    model.documents_by_base = False  # an export has the adapter in everything, also that of a query tower
    adapted = embed(model.eval(), processor, probes)
    for problem in check_effect(base, adapted):
        raise ValueError(f"{source.adapter}: {problem}; there is nothing to export")
    ids = processor.encode_document(probes.images[0]).token_ids
    longest = len(ids) - ids.count(processor.image_token_id) + processor.max_num_visual_tokens
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the process that reads the export back needs the memory
    return Reference(probes, base, adapted, processor.describe(), longest)


def compare(reference: Reference, exported: torch.Tensor) -> Comparison:
    """Returns how near an export comes to base + adapter.

    Args:
        reference: Of base and adapter.
        exported: (n, D) by the export.
    """
    base, adapted, exported = reference.base, reference.adapted, exported.double()
    return Comparison(
        float(cosine_similarity(adapted, exported, dim=1).min()),
        float(cosine_similarity(adapted, base, dim=1).min()),
        float((exported - adapted).norm() / (base - adapted).norm()),
        len(reference.probes.queries),
        len(reference.probes.images),
    )


def check(found: Comparison, precision: str) -> None:
    """Raises ValueError where an export differs from base + adapter.

    Args:
        found: The comparison.
        precision: Of the merged weights as written, fp32 or bf16.
    """
    cosine, loss = SMALLEST_COSINE[precision], LARGEST_LOSS[precision]
    if found.smallest_cosine >= cosine and found.lost <= loss:  # NaN is a failure too
        return
    way_out = "; write --dtype fp32, or train longer" if precision == "bf16" else ""
    raise ValueError(
        f"the export was read back and differs from base + adapter: smallest cosine {found.smallest_cosine:.6f} (bound "
        f"{cosine}), {found.lost:.1%} of the adapter's effect lost (bound {loss:.0%}); nothing was kept{way_out}"
    )


def read_export(export: Path, kind: str, probes: Probes, folder: Path, device: torch.device) -> torch.Tensor:
    """Returns the (n, D) vectors of an export, embedded by a fresh process that loads it as others would.

    Args:
        export: Its folder.
        kind: `--format`.
        probes: What to embed.
        folder: Empty, for the exchange with that process.
        device: Where it computes.

    Raises:
        ValueError: The process failed.
    """
    for number, image in enumerate(probes.images):
        image.save(folder / f"{number}.png")
    write_text(folder / _PROBES, dump_json({"queries": probes.queries, "num_images": len(probes.images)}))
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    # Offline: whatever the export needs must be in it, or in the cache already.
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "contrastors.export_check", str(export), kind, str(folder), str(device)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the export cannot be read back in a fresh process ({reason}); nothing was kept")
    return load_file(folder / _VECTORS)["vectors"]


def _read_probes(folder: Path) -> Probes:
    listed = json.loads((folder / _PROBES).read_text(encoding="utf-8"))
    return Probes(listed["queries"], [open_image(folder / f"{n}.png") for n in range(listed["num_images"])])


def _embed_by_sentence_transformers(export: Path, probes: Probes, device: str) -> torch.Tensor:
    from sentence_transformers import SentenceTransformer

    options = {"dtype": torch.float32}
    model = SentenceTransformer(str(export), device=device, model_kwargs=options, local_files_only=True)
    form = {"batch_size": BATCH_SIZE, "convert_to_tensor": True, "show_progress_bar": False}
    queries = model.encode_query(probes.queries, **form)
    return torch.cat([queries, model.encode_document(probes.images, **form)]).cpu()


def load_generation(checkpoint: str, adapter: Path | None, limits: dict[str, Any]) -> tuple[BiQwen3, BiQwen3Processor]:
    """Returns the encoder inside a Qwen3VLForConditionalGeneration, fp32, and its processor.

    Args:
        checkpoint: Merged export, or the base of an exported adapter.
        adapter: Exported adapter; None = the checkpoint is merged.
        limits: `max_num_visual_tokens` and `max_query_tokens`.

    Raises:
        ValueError: Weights or keys are missing or left over.
    """
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True, use_safetensors=True, trust_remote_code=False
    )
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
    if adapter:
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
        held = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        wrong += sorted(held.keys() ^ load_file(adapter / ADAPTER_FILE).keys())
    if wrong:
        raise ValueError(f"{len(wrong)} weights are missing or left over, first {wrong[0]}")
    processor = BiQwen3Processor.from_pretrained(
        checkpoint, limits["max_num_visual_tokens"], limits["max_query_tokens"]
    )
    pixels = processor.image_processor
    return BiQwen3(model.model, pixels.image_mean, pixels.image_std).eval(), processor


def main(argv: list[str] | None = None) -> int:
    """Embeds the probes with an export; the fresh process of `read_export`."""
    export, kind, folder, device = argv or sys.argv[1:]
    export, folder = Path(export), Path(folder)
    probes = _read_probes(folder)
    if kind == "sentence-transformers":
        vectors = _embed_by_sentence_transformers(export, probes, device)
    else:
        limits = json.loads((export / EXPORT_FILE).read_text(encoding="utf-8"))
        checkpoint = str(export)
        if kind == "adapter":
            checkpoint = json.loads((export / CONFIG_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
        model, processor = load_generation(checkpoint, export if kind == "adapter" else None, limits)
        vectors = embed(model.to(device), processor, probes)
    save_file({"vectors": vectors.contiguous()}, folder / _VECTORS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
