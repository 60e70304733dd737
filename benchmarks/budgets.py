"""What a step's graphs hold in memory: the same whatever the batch, and never more than `--memory-budget-gb`.

A tiny Qwen3-VL of random weights with an adapter on both parts, 128x128 tiles and shorter ones, chunks of 4
documents. Bytes are those that autograd saves, each storage once, from when it is saved until the graph lets go of
it: `held` is the most at any one time of a step.

First, GradCache that retains nothing, by batch. Then `--retain-graphs auto`, by budget: graphs retained, bytes held,
time (the least of alternating runs; on a busy machine look at the CPU time) and gradients against no retaining.
Budgets are multiples of a full chunk's graph. A chunk's own graph is held in any case: a budget below that can only
retain nothing.

  python -m benchmarks.budgets --rounds 6 --plot budgets.png
"""

from __future__ import annotations

import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.common import alternate, describe_machine, make_parser, show
from benchmarks.gradients import Encoder, load_encoder
from benchmarks.models import LiveSavedBytes
from contrastors.batches import Batch, contrast_batch
from contrastors.chunking import (
    GIB,
    Chunking,
    SavedBytes,
    add_gradients,
    choose_retained,
    count_retained,
    cut_batch,
    make_full_chunk,
    measure_chunk,
)
from contrastors.demo import make_model
from contrastors.distributed import GradientBucket
from contrastors.loss import ColumnMask
from contrastors.processing import Inputs
from contrastors.records import atomic_output

CHUNK, VISUAL_TOKENS, WIDTH, ALL = 4, 16, 128, 10**6
HEIGHTS = (128, 32, 128, 96, 64, 128, 32, 128)  # by turns: chunks of any batch are of the same two kinds
MIB = 2**20


def make_batch(encoder: Encoder, size: int) -> Batch:
    """Returns `size` queries, and a document of random pixels for each."""
    source, processor = random.Random(0), encoder.processor
    words = ("red", "blue", "header", "footer", "dot", "bar")
    tiles = [(WIDTH, HEIGHTS[number % len(HEIGHTS)]) for number in range(size)]
    images = [Image.frombytes("RGB", (8, 8), source.randbytes(192)).resize(tile) for tile in tiles]
    texts = [processor.encode_query(" ".join(source.choices(words, k=8))) for _ in range(size)]
    both = [Inputs.from_items(i, processor.pad_id) for i in (texts, [*map(processor.encode_document, images)])]
    mask = ColumnMask(torch.zeros(size, dtype=torch.bool), torch.zeros(0, 2, dtype=torch.int64))
    return Batch(*both, torch.arange(size), mask, [*range(size)])


class Steps:
    """A batch's steps under any chunking."""

    def __init__(self, encoder: Encoder, size: int):
        self.encoder, self.batch = encoder, make_batch(encoder, size)
        self.bucket = GradientBucket(encoder.parameters.values())
        self.cut = cut_batch(self.batch.queries, self.batch.documents, Chunking(CHUNK), encoder.processor.merge_size)

    def run(self, chunking: Chunking) -> None:
        self.bucket.zero_()
        contrast = partial(contrast_batch, self.batch, self.cut.places, self.encoder.scale, 0, 0)
        outcome = add_gradients(self.encoder.model, self.cut, contrast, 1.0, chunking)
        assert not outcome.gave_up_own and not outcome.needs_halves, outcome

    def hold(self, chunking: Chunking) -> int:
        """Returns the most bytes that graphs hold at once in a step."""
        with LiveSavedBytes(self.encoder.model) as saved:
            self.run(chunking)
        assert saved.now == 0, f"{saved.now} bytes outlive the step"
        return saved.peak

    def largest_graph(self) -> int:
        """Returns the bytes that the largest chunk's graph saves."""
        found = []
        for chunk in self.cut.chunks:
            with SavedBytes(self.encoder.model) as saved:
                self.encoder.model(**chunk)
            found.append(saved.total)
        return max(found)


def measure_batches(encoder: Encoder, sizes: list[int]) -> list[dict]:
    """A row a batch: bytes held with nothing and with everything retained."""
    rows = []
    for size in sizes:
        steps = Steps(encoder, size)
        held = [steps.hold(Chunking(CHUNK, num_retained=retained)) for retained in (0, ALL)]
        rows.append({
            "batch": size, "chunks": len(steps.cut.chunks), "MiB of the largest graph": steps.largest_graph() / MIB,
            "MiB held": held[0] / MIB, "MiB held, all retained": held[1] / MIB,
        })  # fmt: skip
    return rows


