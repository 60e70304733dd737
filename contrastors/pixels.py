"""Pixels between the image processor and the model: uint8 patches without the doubled temporal axis.

A still picture fills both frames of a temporal patch with the same pixels, and fp32 says nothing that uint8 does not: a
packed patch has an eighth of the bytes. It is doubled, rescaled and normalised on the device, just before the forward.
"""

from __future__ import annotations

import torch


def pack_patches(patches: torch.Tensor, temporal_patch_size: int) -> torch.Tensor:
    """Returns the patches with one of their equal frames.

    Args:
        patches: (P, 3 * T * p * p) as the image processor lays them out: channel, frame, row, column.
        temporal_patch_size: T, frames in a patch.

    Returns:
        (P, 3 * p * p), same dtype.
    """
    num_patches = len(patches)
    return patches.view(num_patches, 3, temporal_patch_size, -1)[:, :, 0].reshape(num_patches, -1)


def unpack_patches(
    packed: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, temporal_patch_size: int
) -> torch.Tensor:
    """Returns the normalised patches that the vision tower takes; bit-equal to the torchvision image processor.

    Args:
        packed: (P, 3 * p * p) uint8.
        mean: (3,) fp32 mean of each channel, times 255.
        std: (3,) fp32 standard deviation of each channel, times 255.
        temporal_patch_size: T, frames in a patch.

    Returns:
        (P, 3 * T * p * p) fp32.
    """
    num_patches = len(packed)
    pixels = packed.view(num_patches, 3, 1, -1).to(torch.float32)
    pixels = (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    return pixels.expand(-1, -1, temporal_patch_size, -1).reshape(num_patches, -1)
