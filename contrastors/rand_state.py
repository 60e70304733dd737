"""Random states, saved before the first forward of a chunk and replayed in the second."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch (all devices) for one step: a function of (seed, step, rank), so that resuming needs no state."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


class RandContext:
    """The random states of the CPU and of the model's device at the moment of creation.

    Dropout draws on the device where the model lives, whatever device the chunk's tensors came from, so that device's
    state is saved (`torch.utils.checkpoint.get_device_states` gives nothing for tensors on the CPU and breaks on mps).

    Args:
        device: Device of the model's parameters.
    """

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.states = self._save()

    def _save(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.device.type == "cuda":
            return torch.get_rng_state(), torch.cuda.get_rng_state(self.device)
        if self.device.type == "mps":
            return torch.get_rng_state(), torch.mps.get_rng_state()
        return torch.get_rng_state(), None

    def _restore(self, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)
        elif self.device.type == "mps":
            torch.mps.set_rng_state(states[1])

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Runs the block from the saved states, then puts back the states found before it."""
        found = self._save()
        self._restore(self.states)
        try:
            yield
        finally:
            self._restore(found)
