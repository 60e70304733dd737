"""Long runs that watch for leaks and lost work; by hand, since they take minutes to an hour.

    python -m tests.soak train [--steps 2000]       two ranks, SIGTERM again and again, each time resumed
    python -m tests.soak filter [--rows 20000]      the filter against a judge that fails one request in seven

Both end with figures, and with exit code 1 where something was lost or memory grows.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conftest import make_colour_set, write_rows
from tests.judge_server import JudgeServer, Played, chat, error
from tests.runs import arguments, finish, metrics, same_weights, start

LARGEST_SLOPE = 8.0  # MiB in 1,000 steps, or in 10,000 requests, after the warm-up


class Watch:
    """Memory and open files of a process and its children, sampled while it lives.

    Args:
        pid: Of the process; its children are told apart by what they are.
        clock: What time is counted in (steps, requests).
    """

    def __init__(self, pid: int, clock: Callable[[], float]):
        self.process, self.clock = psutil.Process(pid), clock
        self.samples: dict[str, list[tuple[float, float, int]]] = defaultdict(list)

    def sample(self) -> None:
        """Notes resident MiB and open files of each process."""
        try:
            ranks = [p for p in self.process.children() if "train_contrastors.py" in " ".join(p.cmdline())]
            named = [("process", self.process)] if not ranks else [(f"rank {n}", p) for n, p in enumerate(ranks)]
            for name, process in list(named):
                named += [(f"{name} loader {child.pid}", child) for child in process.children()]
            for name, process in named:
                # Not the unshared part: what a rank shares with its loader becomes its own when the loader ends.
                used = process.memory_info().rss / 2**20
                self.samples[name].append((self.clock(), used, process.num_fds()))
        except psutil.Error:  # it ended meanwhile
            pass

    def slopes(self, skip: float) -> dict[str, tuple[float, float, int]]:
        """Returns, for each process, MiB a unit of the clock after the first `skip`, the peak, and most open files."""
        found = {}
        for name, rows in self.samples.items():
            late = np.array([row for row in rows if row[0] >= rows[0][0] + skip])
            if len(late) >= 10 and np.ptp(late[:, 0]) > skip / 2:  # not those of one evaluation
                slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
                found[name] = slope, float(late[:, 1].max()), int(late[:, 2].max())
        return found


def soak_training(folder: Path, num_steps: int) -> int:
    """Trains on two ranks undisturbed, then with random stops; returns the number of things that are wrong."""
    from contrastors.demo import make_model

    model = make_model(folder / "model", seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)
    (folder / "data").mkdir()
    data, source, stops = make_colour_set(folder / "data"), random.Random(0), 0
    flags = {"max_steps": num_steps, "num_workers": 1, "eval_steps": 30, "save_steps": 50, "num_hard_negatives": 2}
    flags["lr"] = 1e-4

    def step_of(output: Path) -> int:
        file = output / "metrics.jsonl"
        return json.loads(file.read_bytes().splitlines()[-1])["step"] if file.exists() and file.stat().st_size else 0

    whole, stopped = folder / "whole", folder / "stopped"
    process = start(arguments(model, data, whole, **flags), 2)
    watch = Watch(process.pid, lambda: step_of(whole))
    while process.poll() is None:
        watch.sample()
        time.sleep(0.5)
    code_whole, _ = finish(process)
    # Allocators of the main rank grow through the first twenty evaluations or so, and then no more.
    slopes = watch.slopes(skip=num_steps // 2)
    for name, (slope, peak, files) in slopes.items():
        print(
            f"{name}: {1000 * slope:+.2f} MiB in 1,000 steps, peak {peak:.0f} MiB, {files} open files",
            flush=True,
        )
    while True:
        resume = {"resume": "latest"} if stops else {}
        process = start(arguments(model, data, stopped, **flags, **resume), 2)
        stop_at = step_of(stopped) + source.randrange(num_steps // 20, num_steps // 3)
        while process.poll() is None and step_of(stopped) < min(stop_at, num_steps):
            time.sleep(0.2)
        stopping = process.poll() is None and step_of(stopped) < num_steps
        if stopping:
            process.send_signal(signal.SIGTERM)
        code, text = finish(process, timeout=300)
        print(f"life {stops + 1}: to step {step_of(stopped)}, exit {code}", flush=True)
        if not stopping:
            break
        stops += 1
    last = f"checkpoint-{num_steps}"
    wrong = {
        "a run failed": code != 0 or code_whole != 0,
        "weights differ": not same_weights(stopped / last, whole / last),
        "metrics differ": metrics(stopped) != metrics(whole),
        "memory grows": any(1000 * slope > LARGEST_SLOPE for slope, _, _ in slopes.values()),
    }
    found = [name for name, is_so in wrong.items() if is_so]
    print(f"{stops} stops, {num_steps} steps, two ranks; wrong: {found or 'nothing'}")
    if wrong["a run failed"]:
        print(text[-3000:])
    return sum(wrong.values())


def soak_filter(folder: Path, num_rows: int) -> int:
    """Filters rows against a judge that fails often; returns the number of things that are wrong."""
    (folder / "data").mkdir()
    data, source = make_colour_set(folder / "data"), random.Random(0)
    rows = [
        {"query": f"query {n}", "chunk_path": f"c{n % 12:02d}.png",
         "retrieve_top20": [{"rank": k, "path": f"c{(n + k) % 12:02d}.png", "score": 1 - k / 10} for k in (1, 2)]}
        for n in range(num_rows)
    ]  # fmt: skip
    write_rows(data / "in.jsonl", rows)
    wanted: dict[str, int] = {}

    def reply(request) -> Played | str:
        chance = source.random()
        if chance < 0.05:
            return error(429, Retry_After="0")
        if chance < 0.10:
            return error(503)
        if chance < 0.13:
            return Played({"choices": []}, cut=True)
        if chance < 0.14:
            return chat(None, "length")
        wanted[request.query] = wanted.get(request.query, 0) + 1
        return '{"verdict": "WRONG"}' if request.is_verdict else "nothing of that kind"

    argv = ["--input", data / "in.jsonl", "--output", data / "out.jsonl", "--candidate-k", 2, "--num-hard-negatives", 2]
    argv += ["--concurrency", 16, "--max-retries", 8]
    with JudgeServer(reply, keep=False) as server:
        command = [sys.executable, "filter_hard_negatives_vqa.py", *map(str, argv), "--base-url", server.url]
        process = psutil.Popen(command, cwd=Path(__file__).resolve().parent.parent)
        watch, started = Watch(process.pid, lambda: server.num_calls), time.monotonic()
        while process.poll() is None:
            watch.sample()
            time.sleep(1)
        seconds = time.monotonic() - started
    summary = json.loads((data / "out.summary.json").read_text())
    for name, (slope, peak, files) in watch.slopes(skip=2000).items():
        print(f"{name}: {10_000 * slope:+.2f} MiB in 10,000 requests, peak {peak:.0f} MiB, {files} open files")
    done = [summary[f"num_rows_{what}"] for what in ("written", "skipped", "failed")]
    print(f"{server.num_calls:,} requests in {seconds:.0f} s for {num_rows:,} rows: written, skipped, failed {done}")
    print(f"verdicts {summary['verdicts']}")
    wrong = {
        "exit code": process.returncode != 0,
        "rows are lost": sum(done) != num_rows,
        "rows failed": done[2] > num_rows // 1000,
        "memory grows": any(10_000 * row[0] > LARGEST_SLOPE for row in watch.slopes(skip=2000).values()),
    }
    print(f"wrong: {[name for name, is_so in wrong.items() if is_so] or 'nothing'}")
    return sum(wrong.values())


def main() -> int:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "filter"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=20_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = soak_training(Path(folder), args.steps) if args.what == "train" else soak_filter(Path(folder), args.rows)
    return min(1, work)


if __name__ == "__main__":
    sys.exit(main())
