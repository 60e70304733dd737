"""Collectives of a step: one flat bucket of gradients against one call a tensor, and how many a step makes.

Ranks are gloo processes on this machine. Tensors are those of an adapter on both parts of the 2B model (416 of them);
--lora-r 32 makes 25 M parameters of them.

  python -m benchmarks.collectives --ranks 2 4
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import alternate, describe_machine, make_parser, show
from benchmarks.models import MERGE, REAL_2B, TINY, build_model, make_inputs
from contrastors import distributed
from contrastors.batches import Batch
from contrastors.chunking import Chunking
from contrastors.distributed import GradientBucket
from contrastors.logit_scale import LogitScale
from contrastors.loss import ColumnMask


class CountCollectives(TorchDispatchMode):
    """Counts the collectives inside the block by name."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.found[function.name().removeprefix("c10d::").strip("_")] += 1
        return function(*args, **(kwargs or {}))


def adapter_shapes(lora_r: int) -> list[tuple[int, int]]:
    """A and B of every adapted layer of the 2B model: 28 x 4 in the language part, 24 x 4 in the vision part."""
    shape = REAL_2B
    heads, pairs, vision = shape.heads * shape.head_size, shape.pairs * shape.head_size, shape.vision_hidden
    layer = [(shape.hidden, heads), (shape.hidden, pairs), (shape.hidden, pairs), (heads, shape.hidden)]
    block = [(vision, 3 * vision), (vision, vision), (vision, shape.vision_inner), (shape.vision_inner, vision)]
    linears = layer * shape.layers + block * shape.vision_layers
    return [size for inputs, outputs in linears for size in ((lora_r, inputs), (outputs, lora_r))]


def count_step(rank: int, world: distributed.World) -> dict[str, int]:
    """Collectives of the training script's own step, with hard negatives and masks."""
    from train_contrastors import compute_gradients

    model, scale, num_queries, group = build_model(TINY), LogitScale(0.07), 2, 3
    queries, documents = make_inputs(num_queries, side=64, group=group)
    mask = ColumnMask(torch.zeros(num_queries * group * world.size, dtype=torch.bool), torch.zeros(0, 2).long())
    batch = Batch(queries, documents, torch.arange(num_queries * group), mask, [1, 2])
    run = SimpleNamespace(
        args=Namespace(seed=0, grad_reduction="sum", num_hard_negatives=group - 1, loss_tile=0),
        world=world, state=SimpleNamespace(step=0), stop=SimpleNamespace(received=0), model=model, logit_scale=scale,
        bucket=GradientBucket([*model.trainable_parameters().values(), *scale.parameters()], num_extras=8),
        chunking=Chunking(documents=2, reuse_features=True), processor=SimpleNamespace(merge_size=MERGE),
    )  # fmt: skip
    with CountCollectives() as counter:
        compute_gradients(run, batch)
    return dict(counter.found)


def run_rank(rank: int, size: int, port: int, lora_r: int, rounds: int, output: str) -> None:
    """One rank; the first writes what it found."""
    torch.set_num_threads(1)
    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    world = distributed.start("cpu")
    source = torch.Generator().manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in adapter_shapes(lora_r)]
    bucket = GradientBucket(parameters)
    bucket.flat.copy_(torch.randn(len(bucket.flat), generator=source))
    tensors = [p.grad.clone() for p in parameters]

    def one_a_tensor() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= size

    ways = {"one flat bucket": bucket.reduce, "one call a tensor": one_a_tensor}
    calls = {}
    for name, way in ways.items():
        with CountCollectives() as counter:
            way()
        calls[name] = sum(counter.found.values())
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    difference = float((bucket.gradients - flat).norm() / flat.norm())
    dist.barrier()
    times, step = alternate(ways, rounds), count_step(rank, world)
    distributed.stop()
    if rank == 0:
        rows = [
            {
                "ranks": size, "way": name, "tensors": len(tensors), "M parameters": len(flat) / 1e6,
                "calls": calls[name], "ms": 1000 * times[name].seconds, "relative L2": difference,
            }
            for name in ways
        ]  # fmt: skip
        torch.save({"rows": rows, "step": step}, output)


def measure(size: int, lora_r: int, rounds: int) -> dict:
    """What rank 0 of `size` ranks found."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, output = free.getsockname()[1], str(Path(folder) / "found.pt")
        free.close()
        torch.multiprocessing.spawn(run_rank, (size, port, lora_r, rounds, output), nprocs=size)
        return torch.load(output, weights_only=True)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "collectives")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="gloo processes")
    parser.add_argument("--lora-r", type=int, default=32, help="rank of the matrices: 0.8 M parameters each")
    parser.add_argument("--rounds", type=int, default=6, help="alternating runs of each; the fastest counts")
    args = parser.parse_args(argv)
    if not args.json:
        print(f"{describe_machine()}\n")
    found = {size: measure(size, args.lora_r, args.rounds) for size in args.ranks}
    show("collectives: gradients", [row for one in found.values() for row in one["rows"]], args.json)
    steps = [{"ranks": size, "of a step": sum(one["step"].values()), **one["step"]} for size, one in found.items()]
    show("collectives: a training step", steps, args.json)
    return 0 if all(row["of a step"] <= 4 for row in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
