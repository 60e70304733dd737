"""The run folder: its checkpoints in order, what a new start finds there, what is kept and what goes.

Nothing here loads a model; `checkpoint.py` says what a single checkpoint is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from contrastors.checkpoint import STATE_FILE, BadCheckpoint, read_state
from contrastors.records import dump_json, write_text
from contrastors.runlog import cut_metrics

BEST_FILE = "best.json"
RUN_FILES = (
    "metrics.jsonl", BEST_FILE, "curves.png", "train.log", "args.json", "env.json", "summary.json", "eval_step*.json",
    "eval_step*.jsonl", "search_step*.jsonl",
)  # fmt: skip
TRACKER_FOLDERS = ("tensorboard", "wandb")
_NAME = re.compile(r"checkpoint-(\d+)")


def check_output_folder(folder: Path) -> None:
    """Looks whether a run could write there; makes nothing.

    Raises:
        ValueError: It is a file, or may not be written.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"--output-dir {folder}: {place} is a file; give a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"--output-dir {folder}: {place} may not be written; give another folder")


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


def go_back_to(run_folder: Path, state: dict[str, Any], metric: str, checkpoint: Path | None) -> list[str]:
    """Makes a run folder what it was when a checkpoint was saved, or nothing yet; returns notes on what was moved.

    Other checkpoints from that step on, whole or not, are of another future: `latest` must not find them, retention
    not count them, and the run will save under their names, so they are renamed. metrics.jsonl loses the steps after
    it, best.json tells the best up to it.

    Args:
        run_folder: Folder of the run.
        state: With `step`, `evaluated_step`, `best_step`, `best_value`.
        metric: `--best-metric`.
        checkpoint: Where the run goes on; None = at the beginning.
    """
    notes, step = [], state["step"]
    for folder in list_checkpoints(run_folder):
        is_own = checkpoint is not None and folder.samefile(checkpoint)
        if int(folder.name.removeprefix("checkpoint-")) >= step and not is_own:
            aside = folder.with_name(f"abandoned-{folder.name}-{uuid.uuid4().hex[:6]}")
            folder.rename(aside)
            notes.append(f"{folder.name} is no part of this run, which begins at step {step}; kept as {aside.name}")
    for path in run_folder.glob("*_step*.json*"):
        if (match := re.match(r"(?:eval|search)_step(\d+)\.", path.name)) and int(match[1]) > step:
            path.unlink()
    if state["best_step"] is None:
        (run_folder / BEST_FILE).unlink(missing_ok=True)
    else:
        mark_best(run_folder, state["best_step"], metric, state["best_value"])
    cut_metrics(run_folder / "metrics.jsonl", step, keep_evaluation=state["evaluated_step"] == step)
    return notes


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
        shutil.rmtree(hidden, ignore_errors=True)  # a reader on NFS may hold a file; the next start clears it away
    return deleted
