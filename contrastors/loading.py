"""The one way from `--model` and `--adapter` to a bi-encoder that embeds, and the identity of what was loaded."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file, logging

from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import BadCheckpoint, load_adapter, read_base_weights
from contrastors.cli import require_model_folder
from contrastors.distributed import World, from_main, rank
from contrastors.processing import BiQwen3Processor

_BLOCK_BYTES = 1 << 24
_CHECKPOINT_FILES = (".json", ".safetensors", ".jinja", ".txt")  # what loading reads of a folder


def silence_libraries() -> None:
    """Turns off messages that tell our users nothing."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # counts cores, not what waits on disks


def check_attention(implementation: str, device: torch.device) -> None:
    """Raises ValueError where an `--attn-implementation` does not run on a device."""
    if implementation == "flash_attention_2" and device.type != "cuda":
        raise ValueError(f"--attn-implementation flash_attention_2 needs cuda; this is {device}")


def load_bi_encoder(
    model: str,
    device: torch.device,
    dtype: str = "auto",
    attn_implementation: str = "auto",
    max_num_visual_tokens: int = 256,
    max_query_tokens: int = 512,
) -> tuple[BiQwen3, BiQwen3Processor]:
    """Returns the frozen base model on its device, and its processor.

    Args:
        model: Hub name or folder.
        device: Where it computes.
        dtype: auto (bf16 on cuda, fp32 elsewhere), bf16 or fp32.
        attn_implementation: auto (sdpa), sdpa, flash_attention_2 or eager.
        max_num_visual_tokens: Visual tokens of the largest image.
        max_query_tokens: Longest query prompt.

    Raises:
        ValueError: The checkpoint cannot be used, or not in this way.
    """
    require_model_folder(model)
    check_attention(attn_implementation, device)
    on_cuda = device.type == "cuda"
    processor = BiQwen3Processor.from_pretrained(model, max_num_visual_tokens, max_query_tokens)
    pixels = processor.image_processor
    attention = "sdpa" if attn_implementation == "auto" else attn_implementation
    weights = torch.bfloat16 if dtype == "bf16" or (dtype == "auto" and on_cuda) else torch.float32
    encoder = BiQwen3.from_pretrained(model, pixels.image_mean, pixels.image_std, weights, attention)
    if encoder.base.config.image_token_id != processor.image_token_id:
        raise ValueError(f"--model {model}: tokenizer and config disagree on the id of the image token")
    return encoder.to(device), processor


def identify_model(model: str) -> str:
    """Returns the hash of a checkpoint's files: equal for a hub name and for a copy of it in a folder.

    Args:
        model: Hub name or folder, loaded before.
    """
    folder = Path(model) if Path(model).is_dir() else Path(cached_file(model, "config.json")).parent
    return hash_files(path for path in folder.iterdir() if path.suffix in _CHECKPOINT_FILES)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that make up a checkpoint."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return sorted({folder / name for name in names})


def identify_weights(model: str) -> str:
    """Returns the hash of a checkpoint's weights; equal for a hub name, for its folder, and wherever that moves.

    Args:
        model: Hub name or folder, loaded before.
    """
    folder = Path(model) if Path(model).is_dir() else Path(cached_file(model, "config.json")).parent
    files = [path for path in weight_files(folder) if path.is_file()]
    if not files:
        raise ValueError(f"--model {model}: holds no model.safetensors")
    return _hash_weights(tuple((path, path.stat().st_mtime_ns) for path in files))


def sample_weights(model: BiQwen3) -> str:
    """Returns a hash of some numbers of each weight: what ranks compare that have loaded a model each for itself."""
    found = [p.detach().flatten()[:: max(1, p.numel() // 16)].float() for p in model.backbone.parameters()]
    return hashlib.blake2b(torch.cat(found).cpu().numpy().tobytes(), digest_size=8).hexdigest()


@functools.cache
def _hash_weights(files: tuple[tuple[Path, int], ...]) -> str:
    return hash_files(path for path, _ in files)


def check_base_weights(adapter: str | Path, model: str) -> None:
    """Looks whether a base model is the one that an adapter was trained on; equal shapes do not make it that.

    The main rank reads the weights. Collective.

    Args:
        adapter: Folder; one that does not tell its base's weights passes.
        model: Hub name or folder, loaded before.

    Raises:
        BadCheckpoint: It is another one.
    """
    trained_on = read_base_weights(adapter)
    if trained_on and trained_on != from_main(identify_weights(model) if rank() == 0 else None):
        raise BadCheckpoint(f"{adapter}: was trained on other weights than those of --model {model}")


def hash_file(path: str | Path) -> str:
    """Returns 32 hex digits that change with any byte of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def hash_files(paths: Iterable[Path]) -> str:
    """Returns 32 hex digits that change with the name or any byte of the files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def identify_base(model: str, encoder: BiQwen3, world: World) -> dict[str, Any]:
    """Returns the identity of an encoder without adapter. Collective."""
    files = from_main(identify_model(model) if world.is_main else None)
    return {"model": files, "adapter": None, "dtype": str(encoder.base.dtype).removeprefix("torch.")}


@dataclass(slots=True)
class Encoder:
    """A model that embeds, and what its embeddings depend on.

    Attributes:
        model: With its adapter, in eval mode.
        processor: Its processor.
        identity: `model`, `adapter` and `dtype`.
    """

    model: BiQwen3
    processor: BiQwen3Processor
    identity: dict[str, Any]

    def identity_of(self, kind: str) -> dict[str, Any]:
        """Returns everything that embeddings of a `query` or `document` depend on beside its content."""
        limits = self.processor.describe()
        if kind == "query":
            names = ("max_query_tokens", "query_instruction")
        else:
            names = ("image_backend", "min_pixels", "max_pixels", "pixels_per_token", "document_instruction")
        identity = self.identity
        if kind == "document" and self.model.documents_by_base:
            identity = identity | {"adapter": None}
        return {"kind": kind, **identity, **{name: limits[name] for name in names}}


def load_encoder(
    model: str, adapter: str | None, world: World, dtype: str, max_num_visual_tokens: int, max_query_tokens: int
) -> Encoder:
    """Returns a model, with its adapter, ready to embed. Collective.

    Args:
        model: Hub name or folder.
        adapter: Checkpoint folder; None = the base model alone.
        world: Ranks.
        dtype: auto, bf16 or fp32.
        max_num_visual_tokens: Visual tokens of the largest image.
        max_query_tokens: Longest query prompt.

    Raises:
        ValueError: Model or adapter cannot be used.
    """
    encoder, processor = load_bi_encoder(model, world.device, dtype, "auto", max_num_visual_tokens, max_query_tokens)
    identity = identify_base(model, encoder, world)
    if adapter:
        load_adapter(encoder, adapter, trainable=False)
        check_base_weights(adapter, model)
        names = ("adapter_config.json", "adapter_model.safetensors")
        identity["adapter"] = hash_files(Path(adapter) / name for name in names)
    return Encoder(encoder.eval(), processor, identity)
