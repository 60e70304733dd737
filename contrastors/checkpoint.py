"""Checkpoints: written whole or not at all, read back at once, found by reading, deleted with care.

A `checkpoint-{step}/` is a PEFT adapter (loads with plain PEFT), the logit scale, the optimizer, `trainer_state.json`
and a model card. Random states and sampler need no saving: they are functions of (seed, step, rank).
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from contrastors.records import dump_json, sync_file, write_text
from contrastors.runlog import cut_metrics

ADAPTER_FILE, STATE_FILE, OPTIMIZER_FILE = "adapter_model.safetensors", "trainer_state.json", "optimizer.pt"
SCALE_FILE, BEST_FILE = "logit_scale.safetensors", "best.json"
# Of adapters that were trained inside Qwen3VLForConditionalGeneration; ours are trained on its `model`.
GENERATION_PREFIX = "base_model.model.model."
FILES = (ADAPTER_FILE, "adapter_config.json", SCALE_FILE, OPTIMIZER_FILE, "README.md", STATE_FILE)
RUN_FILES = (
    "metrics.jsonl", BEST_FILE, "curves.png", "train.log", "args.json", "env.json", "summary.json", "eval_step*.json",
    "eval_step*.jsonl", "search_step*.jsonl",
)  # fmt: skip
TRACKER_FOLDERS = ("tensorboard", "wandb")
CARD_METRICS = ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10", "margin", "loss")
# `--mode` of a run that trains the query tower alone; documents keep the base model's vectors.
QUERY_SIDE = "query-side-tune"
_NAME = re.compile(r"checkpoint-(\d+)")


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
    try:
        load_file(folder / ADAPTER_FILE), load_file(folder / SCALE_FILE)
        _load_optimizer(folder)
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        missing = {"step", "args", "run_id", "global_batch", "world_size"} - state.keys()
    except (ValueError, AttributeError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder}: cannot be read ({error})") from error
    if missing:
        raise BadCheckpoint(f"{folder}: {STATE_FILE} lacks {', '.join(sorted(missing))}")
    return state


def _load_optimizer(folder: Path) -> dict[str, Any]:
    try:
        return torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # on a damaged file the unpickler raises what it likes (KeyError, IndexError, ...)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadCheckpoint(f"{folder}: {OPTIMIZER_FILE} cannot be read ({reason})") from error


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """Returns the checkpoint folders of a run, whole or not, by rising step."""
    found = [(int(m[1]), p) for p in Path(run_folder).glob("checkpoint-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def find_latest(run_folder: str | Path) -> tuple[Path | None, list[str]]:
    """Returns the whole checkpoint with the highest step, and a warning for each broken one above it."""
    warnings = []
    for folder in reversed(list_checkpoints(run_folder)):
        try:
            read_state(folder)
        except BadCheckpoint as error:
            warnings.append(f"skipped an incomplete checkpoint: {error}")
            continue
        return folder, warnings
    return None, warnings


def adapter_tensors(model: BiQwen3) -> dict[str, torch.Tensor]:
    """Returns the adapter of a model with the keys that PEFT gives it in a file."""
    return get_peft_model_state_dict(model.backbone)


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
        model.backbone = PeftModel.from_pretrained(model.backbone, str(folder), is_trainable=trainable)
        adapter_tensors(model)  # here PEFT reads the rest of the configuration
    except Exception as error:  # on a damaged adapter_config.json PEFT raises what it likes, ImportError included
        reason = (str(error).splitlines() or [type(error).__name__])[0]
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
        model.backbone.save_pretrained(temporary)
        if model.documents_by_base:  # in the file itself: people copy adapters without the rest of the folder
            tensors = load_file(temporary / ADAPTER_FILE)
            save_file(tensors, temporary / ADAPTER_FILE, metadata={"format": "pt", "mode": QUERY_SIDE})
        save_file(logit_scale.state_dict(), temporary / SCALE_FILE)
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER_FILE)
        write_text(temporary / "README.md", card)
        write_text(temporary / STATE_FILE, dump_json(state, indent=1) + "\n")
        read_back(model, temporary, must_have_moved=state["step"] > 0)
        for path in temporary.iterdir():
            sync_file(path)
        sync_file(temporary)
        temporary.rename(folder)
        sync_file(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refresh_state(folder: Path, state: dict[str, Any], card: str) -> None:
    """Rewrites what a checkpoint says of its evaluation, where that came after the save (a stop, then a resume)."""
    write_text(folder / "README.md", card)
    write_text(folder / STATE_FILE, dump_json(state, indent=1) + "\n")


def go_back_to(run_folder: Path, state: dict[str, Any], metric: str) -> list[str]:
    """Makes a run folder what it was when a checkpoint was saved; returns notes on what was moved.

    Checkpoints beyond it are of another future: `latest` must not find them, nor retention count them, so they are
    renamed. metrics.jsonl loses the steps after it, best.json tells the best up to it.

    Args:
        run_folder: Folder of the run.
        state: With `step`, `evaluated_step`, `best_step`, `best_value`.
        metric: `--best-metric`.
    """
    notes, step = [], state["step"]
    for folder in list_checkpoints(run_folder):
        if int(folder.name.removeprefix("checkpoint-")) > step:
            aside = folder.with_name(f"abandoned-{folder.name}-{uuid.uuid4().hex[:6]}")
            folder.rename(aside)
            notes.append(f"{folder.name} lies beyond step {step}, where this run goes on; it is kept as {aside.name}")
    for path in run_folder.glob("*_step*.json*"):
        if (match := re.match(r"(?:eval|search)_step(\d+)\.", path.name)) and int(match[1]) > step:
            path.unlink()
    if state["best_step"] is None:
        (run_folder / BEST_FILE).unlink(missing_ok=True)
    else:
        mark_best(run_folder, state["best_step"], metric, state["best_value"])
    cut_metrics(run_folder / "metrics.jsonl", step, keep_evaluation=state["evaluated_step"] == step)
    return notes


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


def remove_leftovers(run_folder: Path) -> None:
    """Removes the temporary folders that a killed save left behind."""
    for path in run_folder.glob(".checkpoint-*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def mark_best(run_folder: Path, step: int, metric: str, value: float) -> None:
    """Writes best.json: the step, metric and value of the best checkpoint."""
    best = {"checkpoint": f"checkpoint-{step}", "step": step, "metric": metric, "value": value}
    write_text(run_folder / BEST_FILE, dump_json(best) + "\n")


def delete_old(run_folder: Path, keep: int, best_step: int | None, run_id: str) -> list[Path]:
    """Deletes the oldest checkpoints of this run beyond the newest `keep`; returns the deleted folders.

    Never deleted: the best one, and folders that are broken or belong to another run.

    Args:
        run_folder: Folder of the run.
        keep: `--save-total-limit`; 0 = keep all.
        best_step: Step of the best checkpoint.
        run_id: Of this run.
    """
    own = []
    for folder in list_checkpoints(run_folder):
        try:
            if json.loads((folder / STATE_FILE).read_text(encoding="utf-8")).get("run_id") == run_id:
                own.append(folder)
        except (OSError, ValueError, AttributeError):
            continue
    surplus = own[:-keep] if keep else []
    deleted = [folder for folder in surplus if folder.name != f"checkpoint-{best_step}"]
    for folder in deleted:
        hidden = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}")  # a kill in mid-removal leaves no torso
        folder.rename(hidden)
        shutil.rmtree(hidden)
    return deleted


def absolute_args(args: dict[str, Any]) -> dict[str, Any]:
    """Returns flags as a checkpoint stores them: with absolute paths, so that a run resumes from any folder."""
    stored = dict(args)
    for name in ("train_jsonl", "eval_jsonl", "test_jsonl", "document_cache", "model"):
        if args[name] is not None and (name != "model" or os.path.isdir(args[name])):
            stored[name] = os.path.abspath(args[name])
    return stored


def find_results(run_folder: Path, eval_only: bool) -> list[Path]:
    """Returns results in a folder that a new run, or a new `--eval-only`, would mix with its own."""
    if eval_only:
        return sorted(run_folder.glob("eval_step*.json"))
    found = [*run_folder.glob("metrics.jsonl"), *sorted(run_folder.glob("eval_step*.json"))]
    return list_checkpoints(run_folder) + found


def clear_results(run_folder: Path) -> None:
    """Removes what an older run of the training script left in its folder; other files stay."""
    for folder in list_checkpoints(run_folder):
        if (folder / STATE_FILE).exists():
            shutil.rmtree(folder)
    for pattern in RUN_FILES:
        for path in run_folder.glob(pattern):
            path.unlink()
    for name in TRACKER_FOLDERS:
        shutil.rmtree(run_folder / name, ignore_errors=True)


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
        names = [key for key in CARD_METRICS if all(key in found for found in rows.values())]
        lines += ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        lines += [
            f"| {title} | " + " | ".join(f"{found[k]:.4f}" for k in names) + " |" for title, found in rows.items()
        ]
        lines.append("")
    return "\n".join(lines)
