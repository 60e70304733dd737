"""Ranks and their few collectives. Everything here works in one process too, where it does nothing.

All ranks must call a collective in the same order and with equal shapes.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

# A first evaluation or validation on slow storage may let ranks wait for one another for long.
_TIMEOUT = timedelta(minutes=60)

# torch 2.14 renamed the tensor form of all_gather and reduce_scatter and deprecates the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class LostRank(ConnectionError):
    """A collective failed, since another rank has ended."""


@dataclass(frozen=True, slots=True)
class World:
    """The place of this process among the ranks.

    Attributes:
        rank: 0 to size - 1; rank 0 is the main rank.
        size: Number of ranks (world size).
        device: Where this rank computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0


def pick_device(name: str) -> torch.device:
    """Returns the device of a `--device` flag: `auto` takes cuda, then mps, then cpu.

    Raises:
        ValueError: The device is not there.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in found.items() if there)
    if not found[name]:
        raise ValueError(f"--device {name}: torch finds no such device here; use --device auto or cpu")
    if name != "cuda":
        return torch.device(name)
    place, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if place >= count:
        raise ValueError(f"this machine has {count} cuda devices for more ranks than that; lower --nproc_per_node")
    return torch.device("cuda", place)


def start(device_name: str) -> World:
    """Joins the ranks that torchrun started (nccl on cuda, gloo elsewhere); alone it just picks the device."""
    device = pick_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return World(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=_TIMEOUT))
    fresh = dist.PrefixStore(f"attempt-{_agree_on_attempt(store, rank, size)}", store)
    _check_devices(fresh, rank, size, device.type)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=_TIMEOUT)
    return World(rank, size, device)


def _agree_on_attempt(store: dist.Store, rank: int, size: int) -> int:
    """Returns a number that all ranks of this start share and no earlier start used.

    torchrun --max-restarts keeps one store over all attempts. Under the same keys a rank finds the addresses of an
    attempt that is dead and waits for them (seen with torch 2.14). TORCHELASTIC_RESTART_COUNT does not tell attempts
    apart: each agent counts its own. So rank 0 counts attempts in the store, and names in each the processes it saw.
    """
    name = uuid.uuid4().hex
    if rank == 0:
        attempt = store.add("attempt", 1)
        store.set(f"{attempt}/all", json.dumps([store.get(f"{attempt}/{r}").decode() for r in range(1, size)]))
        return attempt
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        attempt = store.add("attempt", 0)
        store.set(f"{attempt}/{rank}", name)
        if store.check([f"{attempt}/all"]) and name in json.loads(store.get(f"{attempt}/all")):
            return attempt
        time.sleep(0.05)  # rank 0 of this attempt is still to come
    raise LostRank(f"rank {rank} waited {_TIMEOUT} for rank 0 to start")


def _check_devices(store: dist.Store, rank: int, size: int, kind: str) -> None:
    """Raises ValueError where ranks compute on devices of several kinds: their backends would wait for one another."""
    store.set(f"device/{rank}", kind)
    kinds = [store.get(f"device/{r}").decode() for r in range(size)]
    if len({*kinds}) > 1:
        odd = next(r for r in range(size) if kinds[r] != kinds[0])
        raise ValueError(
            f"rank 0 computes on {kinds[0]} and rank {odd} on {kinds[odd]}; all must compute on one kind (is a "
            "driver broken? --device cuda says so there, --device cpu needs none)"
        )


def stop() -> None:
    """Leaves the ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Returns W, 1 where no process group is there."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Returns the rank of this process, 0 where no process group is there."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise LostRank(
            f"rank {rank()} lost the others in {what}: look for the first failing rank ({reason})"
        ) from error


class _GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: torch.Tensor) -> torch.Tensor:
        ctx.num_rows = len(tensor)
        gathered = tensor.new_empty(world_size() * len(tensor), *tensor.shape[1:])
        with _named("gather"):
            _all_gather(gathered, tensor.contiguous())
        return gathered

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        own = gradient.new_empty(ctx.num_rows, *gradient.shape[1:])
        with _named("backward of gather"):
            _reduce_scatter(own, gradient.contiguous(), op=dist.ReduceOp.SUM)
        return own


