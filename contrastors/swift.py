"""Adapters of ms-swift: from keys that a bare Qwen3VLModel ignores to an adapter like our own, checked to act.

swift trains inside Qwen3VLForConditionalGeneration, whose modules lie one `model.` deeper. PEFT loads such keys into
BiQwen3 with no more than a warning, and the adapter has no effect.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from contrastors.checkpoint import (
    ADAPTER_FILE,
    GENERATION_PREFIX,
    SCALE_FILE,
    STATE_FILE,
    BadCheckpoint,
    load_adapter,
    model_card,
    read_back,
)
from contrastors.gates import check_effect, embed_probes, make_probes
from contrastors.loading import identify_weights, load_bi_encoder
from contrastors.logit_scale import LogitScale
from contrastors.processing import BiQwen3Processor
from contrastors.records import dump_json, settle_files, write_text
from contrastors.shards import folder_output

SUFFIX = "-biqwen3"
CONFIG_FILE, ARGS_FILE = "adapter_config.json", "args.json"
# Flags of train_swift.py and what swift calls them in the args.json of a checkpoint.
ARGUMENTS = {
    "model": "model", "batch_size": "per_device_train_batch_size", "lr": "learning_rate",
    "warmup_steps": "warmup_steps", "max_steps": "max_steps", "scheduler": "lr_scheduler_type",
    "max_grad_norm": "max_grad_norm", "weight_decay": "weight_decay", "lora_r": "lora_rank", "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout", "freeze_vit": "freeze_vit", "eval_steps": "eval_steps", "save_steps": "save_steps",
    "save_total_limit": "save_total_limit", "logging_steps": "logging_steps", "deepspeed": "deepspeed", "seed": "seed",
    "num_workers": "dataloader_num_workers",
}  # fmt: skip
# What swift takes from the environment; as `model_kwargs` it lands in args.json too.
ENVIRONMENT = {
    "temperature": ("INFONCE_TEMPERATURE", float), "num_hard_negatives": ("INFONCE_HARD_NEGATIVES", int),
    "max_num_visual_tokens": ("IMAGE_MAX_TOKEN_NUM", int),
}  # fmt: skip
_ADAPTER_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"base_model\.model\.model\.((?:language_model|visual)\..+)\.lora_[AB]\.weight")
_PROBE_QUERIES = ("annual revenue by region, as a bar chart", "Wo steht die Größe der Fläche in m²?")


def read_flags(folder: str | Path) -> dict[str, Any]:
    """Returns the flags of train_swift.py that a swift checkpoint was trained with, as far as its args.json tells.

    Raises:
        BadCheckpoint: The folder is no checkpoint of swift.
    """
    path = Path(folder) / ARGS_FILE
    if Path(folder).name.endswith(SUFFIX):
        raise BadCheckpoint(f"{folder} is a remapped adapter; swift's own is {str(folder).removesuffix(SUFFIX)}")
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        flags = {flag: saved[name] for flag, name in ARGUMENTS.items() if name in saved}
        held = saved.get("model_kwargs") or {}
        flags |= {flag: kind(held[name]) for flag, (name, kind) in ENVIRONMENT.items() if name in held}
        flags["num_hard_negatives"] = flags.get("num_hard_negatives", 0)
        flags["train_jsonl"] = next(iter(saved.get("dataset", [])), None)
        flags["eval_jsonl"] = next(iter(saved.get("val_dataset", [])), "")
        flags["report_to"] = next(iter(saved.get("report_to", [])), "none")
        flags["dtype"] = {"bfloat16": "bf16", "float32": "fp32"}.get(saved.get("torch_dtype"), "auto")
        flags["nproc_per_node"] = saved.get("global_world_size") or 1
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path}: cannot be read ({error}), so {folder} is no checkpoint of ms-swift") from error
    return flags


@dataclass(frozen=True, slots=True)
class Remapped:
    """An adapter that was remapped and seen to act.

    Attributes:
        folder: Where it lies.
        num_tensors: Tensors in it; every one has found its place in the model.
    """

    folder: Path
    num_tensors: int


def remapped_folder(checkpoint: Path) -> Path:
    """Returns where the remapped adapter of a swift checkpoint lies."""
    return checkpoint.with_name(checkpoint.name + SUFFIX)


def remap_adapter(
    checkpoint: Path,
    model: str | None = None,
    device: torch.device | None = None,
    dtype: str = "auto",
    overwrite: bool = False,
) -> Remapped:
    """Writes `CHECKPOINT-biqwen3/`, an adapter for BiQwen3, and returns it after loading it onto the base model.

    Args:
        checkpoint: Adapter folder of swift.
        model: Base model; None = what the checkpoint names.
        device: Where the check computes; None = the CPU.
        dtype: Of the base model in the check: auto, bf16 or fp32.
        overwrite: Replace an earlier `CHECKPOINT-biqwen3/`.

    Raises:
        ValueError: It exists.
        BadCheckpoint: No adapter of swift, keys that do not match the base model, or embeddings that stay the same;
            nothing is left behind then.
    """
    tensors, config = _read_adapter(checkpoint)
    flags = read_flags(checkpoint) if (checkpoint / ARGS_FILE).is_file() else {}
    flags["model"] = model or flags.get("model") or config.get("base_model_name_or_path")
    if not flags["model"]:
        raise BadCheckpoint(f"{checkpoint} does not name its base model; give --model")
    target = remapped_folder(checkpoint)
    limits = {"max_num_visual_tokens": flags["max_num_visual_tokens"]} if "max_num_visual_tokens" in flags else {}
    with folder_output(target, overwrite, marker=CONFIG_FILE) as folder:
        _write_adapter(folder, tensors, config | {"base_model_name_or_path": flags["model"]})
        processor = _check_adapter(folder, flags["model"], device or torch.device("cpu"), dtype, limits)
        _write_record(folder, read_step(checkpoint), flags, processor)
        settle_files(folder)
    return Remapped(target, len(tensors))


def _read_adapter(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        tensors = load_file(checkpoint / ADAPTER_FILE)
        config = json.loads((checkpoint / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{checkpoint}: no adapter can be read ({error})") from error
    if not any(key.startswith(GENERATION_PREFIX) for key in tensors):
        raise BadCheckpoint(f"{checkpoint}: its keys carry no extra `model.` level; there is nothing to remap")
    other = sorted(key for key in tensors if not _LORA_KEY.fullmatch(key))
    if other:
        raise BadCheckpoint(f"{checkpoint}: only a plain LoRA can be remapped, this adapter holds {other[0]}")
    return tensors, config


def _write_adapter(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Writes tensors and configuration without the extra level, at the start of a name and nowhere else."""
    moved = {_ADAPTER_PREFIX + key.removeprefix(GENERATION_PREFIX): tensor.float() for key, tensor in tensors.items()}
    modules = sorted({_LORA_KEY.fullmatch(key)[1] for key in tensors})
    targets = config["target_modules"]
    if not isinstance(targets, str) or not all(re.fullmatch(targets, name) for name in modules):
        config["target_modules"] = modules
    config |= {"task_type": "FEATURE_EXTRACTION", "auto_mapping": None, "modules_to_save": None}
    save_file(moved, folder / ADAPTER_FILE, metadata={"format": "pt"})
    write_text(folder / CONFIG_FILE, dump_json(config, indent=2) + "\n")


