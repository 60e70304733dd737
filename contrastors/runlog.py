"""The records of a run: metrics.jsonl (the truth), trackers that mirror it, train.log, curves.png, args and env."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from contrastors.records import atomic_output, dump_json, write_text

PROJECT = "contrastors"
PACKAGES = ("torch", "torchvision", "transformers", "peft", "tokenizers", "pillow", "numpy", "safetensors")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(device: str) -> dict[str, Any]:
    """Returns what env.json holds: versions, platform, device and the commit of this project where there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"commit": commit, "versions": versions(), "platform": platform.platform(), "device": device}


LOG_LINE_S = 30.0


class LogProgress:
    """What a bar is where no terminal shows one: a line on stderr every half minute."""

    def __init__(self, total: int, description: str):
        self.total, self.description, self.done = total, description, 0
        self._told = time.monotonic()

    def update(self, count: int = 1) -> None:
        """Counts on."""
        self.done += count
        if time.monotonic() - self._told >= LOG_LINE_S:
            self._told = time.monotonic()
            print(f"{self.description}: {self.done:,} of {self.total:,}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> LogProgress:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def progress(total: int, description: str, enabled: bool, in_logs: bool = True) -> tqdm | LogProgress:
    """Returns a bar on a terminal, a line every half minute elsewhere; nothing beside the main rank.

    Args:
        total: Things to do.
        description: What they are.
        enabled: Whether this is the main rank.
        in_logs: Whether lines are worth it where there is no terminal.
    """
    if enabled and in_logs and not sys.stderr.isatty():
        return LogProgress(total, description)
    return tqdm(total=total, desc=description, disable=not (enabled and sys.stderr.isatty()), leave=False)


class TensorboardTracker:
    """Mirrors metrics into `tensorboard/` of the run folder."""

    def __init__(self, folder: Path, run_name: str, config: dict[str, Any], run_id: str):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("args", f"```json\n{dump_json(config, indent=1)}\n```")

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """Mirrors metrics to Weights & Biases (WANDB_MODE=offline keeps them in the run folder)."""

    def __init__(self, folder: Path, run_name: str, config: dict[str, Any], run_id: str):
        import wandb

        options = {"project": PROJECT, "name": run_name, "id": run_id, "resume": "allow", "dir": str(folder)}
        try:
            self.run = wandb.init(config=config, **options)
        except wandb.Error as error:
            raise ValueError(f"--report-to wandb: {error}; or set WANDB_MODE=offline") from error

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class TrackioTracker:
    """Mirrors metrics to trackio's local database."""

    def __init__(self, folder: Path, run_name: str, config: dict[str, Any], run_id: str):
        import trackio

        self.trackio = trackio
        name = f"{run_name}-{run_id[:8]}"  # trackio knows runs by name alone, and would append to another's
        trackio.init(project=PROJECT, name=name, config=config, resume="allow", embed=False)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.trackio.log(values, step=step)

    def close(self) -> None:
        self.trackio.finish()


TRACKERS = {"tensorboard": TensorboardTracker, "wandb": WandbTracker, "trackio": TrackioTracker}


class RunLog:
    """What one run says and writes; on other ranks than the main one every method does nothing.

    Nothing is written before `open`, so that a run which cannot start leaves the folder as it was.
    """

    def __init__(self, folder: str | Path, is_main: bool):
        self.folder = Path(folder)
        self.is_main = is_main
        self.tracker = None
        self.file = None
        self._waiting: list[str] = []

    def open(self) -> None:
        """Opens train.log and writes what was said so far."""
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.folder / "train.log", "a", encoding="utf-8")
            self.file.write("".join(self._waiting))
            self.file.flush()

    def say(self, text: str) -> None:
        """Prints a line, also into train.log."""
        if not self.is_main:
            return
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
        if self.file is None:
            self._waiting.append(text + "\n")
        else:
            self.file.write(text + "\n")
            self.file.flush()

    def write_records(self, args: dict[str, Any], device: str) -> None:
        """Writes args.json and env.json."""
        if self.is_main:
            write_text(self.folder / "args.json", dump_json(args, indent=1) + "\n")
            write_text(self.folder / "env.json", dump_json(environment(device), indent=1) + "\n")

    def start_tracker(self, name: str, run_name: str, config: dict[str, Any], run_id: str) -> None:
        """Starts the tracker of `--report-to`; its package is imported here.

        Raises:
            ValueError: The package is not installed.
        """
        if self.is_main and name != "none":
            try:
                self.tracker = TRACKERS[name](self.folder, run_name, config, run_id)
            except ImportError as error:
                raise ValueError(
                    f"--report-to {name} needs its package: pip install '.[tracking]' ({error})"
                ) from error

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Appends one line to metrics.jsonl and mirrors it; values that are not finite become null."""
        if not self.is_main:
            return
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(dump_json({"step": step, **values}) + "\n")
        if self.tracker is not None:
            self.tracker.log(step, {k: float(v) for k, v in values.items() if v is not None})

    def close(self) -> None:
        """Ends tracker and log file."""
        if self.tracker is not None:
            self.tracker.close()
        if self.file is not None:
            self.file.close()


def read_metrics(file: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl; a torn last line (a kill while writing) is left out."""
    rows = []
    for line in Path(file).read_bytes().split(b"\n") if Path(file).exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def cut_metrics(file: str | Path, last_step: int, keep_evaluation: bool = True) -> None:
    """Rewrites metrics.jsonl without the steps after `last_step`, so that a resumed run writes no step twice.

    Args:
        file: metrics.jsonl.
        last_step: Of the checkpoint.
        keep_evaluation: Keep the evaluation of that very step; otherwise the resumed run does it again.
    """
    if Path(file).exists():
        kept = [row for row in read_metrics(file) if row["step"] <= last_step]
        if not keep_evaluation:
            kept = [row for row in kept if row["step"] < last_step or "train/loss" in row]
        write_text(file, "".join(dump_json(row) + "\n" for row in kept))


def draw_curves(metrics_file: str | Path, picture: str | Path, names: Iterable[str]) -> bool:
    """Draws one panel a metric from metrics.jsonl; returns False where matplotlib (extra `plots`) is missing."""
    try:
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed
    except ImportError:
        return False
    rows = read_metrics(metrics_file)
    series = {}
    for name in names:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            series[name] = points
    columns = min(4, max(1, len(series)))
    rows_of_panels = max(1, -(-len(series) // columns))
    figure = Figure(figsize=(4 * columns, 3 * rows_of_panels), layout="constrained")
    for place, (name, points) in enumerate(series.items(), start=1):
        axes = figure.add_subplot(rows_of_panels, columns, place)
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else "", linewidth=1.2)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    with atomic_output(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return True