def gather_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks in rank order; gradients flow back to the rank that made a row.

    Collective: every rank must call it, with equal shapes; its backward is one too. That is reduce_scatter(SUM):
    a rank's rows receive the sum of what the losses of all ranks want of them.

    Args:
        tensor: (N, ...) of this rank.

    Returns:
        (W N, ...), or the tensor itself in one process.

    Source: OpenCLIP's gather_with_grad is the idea; torch.distributed.nn, which once had it, is deprecated.
    """
    return _GatherWithGrad.apply(tensor) if world_size() > 1 else tensor


def gather_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns rows that were dealt out as `i % W == rank`, put together in order of i. No gradient.

    Collective: every rank must call it, also one that has no row.

    Args:
        tensor: (ceil or floor of num_rows / W, D) of this rank.
        num_rows: Rows of all ranks together.
    """
    size = world_size()
    if size == 1:
        return tensor
    share = -(-num_rows // size)
    padded = tensor.new_zeros(share, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    gathered = tensor.new_empty(size * share, *tensor.shape[1:])
    with _named("gather of rows"):
        _all_gather(gathered, padded)
    return gathered.view(size, share, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)[:num_rows]


def gather_objects(value: Any) -> list[Any]:
    """Returns the values of all ranks in rank order. Collective; for start-up, not for every step."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with _named("gather of objects"):
        dist.all_gather_object(values, value)
    return values


def from_main(value: Any) -> Any:
    """Returns the main rank's value on every rank. Collective; for start-up, not for every step."""
    if world_size() == 1:
        return value
    values = [value]
    with _named("broadcast from the main rank"):
        dist.broadcast_object_list(values, src=0)
    return values[0]


def require_agreement(found: dict[str, Any]) -> None:
    """Raises ValueError on every rank where they differ in what must be the same. Collective.

    Args:
        found: Name -> value on this rank; long ones as a hash.
    """
    everyone = gather_objects(found)
    for number, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise ValueError(
                    f"ranks must do the same, but {name} is {other[name]} on rank {number} and {value} on rank 0; "
                    "start all with the same flags, on the same files"
                )


def barrier() -> None:
    """Waits for all ranks. Collective."""
    from_main(None)


class GradientBucket:
    """All trainable gradients in one flat tensor, with room at the end for a few numbers of the step.

    `parameter.grad` of every parameter is a view of the bucket: backward adds into it, parameters that a rank's chunks
    never touched stay zero, and one all-reduce carries gradients, loss and stop signals of a step.

    Args:
        parameters: Trainable parameters, of one dtype, in the same order on every rank.
        num_extras: Numbers that ride along.

    Raises:
        ValueError: There is nothing to train, or the dtypes differ.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], num_extras: int = 0):
        self.parameters = list(parameters)
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) != 1:
            raise ValueError(
                f"trainable parameters must exist and share dtype and device, found {sorted(map(str, kinds))}"
            )
        self.num_gradients = sum(p.numel() for p in self.parameters)
        dtype, device = kinds.pop()
        self.flat = torch.zeros(self.num_gradients + num_extras, dtype=dtype, device=device)
        start = 0
        for parameter in self.parameters:
            parameter.grad = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    @property
    def gradients(self) -> torch.Tensor:
        """(P,) view of all gradients."""
        return self.flat[: self.num_gradients]

    @property
    def extras(self) -> torch.Tensor:
        """(num_extras,) view of the numbers that ride along."""
        return self.flat[self.num_gradients :]

    def zero_(self) -> None:
        """Sets gradients and extras to zero; use it in place of optimizer.zero_grad, which would drop the views."""
        self.flat.zero_()

    def reduce(self) -> None:
        """Averages gradients and extras over ranks: SUM, then divide by W. Collective."""
        if world_size() > 1:
            with _named("reduction of gradients"):
                dist.all_reduce(self.flat)
            self.flat /= world_size()

    def share_parameters(self) -> None:
        """Gives every rank the main rank's parameters, in one broadcast. Collective."""
        if world_size() > 1:
            flat = torch.cat([p.detach().flatten() for p in self.parameters])
            with _named("broadcast of parameters"):
                dist.broadcast(flat, src=0)
            start = 0
            for parameter in self.parameters:
                parameter.data.copy_(flat[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
