"""One checkpoint: written whole or not at all, read back at once, loaded only where it fits.

A `checkpoint-{step}/` is a PEFT adapter (loads with plain PEFT), the logit scale, the optimizer, `trainer_state.json`
and a model card. Random states and sampler need no saving: they are functions of (seed, step, rank).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from contrastors.biqwen3 import BiQwen3
from contrastors.logit_scale import LogitScale
from contrastors.metrics import HEADLINES, format_metric
from contrastors.records import dump_json, settle_files, sync_file, write_text
from contrastors.train_flags import QUERY_SIDE

ADAPTER_FILE, STATE_FILE, OPTIMIZER_FILE = "adapter_model.safetensors", "trainer_state.json", "optimizer.pt"
SCALE_FILE = "logit_scale.safetensors"
# Of adapters that were trained inside Qwen3VLForConditionalGeneration; ours are trained on its `model`.
GENERATION_PREFIX = "base_model.model.model."
FILES = (ADAPTER_FILE, "adapter_config.json", SCALE_FILE, OPTIMIZER_FILE, "README.md", STATE_FILE)


class BadCheckpoint(ValueError):
    """A folder that is no whole checkpoint; the text says what is wrong with it."""


def read_state(folder: str | Path) -> dict[str, Any]:
    """Returns trainer_state.json of a checkpoint after looking at all its files.

    Raises:
        BadCheckpoint: A file is missing, torn or empty.
    """
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file() or not (folder / name).stat().st_size:
            raise BadCheckpoint(f"{folder}: {name} is missing or empty, so this is no whole checkpoint")
    for name in (ADAPTER_FILE, SCALE_FILE):
        try:
            load_file(folder / name)
        except (ValueError, SafetensorError) as error:
            raise _damaged(folder, name, error) from error
    _load_optimizer(folder)
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        missing = {"step", "args", "run_id", "global_batch", "world_size"} - state.keys()
    except (ValueError, AttributeError) as error:
        raise _damaged(folder, STATE_FILE, error) from error
    if missing:
        raise BadCheckpoint(f"{folder}: {STATE_FILE} lacks {', '.join(sorted(missing))}")
    return state


def _load_optimizer(folder: Path) -> dict[str, Any]:
    try:
        return torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # on a damaged file the unpickler raises what it likes (KeyError, IndexError, ...)
        raise _damaged(folder, OPTIMIZER_FILE, error) from error


def _damaged(folder: Path, name: str, error: Exception) -> BadCheckpoint:
    """Returns the error for a file that cannot be read, with the gist of a library's message."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].replace(str(folder), "").split(". ")[0]
    return BadCheckpoint(f"{folder / name} is damaged ({reason[:120]}); take an earlier checkpoint")


def adapter_tensors(model: BiQwen3) -> dict[str, torch.Tensor]:
    """Returns the adapter of a model with the keys that PEFT gives it in a file."""
    return get_peft_model_state_dict(model.backbone, save_embedding_layers=False)


def read_back(model: BiQwen3, folder: str | Path, must_have_moved: bool) -> None:
    """Compares the adapter in a folder with the one in memory.

    Args:
        model: With the adapter.
        folder: Checkpoint.
        must_have_moved: Require that some B matrix is not zero (true from step 1 on).

    Raises:
        BadCheckpoint: Keys or values differ, a value is not finite, or every B matrix is still zero.
    """
    saved, held = load_file(Path(folder) / ADAPTER_FILE), adapter_tensors(model)
    wrong = sorted(saved.keys() ^ held.keys())
    if wrong:
        raise BadCheckpoint(f"{folder}: {len(wrong)} adapter keys do not match this model, first {wrong[0]}")
    broken = [key for key, value in saved.items() if not value.isfinite().all()]
    if broken:
        raise BadCheckpoint(f"{folder}: {len(broken)} adapter tensors are not finite, first {broken[0]}")
    differing = [key for key, value in held.items() if not torch.equal(saved[key], value.cpu())]
    if differing:
        raise BadCheckpoint(f"{folder}: {len(differing)} adapter tensors differ from memory, first {differing[0]}")
    if must_have_moved and not any(saved[key].any() for key in saved if ".lora_B." in key):
        raise BadCheckpoint(f"{folder}: every B matrix is zero after training: the adapter received no gradient")