def _check_adapter(
    folder: Path, model: str, device: torch.device, dtype: str, limits: dict[str, int]
) -> BiQwen3Processor:
    """Loads the base model, embeds without and with the adapter, and returns the processor."""
    encoder, processor = load_bi_encoder(model, device, dtype, **limits)
    picture = Image.radial_gradient("L").convert("RGB")
    probes = make_probes(processor, _PROBE_QUERIES, [picture, picture.rotate(90).crop((0, 0, 160, 96))])

    def embed() -> torch.Tensor:
        encoder.eval()
        return torch.cat([embed_probes(encoder, items, probes.pad_id) for items in (probes.queries, probes.documents)])

    base = embed()
    load_adapter(encoder, folder, trainable=False)
    read_back(encoder, folder, must_have_moved=True)
    off = check_effect(base, embed())
    if off:
        raise BadCheckpoint(f"{folder}: {off[0]}")
    return processor


def read_step(checkpoint: Path) -> int:
    """Returns the step of a swift checkpoint, 0 where it does not tell."""
    try:
        return int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):  # a bare adapter, moved out of its run
        return 0


def _write_record(folder: Path, step: int, flags: dict[str, Any], processor: BiQwen3Processor) -> None:
    """Writes what the other scripts ask of a checkpoint: model, pixel limit, temperature, and a model card."""
    logit_scale = LogitScale(flags.get("temperature", 0.07))
    # Not as --train-jsonl and --eval-jsonl: the other scripts would read them as rows of their own.
    files = {name: flags.get(name) for name in ("train_jsonl", "eval_jsonl")}
    args = {name: value for name, value in flags.items() if name not in files}
    record = {"step": step, "trained_by": "ms-swift", "trained_on": files, "args": args}
    record["base_weights"] = identify_weights(flags["model"])
    if "max_num_visual_tokens" in flags:
        record["processor"] = processor.describe()
    write_text(folder / STATE_FILE, dump_json(record, indent=1) + "\n")
    save_file(logit_scale.state_dict(), folder / SCALE_FILE)
    unknown = dict.fromkeys(("batch_size", "num_hard_negatives", "max_num_visual_tokens"), "an unknown number of")
    card = model_card(argparse.Namespace(**unknown | flags), step, logit_scale.temperature, {})
    write_text(folder / "README.md", card)
