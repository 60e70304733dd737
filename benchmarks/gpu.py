"""One CUDA device, the real 2B size in bf16 with random weights: tokens/s, share of the matmul ceiling, memory.

Every way computes the gradients of the same batch; times are the least of alternating runs, the ceiling is the best
bf16 matrix product of the same run. "useful" counts the FLOP of one forward and backward; "done" the replays too. Under
eight minutes on one device. `--device cpu --tiny` tries the script itself, in fp32.

  python -m benchmarks.gpu
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from functools import partial

import torch

from benchmarks.common import Step, describe_machine, make_parser, show
from benchmarks.grad_cache import Benchmark
from benchmarks.models import MERGE, PROMPT_TOKENS, QUERY_TOKENS, REAL_2B, TINY, build_model, make_config, make_inputs
from contrastors.costs import Setting, language_flop, vision_flop

TIME_LIMIT_S = 420


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_ceiling(device: str, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of the fastest of ten square matrix products."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = math.inf
    for _ in range(11):  # the first one chooses a kernel
        synchronize(device)
        started = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best


def count_work(config, batch: int, side: int) -> dict[str, int]:
    """Tokens of a step, and FLOP by formula: of one forward and backward, and of what a replay adds."""
    patches = (side // 16) ** 2
    visual = patches // MERGE**2
    setting = Setting(batch, 1, visual, lora_r=8, dropout=False)
    query = language_flop(config.text_config, QUERY_TOKENS, setting)
    document = language_flop(config.text_config, PROMPT_TOKENS + visual, setting)
    vision = vision_flop(config.vision_config, patches, replace(setting, lora_vit=False))
    return {
        "tokens": batch * (QUERY_TOKENS + PROMPT_TOKENS + visual),
        "useful": batch * (sum(query) + sum(document) + vision.forward),
        "replay": batch * (query.forward + document.forward),
        "vision": batch * vision.forward,
    }


def list_ways(benchmark: Benchmark, work: dict[str, int]) -> dict[str, tuple[Step, int]]:
    """Way -> its step, and the FLOP that it does."""
    half = len(benchmark.cut.chunks) // 2
    ways = {
        "classic GradCache": (benchmark.grad_cache, work["useful"] + work["replay"] + work["vision"]),
        "vision once": (partial(benchmark.grad_cache, 0, True), work["useful"] + work["replay"]),
        "all retained": (partial(benchmark.grad_cache, 2 * half), work["useful"]),
    }
    try:
        peer = benchmark.sentence_transformers()
    except ImportError:
        print("sentence-transformers is not installed: pip install '.[bench]'", file=sys.stderr)
        return ways
    return {"sentence-transformers cached loss": (peer, ways["classic GradCache"][1])} | ways


def measure(ways: dict[str, tuple[Step, int]], benchmark: Benchmark, device: str, rounds: int) -> dict[str, dict]:
    """Way -> seconds, peak bytes and gradient; a way that does not fit into memory is left out."""
    found: dict[str, dict] = {}
    began = time.monotonic()
    for turn in range(rounds + 1):  # the first turn warms up, and gives the gradients
        for name, (step, _) in ways.items():
            if turn and (name not in found or time.monotonic() - began > TIME_LIMIT_S):
                continue
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            synchronize(device)
            started = time.perf_counter()
            try:
                gradient = benchmark.gradient(step)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            synchronize(device)
            seconds = time.perf_counter() - started
            row = found.setdefault(name, {"seconds": math.inf, "gradient": gradient.cpu()})
            row["seconds"] = min(row["seconds"], seconds if turn else math.inf)
            row["bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return found


def tabulate(found: dict[str, dict], ways: dict, work: dict[str, int], ceiling: float) -> list[dict]:
    reference = found["classic GradCache"]
    rows = []
    for name, row in found.items():
        flop, seconds = ways[name][1], row["seconds"]
        difference = (row["gradient"] - reference["gradient"]).norm() / reference["gradient"].norm()
        rows.append({
            "way": name, "seconds": seconds, "against classic": seconds / reference["seconds"],
            "tokens/s": work["tokens"] / seconds, "useful, % of ceiling": 100 * work["useful"] / seconds / ceiling,
            "done, % of ceiling": 100 * flop / seconds / ceiling, "peak GiB": row["bytes"] / 2**30,
            "relative L2 to classic": float(difference),
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--batch", type=int, default=16, help="queries, and documents")
    parser.add_argument("--chunk", type=int, default=4, help="queries or documents of one forward")
    parser.add_argument("--side", type=int, default=1024, help="pixels of a tile's side: 1,024 visual tokens")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each; the fastest counts")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the script")
    shape, dtype = TINY if args.tiny else REAL_2B, torch.bfloat16 if args.device == "cuda" else torch.float32
    ceiling = measure_ceiling(args.device, dtype, 256 if args.tiny else 8192)
    model = build_model(shape, device=args.device, dtype=dtype)
    inputs = tuple(both.to(torch.device(args.device)) for both in make_inputs(args.batch, args.side))
    benchmark, work = Benchmark(model, inputs, args.chunk), count_work(make_config(shape), args.batch, args.side)
    ways = list_ways(benchmark, work)
    rows = tabulate(measure(ways, benchmark, args.device, args.rounds), ways, work, ceiling)
    if not args.json:
        print(describe_machine())
        print(f"{args.batch} queries and documents of {args.side} x {args.side} pixels, chunks of {args.chunk}")
        print(f"matrix products reach {ceiling / 1e12:,.1f} TFLOP/s\n")
    show("gpu: steps", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