def _refuse_generation_keys(folder: Path) -> None:
    """Refuses an adapter that PEFT would load with no more than a warning, and without effect."""
    try:
        with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
            keys = list(file.keys())
    except SafetensorError as error:
        raise BadCheckpoint(f"{folder}: {ADAPTER_FILE} cannot be read ({error})") from error
    if keys and all(key.startswith(GENERATION_PREFIX) for key in keys):
        raise BadCheckpoint(
            f"{folder}: its keys carry one more `model.` level, as for Qwen3VLForConditionalGeneration (ms-swift saves "
            "such adapters); here it would have no effect, python train_swift.py --remap DIR writes the one that fits"
        )


def load_adapter(model: BiQwen3, folder: str | Path, trainable: bool) -> dict[str, int]:
    """Puts the adapter of a folder on a base model; returns the number of adapted modules of each part.

    An adapter of query-side tuning acts on queries alone from then on, wherever it is loaded.

    Raises:
        BadCheckpoint: The folder holds no adapter, or one of its keys or shapes does not match this model.
    """
    folder = Path(folder)
    for name in (ADAPTER_FILE, "adapter_config.json"):
        if not (folder / name).is_file():
            raise BadCheckpoint(f"{folder}: {name} is missing, so this is no adapter")
    _refuse_generation_keys(folder)
    try:
        base = model.backbone.name_or_path
        model.backbone = PeftModel.from_pretrained(
            model.backbone, str(folder), is_trainable=trainable, torch_device="cpu"
        )  # left to itself it takes the first cuda device, whatever device this rank has
        for config in model.backbone.peft_config.values():
            config.base_model_name_or_path = base  # where it lies now; it may have moved
        adapter_tensors(model)  # here PEFT reads the rest of the configuration
    except Exception as error:  # on a damaged adapter_config.json PEFT raises what it likes, ImportError included
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0]  # torch's first line says nothing
        raise BadCheckpoint(f"{folder}: the adapter does not fit this model ({reason})") from error
    read_back(model, folder, must_have_moved=False)
    with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
        model.documents_by_base = (file.metadata() or {}).get("mode") == QUERY_SIDE
    return model.count_adapted()


