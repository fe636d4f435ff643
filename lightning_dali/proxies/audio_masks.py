"""Masks of SpecAugment as torchaudio draws them: two uniform numbers in the worker, a range in the rank.

The numbers rather than the range travel, because they mean the same whatever the length turns out to be. Draws and
arithmetic are those of `torchaudio.functional.mask_along_axis` and `mask_along_axis_iid`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_dali.proxies.audio_shapes import Length


class MaskDraw(NamedTuple):
    """One mask's random numbers."""

    axis: str
    """"time" or "frequency"."""
    mask_param: int
    """One more than the widest mask, before `p` limits it."""
    p: float
    """Limits a mask to this share of the axis."""
    width: tuple[float, ...]
    """In [0, 1), float32: one for each channel, or one for all; empty where nothing is masked."""
    start: tuple[float, ...]
    """Likewise."""


def mask_limit(mask_param: int, p: float, size: int) -> int:
    """One more than the widest mask on an axis of that size."""
    return mask_param if p == 1.0 else min(mask_param, int(size * p))


def draw_mask(axis: str, mask_param: int, p: float, *, size: Length, count: int) -> MaskDraw:
    """Draws a mask from torch's default generator.

    Args:
        axis: "time" or "frequency".
        mask_param: As torchaudio's.
        p: As torchaudio's.
        size: F or T; None when not known yet, then numbers are drawn in any case.
        count: 1, or C for masks that differ between channels.
    """
    if size is not None and mask_limit(mask_param, p, size) < 1:
        return MaskDraw(axis, mask_param, p, (), ())
    width, start = torch.rand(count).tolist(), torch.rand(count).tolist()
    return MaskDraw(axis, mask_param, p, tuple(width), tuple(start))


def mask_bounds(width: Tensor, start: Tensor, limit: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The half-open range that a draw masks.

    Args:
        width: Uniform numbers, float32, any shape.
        start: Likewise.
        limit: What `mask_limit` says, broadcastable; below 1 masks nothing.
        size: F or T, broadcastable.

    Returns:
        First masked position and the one after the last, int64.
    """
    value = width * limit.clamp(min=0)
    first = (start * (size - value)).long()
    return first, first + value.long()
