"""The files of an export: merged weights in the layout of the base, the files around them, a model card.

The LoRA is merged by PEFT inside Qwen3VLForConditionalGeneration, in fp32. The shards of the base checkpoint are then
written again with the adapted weights in place of the old ones, so that names, shards, tied weights and dtypes stay.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from contrastors.checkpoint import ADAPTER_FILE, GENERATION_PREFIX, STATE_FILE
from contrastors.loading import weight_files
from contrastors.records import dump_json, write_text

CONFIG_FILE = "adapter_config.json"
EXPORT_FILE = "contrastors.json"
INDEX_FILE = "model.safetensors.index.json"
ST_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
_ADAPTER_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Source:
    """What is exported.

    Attributes:
        adapter: Its folder.
        model: Hub name or folder of the base model.
        max_num_visual_tokens: Visual tokens of the largest image.
        max_query_tokens: Longest query prompt.
        record: trainer_state.json, empty where there is none.
    """

    adapter: Path
    model: str
    max_num_visual_tokens: int
    max_query_tokens: int
    record: dict[str, Any]


def read_source(
    adapter: str, model: str | None, max_num_visual_tokens: int | None, max_query_tokens: int | None
) -> Source:
    """Returns an adapter and what its folder says of base model and limits.

    Args:
        adapter: Folder.
        model: `--model`; None = the one in the adapter's files.
        max_num_visual_tokens: `--max-num-visual-tokens`; None = what the adapter was trained with.
        max_query_tokens: `--max-query-tokens`; None = what the adapter was trained with, or 512.

    Raises:
        ValueError: No adapter, not a plain LoRA of a bare Qwen3VLModel, without effect, or a limit is not known.
    """
    folder = Path(adapter)
    _check_adapter(folder)
    config, record = _read_json(folder / CONFIG_FILE), {}
    if (folder / STATE_FILE).is_file():
        record = _read_json(folder / STATE_FILE)
    trained = record.get("processor", {})
    model = model or record.get("args", {}).get("model") or config.get("base_model_name_or_path")
    if not model:
        raise ValueError(f"{folder}: {CONFIG_FILE} names no base model; give --model")
    visual_tokens = max_num_visual_tokens or trained.get("max_num_visual_tokens")
    if not visual_tokens:
        raise ValueError(f"{folder}: no file says how large its training images were; give --max-num-visual-tokens")
    return Source(folder, model, visual_tokens, max_query_tokens or trained.get("max_query_tokens", 512), record)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def _check_adapter(folder: Path) -> None:
    for name in (ADAPTER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"--adapter {folder}: {name} is missing, so this is no adapter")
    try:
        tensors = load_file(folder / ADAPTER_FILE)
    except SafetensorError as error:
        raise ValueError(f"{folder}: {ADAPTER_FILE} cannot be read ({error})") from error
    if any(key.startswith(GENERATION_PREFIX) for key in tensors):
        raise ValueError(
            f"{folder}: its keys carry one more `model.` level ({GENERATION_PREFIX}..., as ms-swift saves them), so it "
            "would load without effect; python train_swift.py --remap DIR writes the adapter that fits"
        )
    other = sorted(key for key in tensors if not _LORA_KEY.fullmatch(key))
    if other or not tensors:
        raise ValueError(
            f"{folder}: only a plain LoRA can be exported, this adapter holds {other[0] if other else 'nothing'}"
        )
    if not any(tensor.any() for key, tensor in tensors.items() if ".lora_B." in key):
        raise ValueError(f"{folder}: every B matrix is zero, so the adapter has no effect; there is nothing to export")


def write_generation_adapter(source: Source, folder: Path) -> None:
    """Writes the adapter for Qwen3VLForConditionalGeneration: keys and targets with one more `model.` level."""
    tensors = load_file(source.adapter / ADAPTER_FILE)
    moved = {GENERATION_PREFIX + key.removeprefix(_ADAPTER_PREFIX): tensor for key, tensor in tensors.items()}
    config = _read_json(source.adapter / CONFIG_FILE)
    modules = sorted({"model." + _LORA_KEY.fullmatch(key)[1] for key in tensors})
    targets = config["target_modules"]
    if not isinstance(targets, str) or not all(re.fullmatch(targets, name) for name in modules):
        config["target_modules"] = modules
    # Absolute: the adapter is loaded from wherever it is carried to, the folder of the base model stays where it is.
    base = str(Path(source.model).absolute()) if Path(source.model).is_dir() else source.model
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    save_file(moved, folder / ADAPTER_FILE, metadata={"format": "pt"})
    write_text(folder / CONFIG_FILE, dump_json(config, indent=2) + "\n")


def find_base_folder(model: str) -> Path:
    """Returns the folder of a base checkpoint; of a hub name its place in the cache."""
    if Path(model).is_dir():
        return Path(model)
    patterns = [f"*{suffix}" for suffix in (*_COPIED_SUFFIXES, ".safetensors")]
    return Path(snapshot_download(model, allow_patterns=[*patterns, "LICENSE*", "NOTICE*"]))


def check_space(base: Path, output: Path, dtype: str) -> None:
    """Raises ValueError where the disk of `output` has no room for the merged weights."""
    # fp32 of a bf16 checkpoint takes twice its bytes; a tenth more for tokenizer and file system
    needed = sum(path.stat().st_size for path in weight_files(base)) * (2 if dtype == "fp32" else 1) * 1.1
    place = next(folder for folder in output.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ValueError(
            f"--output {output}: about {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; make room or "
            "choose another disk"
        )


def merge_adapter(model: str, generation_adapter: Path) -> dict[str, torch.Tensor]:
    """Returns the adapted weights, fp32, by their names in Qwen3VLForConditionalGeneration.

    Args:
        model: Hub name or folder of the base model.
        generation_adapter: As `write_generation_adapter` writes it.
    """
    base = Qwen3VLForConditionalGeneration.from_pretrained(
        model, dtype="auto", use_safetensors=True, trust_remote_code=False
    )
    wrapped = PeftModel.from_pretrained(base, str(generation_adapter), torch_device="cpu")
    adapted = {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    for layer in adapted.values():
        layer.get_base_layer().to(torch.float32)  # a bf16 sum would round the product B A before it is added
    merged = wrapped.merge_and_unload()
    return {f"{name}.weight": merged.get_submodule(name).weight.detach() for name in adapted}


def write_weights(base: Path, merged: dict[str, torch.Tensor], folder: Path, dtype: str) -> str:
    """Writes the shards of the base checkpoint with merged weights in their places; returns the precision of these.

    Args:
        base: Folder of the base checkpoint.
        merged: From `merge_adapter`.
        folder: Of the export.
        dtype: bf16, fp32, or auto: each weight keeps its own.

    Raises:
        ValueError: A merged weight has no place in the base checkpoint.
    """
    remaining, num_bytes, precision = dict(merged), 0, "fp32"
    for path in weight_files(base):
        tensors = {}
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            for key in file.keys():
                tensor = file.get_tensor(key)
                kept = _DTYPES.get(dtype, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
                # A checkpoint of the bare Qwen3VLModel lacks the `model.` level.
                name = key if key in remaining else f"model.{key}"
                if name in remaining and kept != torch.float32:
                    precision = "bf16"
                tensors[key] = remaining.pop(name, tensor).to(kept).contiguous()
                num_bytes += tensors[key].nbytes
        save_file(tensors, folder / path.name, metadata=about)
    if remaining:
        raise ValueError(f"{base}: holds no weight {min(remaining)}, so the adapter cannot be merged into it")
    if (base / INDEX_FILE).is_file():
        index = _read_json(base / INDEX_FILE)
        index.setdefault("metadata", {})["total_size"] = num_bytes
        write_text(folder / INDEX_FILE, dump_json(index, indent=2) + "\n")
    return precision


def copy_files(base: Path, folder: Path, limits: dict[str, Any], dtype: str) -> None:
    """Copies config, tokenizer, processor and licence of the base; pixel limits go into the image processor's file.

    Args:
        base: Folder of the base checkpoint.
        folder: Of the export.
        limits: From `BiQwen3Processor.describe`.
        dtype: bf16, fp32 or auto.
    """
    for path in sorted(base.iterdir()):
        is_wanted = path.suffix in _COPIED_SUFFIXES or path.name.upper().startswith(("LICENSE", "NOTICE"))
        if path.is_file() and is_wanted and path.name not in (*ST_FILES, INDEX_FILE, EXPORT_FILE):
            shutil.copyfile(path, folder / path.name)
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            settings = _read_json(folder / name)
            _set_pixels(settings.get("image_processor", {}) if name.startswith("processor") else settings, limits)
            write_text(folder / name, dump_json(settings, indent=2) + "\n")
    if dtype != "auto":
        config = _read_json(folder / "config.json")
        for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
            part |= {key: _DTYPE_NAMES[dtype] for key in ("dtype", "torch_dtype") if key in part}
        config["dtype"] = _DTYPE_NAMES[dtype]
        write_text(folder / "config.json", dump_json(config, indent=2) + "\n")


def _set_pixels(settings: dict[str, Any], limits: dict[str, Any]) -> None:
    if "size" in settings:
        settings["size"] = {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}
    settings |= {key: limits[key] for key in ("min_pixels", "max_pixels") if key in settings}


def write_sentence_transformers(folder: Path, limits: dict[str, Any], embedding_size: int, max_tokens: int) -> None:
    """Writes the module files of sentence-transformers 6 into a merged export.

    Args:
        folder: Of the export.
        limits: From `BiQwen3Processor.describe`.
        embedding_size: D.
        max_tokens: Tokens of the longest prompt, image slots included; a document cut there could not be embedded.
    """
    # Module names and pooling keys of older releases: sentence-transformers 6 reads both forms, vLLM only this one.
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    files = {
        "modules.json": [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
            for place, (path, name) in enumerate(modules)
        ],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            # No video: a query that is the address of one stays text.
            "modality_config": {"text": forward, "image": forward, "message": {**forward, "format": "structured"}},
            "module_output_name": "token_embeddings",
            # Without it the prompt would end before the assistant's turn, in whose last token the embedding lies.
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
            "query_length": limits["max_query_tokens"],
            "max_seq_length": max(max_tokens, limits["max_query_tokens"]),
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "__version__": {"sentence_transformers": metadata.version("sentence-transformers")},
            "requirements": {"sentence-transformers": ">=6"},
            "prompts": {"query": limits["query_instruction"], "document": limits["document_instruction"]},
            "default_prompt_name": "document",
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": embedding_size, "pooling_mode_lasttoken": True, "include_prompt": True
        },
        "2_Normalize/config.json": {},
    }  # fmt: skip
    for name, content in files.items():
        write_text(folder / name, dump_json(content, indent=2) + "\n")