def save_checkpoint(
    folder: Path,
    model: BiQwen3,
    logit_scale: LogitScale,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    card: str,
) -> None:
    """Writes a checkpoint under a temporary name, reads it back, and renames it.

    Args:
        folder: `checkpoint-{step}` in the run folder; there is none of that name.
        model: With a PEFT adapter.
        logit_scale: Its scale.
        optimizer: Its optimizer.
        state: Goes to trainer_state.json; has at least step, args, run_id.
        card: Text of README.md.

    Raises:
        BadCheckpoint: What was written is not what is in memory, or the adapter never moved.
    """
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        model.backbone.save_pretrained(temporary, save_embedding_layers=False)  # "auto" asks the hub, at every save
        if model.documents_by_base:  # in the file itself: people copy adapters without the rest of the folder
            tensors = load_file(temporary / ADAPTER_FILE)
            save_file(tensors, temporary / ADAPTER_FILE, metadata={"format": "pt", "mode": QUERY_SIDE})
        save_file(logit_scale.state_dict(), temporary / SCALE_FILE)
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER_FILE)
        write_text(temporary / "README.md", card)
        write_text(temporary / STATE_FILE, dump_json(state, indent=1) + "\n")
        read_back(model, temporary, must_have_moved=state["step"] > 0)
        settle_files(temporary)
        temporary.rename(folder)
        sync_file(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refresh_state(folder: Path, state: dict[str, Any], card: str) -> None:
    """Rewrites what a checkpoint says of its evaluation, where that came after the save (a stop, then a resume)."""
    write_text(folder / "README.md", card)
    write_text(folder / STATE_FILE, dump_json(state, indent=1) + "\n")


def restore(folder: Path, logit_scale: LogitScale, optimizer: torch.optim.Optimizer) -> None:
    """Loads logit scale and optimizer of a checkpoint; the adapter is loaded before the optimizer is made.

    Raises:
        BadCheckpoint: The optimizer was made for other parameters.
    """
    load_scale(folder, logit_scale)
    try:
        optimizer.load_state_dict(_load_optimizer(folder))
    except (KeyError, ValueError, RuntimeError) as error:
        raise BadCheckpoint(f"{folder}: the optimizer state does not fit ({error})") from error


def absolute_args(args: dict[str, Any]) -> dict[str, Any]:
    """Returns flags as a checkpoint stores them: with absolute paths, so that a run resumes from any folder."""
    stored = dict(args)
    for name in ("train_jsonl", "eval_jsonl", "test_jsonl", "document_cache", "model"):
        if args[name] is not None and (name != "model" or os.path.isdir(args[name])):
            stored[name] = os.path.abspath(args[name])
    return stored


def load_scale(folder: Path, logit_scale: LogitScale) -> None:
    """Loads the logit scale of a checkpoint."""
    logit_scale.load_state_dict(load_file(folder / SCALE_FILE))


def read_args(folder: str | Path) -> dict[str, Any]:
    """Returns the flags that an adapter was trained with; of a foreign PEFT adapter at least its base model.

    Raises:
        BadCheckpoint: A file is broken, or the folder holds no adapter.
    """
    found: dict[str, Any] = {}
    for name in ("adapter_config.json", STATE_FILE):
        path = Path(folder) / name
        if not path.is_file():
            if name != STATE_FILE:
                raise BadCheckpoint(f"{folder}: {name} is missing, so this is no adapter")
            continue
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            found |= held.get("args", {}) if name == STATE_FILE else {"model": held.get("base_model_name_or_path")}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadCheckpoint(f"{path}: cannot be read ({error})") from error
    return found


def read_base_weights(folder: str | Path) -> str:
    """Returns the hash of the base weights that an adapter was trained on, "" where its folder does not tell."""
    path = Path(folder) / STATE_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("base_weights") or ""
    except (OSError, ValueError, AttributeError):
        return ""


def read_temperature(folder: str | Path) -> float:
    """Returns the temperature that an adapter has learned, the default of 0.07 where its folder does not tell."""
    logit_scale = LogitScale(0.07)
    if (Path(folder) / SCALE_FILE).is_file():
        load_scale(Path(folder), logit_scale)
    return logit_scale.temperature


def model_card(args: argparse.Namespace, step: int, temperature: float, tables: dict[str, dict[str, float]]) -> str:
    """Returns the README of a checkpoint: how to load it, what it was trained with, what was measured.

    Args:
        args: Flags of the run.
        step: Of the checkpoint.
        temperature: Learned so far.
        tables: Row title -> metrics; empty ones are left out.
    """
    name = Path(args.model).name
    lines = [
        "---",
        "library_name: peft",
        f"base_model: {args.model}",
        "pipeline_tag: visual-document-retrieval",
        "---",
        "",
        f"# LoRA adapter for {name}, step {step}",
        "",
        "Queries and page screenshots become L2-normalised vectors of the last token; similarity is their dot product.",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModel",
        "",
        f'model = PeftModel.from_pretrained(AutoModel.from_pretrained("{args.model}"), "THIS_FOLDER")',
        "```",
        "",
        f"Trained with {args.batch_size} rows of each rank a step, {args.num_hard_negatives} hard negatives a row and",
        f"at most {args.max_num_visual_tokens} visual tokens an image. Temperature now: {temperature:.4f}.",
        "",
    ]
    if vars(args).get("mode") == QUERY_SIDE:
        lines += [
            "**For queries alone**: it was trained against documents of the base model. Embed documents with the",
            "adapter switched off (`with model.disable_adapter():`), or take an index of the base model.",
            "",
        ]
    rows = {title: found for title, found in tables.items() if found}
    if rows:
        names = [key for key in HEADLINES if all(key in found for found in rows.values())]
        lines += ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        lines += [
            f"| {title} | " + " | ".join(format_metric(found[k]) for k in names) + " |" for title, found in rows.items()
        ]
        lines.append("")
    return "\n".join(lines)
