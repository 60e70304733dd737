"""What the benchmarks share: alternating runs, peak memory, fitted exponents, tables. No models: see models.py."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from contrastors.runlog import environment

Step = Callable[[], None]


class Times(NamedTuple):
    """Fastest of several runs."""

    seconds: float
    cpu_seconds: float


def alternate(ways: dict[str, Step], rounds: int) -> dict[str, Times]:
    """Returns the fastest run of each way; they take turns, so that a slow minute of the machine hits all alike."""
    found = dict.fromkeys(ways, Times(math.inf, math.inf))
    for _ in range(rounds):
        for name, step in ways.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            step()
            now = Times(time.perf_counter() - started, time.process_time() - cpu_started)
            found[name] = Times(*map(min, found[name], now))
    return found


class PeakMemory:
    """Most bytes that this process took inside the block beyond those before it (Linux).

    Attributes:
        bytes: After the block.
    """

    def __enter__(self) -> PeakMemory:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the high-water mark falls to what is resident now
        self._before = _read_status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = _read_status("VmHWM") - self._before


def _read_status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def fit_exponent(sizes: Iterable[float], values: Iterable[float]) -> float:
    """Returns b of values = a x sizes^b, by least squares in logarithms."""
    x, y = (torch.tensor([math.log(v) for v in found], dtype=torch.float64) for found in (sizes, values))
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (x @ x))


def make_parser(doc: str, name: str) -> argparse.ArgumentParser:
    """Returns a parser with `--json`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc, formatter_class=formatter)
    parser.add_argument("--json", action="store_true", help="print a JSON line a row in place of tables")
    return parser


def describe_machine() -> str:
    """Returns the machine and what else it is doing, in words."""
    found = environment("")
    libraries = ", ".join(f"{name} {found['versions'].get(name)}" for name in ("torch", "transformers", "peft"))
    commit = f"; commit {found['commit'][:7]}" if found["commit"] else ""
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    with suppress(OSError):
        device += f", load average {os.getloadavg()[0]:.1f}"
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {os.cpu_count()} cores, {threads} of torch's threads{device}; {libraries}{commit}"


def show(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints rows of equal keys as a table under a title, or as JSON lines."""
    from contrastors.plan import make_table  # not at the top: fresh processes that measure memory begin quicker

    if as_json:
        for row in rows:
            print(json.dumps({"benchmark": title, **row}), flush=True)
        return
    cells = [[f"{v:,.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    print(f"{title}\n\n{make_table(rows[0], cells)}\n", flush=True)
