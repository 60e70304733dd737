"""Ways to run the training script in tests, and to read what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.conftest import ROOT

SCRIPT = ROOT / "train_contrastors.py"


def arguments(checkpoint: Path, data: Path, output: Path, **flags: object) -> list[str]:
    """A quick run on 12 coloured tiles; a flag set to None is left out, True and False become --flag and --no-flag."""
    defaults: dict[str, object] = {
        "model": checkpoint, "train_jsonl": data / "rows.jsonl", "eval_jsonl": data / "rows.jsonl",
        "output_dir": output,
        "max_steps": 4, "batch_size": 4, "grad_cache_chunk": 2, "warmup_steps": 1, "lr": 1e-2, "num_workers": 0,
        "eval_steps": 2, "save_steps": 2, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "device": "cpu",
        "max_num_visual_tokens": 16,
    }  # fmt: skip
    if flags.get("eval_steps") == 0:
        defaults["eval_jsonl"] = None
    argv: list[str] = []
    for name, value in (defaults | flags).items():
        text = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(text if value else text.replace("--", "--no-", 1))
        elif value is not None:
            argv += [text, str(value)]
    return argv


@contextmanager
def signals_kept() -> Iterator[None]:
    """Gives SIGINT and SIGTERM back the handlers that they had: scripts install their own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train(argv: list[str]) -> int:
    """Runs the script in this process and returns its exit code."""
    from train_contrastors import main

    try:
        with signals_kept():
            return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def spawn(*arguments: object, **variables: str) -> subprocess.Popen:
    """Starts Python in a process group of its own."""
    command, pipe = [sys.executable, *map(str, arguments)], subprocess.PIPE
    own = environment(**variables)
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=own, start_new_session=True)


def torchrun(num_processes: int, *script: object, options: Sequence[str] = ("--standalone",)) -> subprocess.Popen:
    """Starts a script on several ranks, each a fresh interpreter."""
    return spawn("-m", "torch.distributed.run", f"--nproc_per_node={num_processes}", *options, *script)


def warm_torchrun(num_processes: int, *script: object) -> tuple[int, str]:
    """Runs a script on several ranks, forked from a process that knows the libraries: tests/warm.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm.ADDRESS, warm.start_server())
        return finish(torchrun(num_processes, warm.__file__, *script))


def start(argv: list[str], num_processes: int = 1, torchrun_options: list[str] | None = None) -> subprocess.Popen:
    """Starts the script, under torchrun where there are several processes."""
    if num_processes > 1 or torchrun_options:
        return torchrun(num_processes, SCRIPT, *argv, options=torchrun_options or ("--standalone",))
    return spawn(SCRIPT, *argv)


def finish(process: subprocess.Popen, timeout: int = 600) -> tuple[int, str]:
    """Waits, and returns exit code and everything printed; kills the whole group when it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"hung: {out[-2000:]}{err[-2000:]}") from None
    return process.returncode, out + err


def run_on_ranks(argv: list[str], num_processes: int) -> tuple[int, str]:
    """Runs the script on several ranks that nothing disturbs."""
    return warm_torchrun(num_processes, SCRIPT, *argv)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    # cloned: load_file maps the file into memory, and some tests damage the file afterwards
    return {key: value.clone() for key, value in load_file(folder / "adapter_model.safetensors").items()}


def metrics(folder: Path) -> list[dict]:
    """Lines of metrics.jsonl without times, which no two runs share."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in metrics(folder) if "train/loss" in row]


def same_weights(first: Path, second: Path) -> bool:
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def largest_difference(first: Path, second: Path) -> float:
    a, b = weights(first), weights(second)
    return max(float((a[key] - b[key]).abs().max()) for key in a)
