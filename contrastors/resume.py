"""Going on from a checkpoint: which one, with which flags, in which state.

A flag that was not typed is taken from the checkpoint; a typed one that alters the training and differs is refused.
"""

from __future__ import annotations

import argparse
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import absolute_args, read_state
from contrastors.chunking import Chunking
from contrastors.data import TrainingSet, digest_rows
from contrastors.distributed import from_main, require_agreement
from contrastors.evaluation import EvalSet
from contrastors.loading import hash_file, identify_weights, sample_weights
from contrastors.run_folder import find_latest, list_checkpoints
from contrastors.runlog import RunLog

# Flags of one call: never taken from a checkpoint.
OF_THIS_CALL = {"resume", "overwrite", "allow_changed_args", "eval_only", "output_dir", "plan"}
# Flags that may differ from the checkpoint's without altering what is trained.
FREE_ON_RESUME = OF_THIS_CALL | {
    "num_workers", "eval_steps", "eval_batch_size", "save_steps", "save_total_limit", "report_to", "run_name", "device",
    "max_bad_fraction", "max_image_pixels", "batch_size", "best_metric", "eval_jsonl", "max_eval_rows", "retain_graphs",
    "memory_budget_gb", "reuse_vision_features", "document_cache", "search_api_url", "search_api_batch_size",
    "test_jsonl",
}  # fmt: skip
# What the recorded chunking of a checkpoint was chosen for; while they stay, it stays.
CHUNKING = (
    "grad_cache_chunk", "chunk_tokens", "query_chunk", "retain_graphs", "memory_budget_gb", "reuse_vision_features",
    "query_side_backward", "batch_size", "num_hard_negatives", "max_num_visual_tokens", "gradient_checkpointing",
    "dtype", "attn_implementation", "device",
)  # fmt: skip
# An evaluation may ask anything of an old adapter but another adapter.
EVAL_FREE = FREE_ON_RESUME | {
    "max_num_visual_tokens", "max_query_tokens", "dtype", "attn_implementation", "seed",
}  # fmt: skip
# In the files of a checkpoint, temperature as it was learned: another value could not act on a resumed run.
FIXED_BY_CHECKPOINT = {"mode", "model", "lora_r", "lora_alpha", "lora_dropout", "lora_vit", "temperature"}


@dataclass(slots=True)
class TrainState:
    """Just what a checkpoint restores, beside weights and optimizer."""

    run_id: str
    step: int = 0
    best_step: int | None = None
    best_value: float | None = None
    base_metrics: dict[str, float] = field(default_factory=dict)
    last_metrics: dict[str, float] = field(default_factory=dict)
    evaluated_step: int | None = None
    num_truncated: int = 0
    base_weights: str = ""
    train_file: str = ""
    rows: str = ""
    eval_rows: str = ""


def locate_checkpoint(args: argparse.Namespace) -> tuple[Path | None, dict[str, Any], list[str]]:
    """Returns the checkpoint of `--resume` (None = start anew), its state, and warnings."""
    if not args.resume:
        return None, {}, []
    if args.resume == "latest":
        folder, warnings = find_latest(args.output_dir)
        if folder is None and args.eval_only:
            raise ValueError(f"--resume latest: {args.output_dir} holds no whole checkpoint to evaluate")
        return (folder, read_state(folder), warnings) if folder else (None, {}, warnings)
    folder = Path(args.resume).resolve()  # the run folder is what holds it, not what holds a link to it
    if not folder.is_dir():
        raise ValueError(f"--resume {args.resume}: no such folder")
    if list_checkpoints(folder):
        raise ValueError(f"--resume {folder} is a run folder; give a checkpoint in it, or latest with --output-dir")
    return folder, read_state(folder), []


def take_flags(
    args: argparse.Namespace, typed: set[str], checkpoint: Path, saved: dict[str, Any], world_size: int
) -> list[str]:
    """Fills the flags that were not typed from a checkpoint, whose run goes on in its own folder; returns notes.

    Args:
        args: Flags of this call; changed in place.
        typed: Names of the flags that were typed.
        checkpoint: Folder.
        saved: Its trainer_state.json.
        world_size: Ranks now.

    Raises:
        ValueError: A typed flag alters the training and differs, or leads to another folder.
    """
    if "output_dir" not in typed:
        args.output_dir = str(checkpoint.parent)
    elif not args.eval_only and Path(args.output_dir).resolve() != checkpoint.parent.resolve():
        raise ValueError(f"--resume continues in {checkpoint.parent}; leave --output-dir out")
    free = EVAL_FREE if args.eval_only else FREE_ON_RESUME
    return merge_args(args, typed, saved, free, FIXED_BY_CHECKPOINT, world_size)


