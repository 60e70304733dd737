"""The learned temperature: similarities are multiplied by exp(log_scale) = 1 / temperature."""

from __future__ import annotations

import math

import torch
from torch import nn

MAX_SCALE = 100.0


class LogitScale(nn.Module):
    """Learned multiplier of similarities.

    Args:
        temperature: Initial temperature, 0.01 to 1; 0.07 gives log_scale = 2.6593.

    Raises:
        ValueError: The temperature lies outside [0.01, 1], the range that `clamp_` keeps.

    Source: CLIP (arXiv 2103.00020): the parameter is the logarithm of the scale, and the scale never exceeds 100.
    """

    def __init__(self, temperature: float = 0.07):
        super().__init__()
        if not 1 / MAX_SCALE <= temperature <= 1:
            raise ValueError(f"temperature {temperature} lies outside [{1 / MAX_SCALE}, 1] (--temperature)")
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / temperature), dtype=torch.float32))

    def forward(self, similarity: torch.Tensor) -> torch.Tensor:
        """Returns the logits. No clamp here: a clamp would zero the gradient at the bound and stay there."""
        return similarity * self.log_scale.exp().to(similarity.dtype)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Keeps the scale in [1, 100]; call it after the optimizer's step."""
        self.log_scale.clamp_(0.0, math.log(MAX_SCALE))

    @property
    def temperature(self) -> float:
        """The temperature now."""
        return math.exp(-self.log_scale.item())