def measure_budgets(encoder: Encoder, size: int, rounds: int) -> list[dict]:
    """A row a budget, after one without retaining; what fits is chosen as the training script does it."""
    steps = Steps(encoder, size)
    graph = measure_chunk(encoder.model, make_full_chunk(encoder.processor, Chunking(CHUNK)), False).graph
    number = len(steps.cut.chunks)
    found = {"no retaining": (0, Chunking(CHUNK))}
    for graphs in (0.5, 1, number // 4, number // 2, 3 * number // 4, number):
        chunking, budget = Chunking(CHUNK), int(graphs * graph)
        choose_retained(encoder.model, encoder.processor, chunking, budget / GIB, size, group=1)
        found[f"{graphs} graphs"] = budget, chunking
    times = alternate({name: partial(steps.run, chunking) for name, (_, chunking) in found.items()}, rounds)
    rows, classic = [], None
    for name, (budget, chunking) in found.items():
        held = steps.hold(chunking)
        gradients = steps.bucket.gradients.clone()
        classic = gradients if classic is None else classic
        rows.append({
            "budget": name, "MiB": budget / MIB, "retained": count_retained(steps.cut.chunks, chunking),
            "chunks": number, "MiB held": held / MIB, "MiB of a full graph": graph / MIB,
            "time": times[name].seconds / times["no retaining"].seconds,
            "CPU time": times[name].cpu_seconds / times["no retaining"].cpu_seconds,
            "relative L2 to no retaining": float((gradients - classic).norm() / classic.norm()),
        })  # fmt: skip
    return rows


def draw(rows: list[dict], picture: Path) -> None:
    """Draws bytes held and time over the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    budgets = [row["MiB"] for row in rows[1:]]
    graph, end = rows[0]["MiB of a full graph"], 1.05 * max(budgets)
    left.plot([0, end], [0, end], color="grey", linewidth=1, label="the budget")
    left.axhline(rows[0]["MiB held"], color="tab:orange", linestyle=":", label="one chunk's graph: the least there is")
    left.plot(budgets, [row["MiB held"] for row in rows[1:]], "o-", label="held at once, at most")
    left.set(title="A budget is kept", xlabel="budget (MiB)", ylabel="bytes of graphs (MiB)", xlim=(0, end))
    left.set_ylim(0, end)
    left.legend(fontsize="small", loc="upper left")
    right.axhline(1, color="grey", linewidth=1, label="nothing retained")
    right.plot(budgets, [row["CPU time"] for row in rows[1:]], "o-", label="--retain-graphs auto, CPU time")
    right.plot(budgets, [row["time"] for row in rows[1:]], ".", color="tab:gray", label="the same, time on the clock")
    for row in rows[1:]:
        place = row["MiB"], row["CPU time"]
        right.annotate(
            row["retained"], place, textcoords="offset points", xytext=(0, -13), ha="center", fontsize="small"
        )
    right.set(title=f"and what it buys (graphs retained of {rows[0]['chunks']})", xlabel="budget (MiB)")
    right.set(ylabel="time of a step, ratio", xlim=(0, end))
    right.set_ylim(bottom=0)
    right.legend(fontsize="small", loc="lower left")
    figure.suptitle(f"A full chunk's graph takes {graph:.1f} MiB", fontsize="medium")
    with atomic_output(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def is_kept(row: dict[str, Any]) -> bool:
    """Whether a row keeps its budget; one below a chunk's graph can only retain nothing."""
    return row["MiB held"] <= row["MiB"] if row["MiB"] >= row["MiB of a full graph"] else row["retained"] == 0


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "budgets")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[16, 64, 256], help="batches whose memory is compared"
    )
    parser.add_argument("--batch", type=int, default=32, help="queries of the step whose budgets are tried")
    parser.add_argument("--rounds", type=int, default=6, help="alternating runs of each budget; the fastest counts")
    parser.add_argument("--plot", type=Path, help="PNG to draw; needs matplotlib")
    args = parser.parse_args(argv)
    if not args.json:
        print(f"{describe_machine()}\n")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", seed=1, hidden=96, layers=3, vision_hidden=64, vision_layers=3)
        encoder = load_encoder(model, vision_adapter=True, max_num_visual_tokens=VISUAL_TOKENS)
    batches = measure_batches(encoder, args.batches)
    show("budgets: by batch, nothing retained", batches, args.json)
    budgets = measure_budgets(encoder, args.batch, args.rounds)
    show("budgets: --retain-graphs auto", budgets, args.json)
    if args.plot:
        draw(budgets, args.plot)
    held = [row["MiB held"] for row in batches]
    is_exact = all(row["relative L2 to no retaining"] == 0 for row in budgets)
    return 0 if max(held) <= 1.05 * min(held) and all(map(is_kept, budgets)) and is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