def merge_args(
    args: argparse.Namespace, typed: set[str], state: dict[str, Any], free: set[str], fixed: set[str], world_size: int
) -> list[str]:
    """Fills every flag that was not typed from a checkpoint; returns notes on what is no longer as it was.

    With another number of ranks an untyped `--batch-size` follows, so that the global batch, and with it the order of
    rows, stays.

    Args:
        args: Flags of this call; changed in place.
        typed: Names of the flags that were typed.
        state: trainer_state.json.
        free: Flags that do not alter what is trained.
        fixed: Flags whose values are in the files of the checkpoint: another one could not act.
        world_size: Ranks now.

    Raises:
        ValueError: A typed flag alters the training and differs, without `--allow-changed-args`; or the ranks cannot
            share the global batch.
    """
    # Checkpoints of before there were modes are of the standard one.
    saved, now = {"mode": "standard"} | state["args"], absolute_args(vars(args))
    moved = {"model"} if state.get("base_weights") else set()  # its weights decide, see check_origin
    differing = [name for name in saved if name in typed - free - moved and now[name] != saved[name]]
    changed = [f"--{name.replace('_', '-')} {getattr(args, name)} (checkpoint: {saved[name]})" for name in differing]
    for name, value in saved.items():
        if name not in typed and hasattr(args, name):
            setattr(args, name, value)
    if fixed.intersection(differing):
        raise ValueError(
            f"{'; '.join(changed)}: adapter and temperature of a checkpoint are in its files; start a new run"
        )
    if args.eval_only:
        return []
    changed += _share_global_batch(args, "batch_size" in typed, state["global_batch"], world_size)
    if changed and not args.allow_changed_args:
        raise ValueError(
            f"this checkpoint was trained with other flags: {'; '.join(changed)}; add --allow-changed-args"
        )
    notes, old_size = [f"changed on resume: {text}" for text in changed], state["world_size"]
    if world_size != old_size:
        notes.append(f"{old_size} -> {world_size} ranks: --batch-size {args.batch_size}; dropout draws other masks")
        if args.grad_reduction == "sum":
            notes.append(f"with --grad-reduction sum gradients are {world_size / old_size:g} times as large as before")
    return notes


def _share_global_batch(args: argparse.Namespace, is_typed: bool, global_batch: int, world_size: int) -> list[str]:
    """Sets an untyped `--batch-size` so that the global batch stays; returns what a typed one changes."""
    if is_typed:
        if args.batch_size * world_size == global_batch:
            return []
        return [f"--batch-size {args.batch_size} x {world_size} ranks (checkpoint: global batch {global_batch})"]
    if global_batch % world_size:
        raise ValueError(
            f"the checkpoint has a global batch of {global_batch}, which {world_size} ranks cannot share; give "
            "--batch-size and --allow-changed-args"
        )
    args.batch_size = global_batch // world_size
    return []


class Origin(NamedTuple):
    """Hashes of what a run stands on; "" = not looked at, since this call does not need it.

    Attributes:
        base_weights: Weights of the base model.
        train_file: `--train-jsonl`.
        rows: Its usable rows, with their documents.
        eval_rows: Queries and corpus of the evaluation.
    """

    base_weights: str = ""
    train_file: str = ""
    rows: str = ""
    eval_rows: str = ""


