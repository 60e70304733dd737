"""How step time and saved memory grow with batch, hard negatives and image size: fitted exponents.

A tiny Qwen3-VL of random weights; GradCache in chunks of 4 documents, nothing retained, vision features computed once.
An exponent of 1 is growth in proportion, 0 is none. Times are CPU seconds, the least of alternating runs.

  python -m benchmarks.scaling --rounds 3
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from benchmarks.common import alternate, describe_machine, fit_exponent, make_parser, show
from benchmarks.models import MERGE, PATCH, TINY, LiveSavedBytes, build_model, count_flop, make_inputs
from contrastors.biqwen3 import BiQwen3
from contrastors.chunking import Chunking, cut_batch
from contrastors.logit_scale import LogitScale
from contrastors.loss import clip_loss, grad_cache_loss

CHUNK, ALL = 4, 10**6


def make_step(model: BiQwen3, batch: int, negatives: int, side: int):
    """Returns a GradCache step; its argument is the number of retained graphs."""
    cut = cut_batch(*make_inputs(batch, side, 1 + negatives), Chunking(documents=CHUNK, queries=CHUNK), MERGE)
    scale = LogitScale(0.07)

    def contrast(embeddings: torch.Tensor):
        return clip_loss(embeddings[:batch], embeddings[batch:], scale, negatives)

    def step(retained: int = 0) -> None:
        grad_cache_loss(model, cut.chunks, contrast, 1.0, retained, model.encode_images)

    return step


def measure_axis(name: str, values: list[int], sizes: list[float], steps: list, rounds: int) -> tuple[list, dict]:
    """Returns a row a value, and the exponents of time, FLOP and memory against the sizes."""
    model = steps[0][0]
    times = alternate({str(value): step for value, (_, step) in zip(values, steps, strict=True)}, rounds)
    rows = []
    for value, (_, step) in zip(values, steps, strict=True):
        kept = []
        for retained in (0, ALL):
            with LiveSavedBytes(model) as saved:
                step(retained)
            kept.append(saved.peak / 2**20)
        rows.append({
            name: value, "CPU seconds": times[str(value)].cpu_seconds, "GFLOP": count_flop(step) / 1e9,
            "MiB saved": kept[0], "MiB saved, all retained": kept[1],
        })  # fmt: skip
    fitted = {"against": name}
    for key in list(rows[0])[1:]:
        fitted[key] = fit_exponent(sizes, [row[key] for row in rows])
    return rows, fitted


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "scaling")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128, 512], help="queries of a step")
    parser.add_argument("--negatives", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="hard negatives of a query")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 128, 256, 512], help="pixels of a tile's side")
    parser.add_argument("--batch", type=int, default=16, help="queries where the batch does not vary")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each; the fastest counts")
    args = parser.parse_args(argv)
    if not args.json:
        print(f"{describe_machine()}\n")
    model = build_model(TINY)
    build, groups = partial(make_step, model), [1 + number for number in args.negatives]
    axes = {
        "batch": (args.batches, args.batches, [build(b, 0, 64) for b in args.batches]),
        "negatives": (args.negatives, groups, [build(args.batch, n, 64) for n in args.negatives]),
        "side": (args.sides, [(s // PATCH // MERGE) ** 2 for s in args.sides], [build(4, 0, s) for s in args.sides]),
    }  # fmt: skip
    exponents = []
    for name, (values, sizes, steps) in axes.items():
        rows, fitted = measure_axis(name, values, sizes, [(model, step) for step in steps], args.rounds)
        show(f"scaling: {name}", rows, args.json)
        exponents.append(fitted)
    show("scaling: exponents (against the batch, 1 + negatives, the visual tokens of a tile)", exponents, args.json)
    # Not 0 at batch 512: the logits of this tiny model are as large as its graphs by then.
    return 0 if abs(exponents[0]["MiB saved"]) < 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
