"""Memory and time of the loss by size: whole logits against tiles, with masks and hard negatives.

Each figure comes from a fresh process: bytes beyond the embeddings and their gradients, seconds of forward and
backward. Bytes are told twice: of a process whose allocator gives back what is freed, which is what the loss needs,
and of one as users start it, which keeps freed blocks below 32 MiB. The largest size takes minutes: --sizes 65536.

  python -m benchmarks.loss --sizes 1024 4096 16384
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import PeakMemory, describe_machine, make_parser, show
from contrastors.logit_scale import LogitScale
from contrastors.loss import WHOLE_LOGITS, ColumnMask, clip_loss

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 64
MIB = 2**20
# The default of glibc; once it is set, glibc no longer lets it grow with what is freed.
GIVES_BACK = {"MALLOC_TRIM_THRESHOLD_": "131072"}


def make_case(size: int, negatives: int) -> tuple[torch.Tensor, torch.Tensor, ColumnMask]:
    """Unit vectors near their positives, with one empty slot in 50 and one masked pair in 10 queries."""
    source = torch.Generator().manual_seed(size + negatives)
    queries = torch.randn(size, WIDTH, generator=source)
    documents = torch.randn(size * (1 + negatives), WIDTH, generator=source)
    documents[:: 1 + negatives] += queries
    queries, documents = (torch.nn.functional.normalize(v, dim=1) for v in (queries, documents))
    columns = torch.arange(len(documents))
    missing = (columns % 50 == 49) & (columns % (1 + negatives) > 0)
    rows = torch.arange(0, size, 10)
    pairs = torch.stack([rows, (rows + 1) % size * (1 + negatives)], dim=1)
    return queries.requires_grad_(), documents.requires_grad_(), ColumnMask(missing, pairs)


def run_loss(size: int, negatives: int, tile: int) -> dict[str, float | torch.Tensor]:
    """Loss and gradients of one case; tile 0 = what the library chooses by itself."""
    queries, documents, mask = make_case(size, negatives)
    scale = LogitScale(0.07)
    for vectors in (queries, documents):
        vectors.grad = torch.zeros_like(vectors)
    started = time.perf_counter()
    with PeakMemory() as peak:
        loss = clip_loss(queries, documents, scale, negatives, mask, tile).loss
        loss.backward()
    gradients = torch.cat([queries.grad.flatten(), documents.grad.flatten(), scale.log_scale.grad.flatten()])
    return {
        "loss": loss.item(), "gradients": gradients, "seconds": time.perf_counter() - started, "bytes": peak.bytes
    }  # fmt: skip


def measure_fresh(size: int, negatives: int, tile: int) -> dict[str, float]:
    """Seconds and bytes of one case in fresh processes: one as users start it, one that gives back what is freed."""
    command = [sys.executable, "-m", "benchmarks.loss", "--case", str(size), str(negatives), str(tile)]
    plain, strict = (
        json.loads(subprocess.run(command, cwd=ROOT, env=os.environ | more, capture_output=True, check=True).stdout)
        for more in ({}, GIVES_BACK)
    )
    return {"bytes": strict["bytes"], "bytes of the process": plain["bytes"], "seconds": plain["seconds"]}


def compare_ways(size: int, negatives: int, tile: int) -> dict[str, float]:
    """Differences of tiles from the whole matrix: absolute of the loss, relative L2 of all gradients."""
    whole, tiled = run_loss(size, negatives, size), run_loss(size, negatives, tile)
    difference = (whole["gradients"] - tiled["gradients"]).norm() / whole["gradients"].norm()
    return {
        "queries": size, "hard negatives": negatives, "queries of a tile": tile,
        "difference of the loss": abs(whole["loss"] - tiled["loss"]), "relative L2 of the gradients": float(difference),
    }  # fmt: skip


def measure_sizes(sizes: list[int], negatives: list[int], rounds: int) -> list[dict]:
    rows = []
    for size in sizes:
        for number in negatives:
            logits = size * size * (1 + number)
            ways = {"whole": size, "tiles": max(1, min(size // 4, 2**24 // (size * (1 + number))))}
            if logits > WHOLE_LOGITS:
                del ways["whole"]
            found = {name: [] for name in ways}
            for _ in range(rounds):  # alternating
                for name, tile in ways.items():
                    found[name].append(measure_fresh(size, number, tile))
            for name, runs in found.items():
                rows.append({
                    "queries": size, "documents": size * (1 + number), "way": name, "queries of a tile": ways[name],
                    "MiB of one logits matrix": logits * 4 / MIB,
                    "MiB of the loss": min(r["bytes"] for r in runs) / MIB,
                    "MiB with what glibc keeps": max(r["bytes of the process"] for r in runs) / MIB,
                    "seconds": min(r["seconds"] for r in runs),
                })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "loss")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 8192, 16384], help="queries")
    parser.add_argument("--negatives", type=int, nargs="+", default=[0, 2], help="hard negatives of a query")
    parser.add_argument("--rounds", type=int, default=2, help="alternating runs of each; the fastest counts")
    parser.add_argument("--compare", type=int, default=4096, help="queries at which tiles are compared with the whole")
    parser.add_argument("--case", type=int, nargs=3, help="one case in this process: queries, negatives, tile")
    args = parser.parse_args(argv)
    if args.case:
        run_loss(64, 0, 16)  # what libraries take at the first call does not count
        found = run_loss(*args.case)
        print(json.dumps({"seconds": found["seconds"], "bytes": found["bytes"]}))
        return 0
    if not args.json:
        print(f"{describe_machine()}\n")
    show("loss: memory and time", measure_sizes(args.sizes, args.negatives, args.rounds), args.json)
    compared = [compare_ways(args.compare, number, args.compare // 4) for number in args.negatives]
    show("loss: tiles against the whole matrix", compared, args.json)
    largest = max(value for row in compared for name, value in row.items() if "of the " in name)
    return 0 if largest <= 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