def check_origin(args: argparse.Namespace, state: TrainState, origin: Origin) -> list[str]:
    """Notes base model and rows in the state; returns notes on what is changed.

    Paths say little: a folder may have moved, or hold another model by now.

    Args:
        args: Flags of this call.
        state: Of the checkpoint, or fresh; changed in place.
        origin: As found now.

    Raises:
        ValueError: The weights are others; or the file is, without `--allow-changed-args`.
    """
    if "" != state.base_weights != origin.base_weights:
        raise ValueError(f"--model {args.model} has other weights than those that this checkpoint was trained on")
    notes = []
    if origin.rows and "" != state.rows != origin.rows:
        text = f"the usable rows of {args.train_jsonl} are not those of the checkpoint, so they come in another order"
        is_same_file = state.train_file == origin.train_file
        if not is_same_file and not args.allow_changed_args:
            raise ValueError(f"{text}; put that right, or add --allow-changed-args")
        notes.append(text + " (the file is the same: pictures or flags are others)" * is_same_file)
    if origin.eval_rows and "" != state.eval_rows != origin.eval_rows:
        notes.append("the rows of the evaluation; earlier values are not compared with those to come")
        state.best_step = state.best_value = state.evaluated_step = None
        state.base_metrics, state.last_metrics = {}, {}
    for name, found in origin._asdict().items():
        setattr(state, name, found or getattr(state, name))
    return notes


def restore_state(args: argparse.Namespace, saved: dict[str, Any], log: RunLog) -> TrainState:
    """Returns the state of a checkpoint, or a fresh one; a best checkpoint by another metric, or gone, is forgotten.

    Raises:
        ValueError: The checkpoint is beyond `--max-steps`.
    """
    known = {name: saved[name] for name in TrainState.__dataclass_fields__ if name in saved}
    state = TrainState(**({"run_id": uuid.uuid4().hex} | known))
    if args.eval_only:
        return state
    if state.step > args.max_steps:
        raise ValueError(f"the checkpoint is at step {state.step}, beyond --max-steps {args.max_steps}; raise it")
    if saved and args.best_metric != saved["args"]["best_metric"]:
        state.best_step = state.best_value = state.evaluated_step = None
        log.say("changed on resume: --best-metric; earlier bests do not count")
    if state.best_step is not None and not Path(args.output_dir, f"checkpoint-{state.best_step}").is_dir():
        log.say(f"the best checkpoint so far, of step {state.best_step}, is gone; the next evaluation is the best anew")
        state.best_step = state.best_value = None
    return state


def take_state(
    args: argparse.Namespace,
    saved: dict[str, Any],
    model: BiQwen3,
    data: TrainingSet | None,
    eval_set: EvalSet | None,
    log: RunLog,
) -> TrainState:
    """Returns the state to go on from; base model and rows must be those that it stands for. Collective.

    Args:
        args: Flags of this call, with those of the checkpoint in place of untyped ones.
        saved: trainer_state.json; empty = start anew.
        model: The base model as loaded, before an adapter.
        data: Of training; None = `--eval-only`.
        eval_set: Of evaluation, where there is one.
        log: Of the run.

    Raises:
        ValueError: Ranks, or checkpoint and this call, stand on other models or rows.
    """
    state = restore_state(args, saved, log)
    rows = eval_rows = ""
    if data is not None:
        rows = digest_rows(data.documents, ((row.query, [row.positive, *row.negatives]) for row in data.rows))
    if eval_set is not None and not args.eval_only:
        eval_rows = digest_rows(eval_set.documents, zip(eval_set.queries, eval_set.positives, strict=True))
    place = f"step {state.step} of run {saved.get('run_id')}"
    require_agreement(
        {"--train-jsonl": rows, "--eval-jsonl": eval_rows, "--model": sample_weights(model), "the checkpoint": place}
    )
    origin = None
    if log.is_main and (saved or data is not None):  # an evaluation of the base alone compares nothing
        file = hash_file(args.train_jsonl) if data is not None else ""
        origin = Origin(identify_weights(args.model), file, rows, eval_rows)
    for note in check_origin(args, state, from_main(origin) or Origin()):
        log.say(f"changed on resume: {note}")
    if saved and state.step == args.max_steps and not args.eval_only:
        log.say(f"step {state.step} of {args.max_steps} is done; for more: --max-steps N --allow-changed-args")
    return state


def recorded_chunking(args: argparse.Namespace, saved: dict[str, Any]) -> Chunking | None:
    """Returns the chunking of a checkpoint as long as the flags are those that it was chosen for."""
    if not saved or any(vars(args)[name] != saved["args"].get(name, vars(args)[name]) for name in CHUNKING):
        return None
    return Chunking(**saved["chunking"])
