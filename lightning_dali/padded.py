"""Rows of different lengths in one tensor, with their lengths. Runs in the rank, and wherever a batch goes.

A named tuple, because that is what every consumer of a batch already walks: `default_collate`, `pin_memory` and pytrees
of PyTorch, `apply_to_collection` of Lightning (which refuses frozen dataclasses), and `data, lengths = batch` in a
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Fields(NamedTuple):
    data: Tensor
    """`(B, ..., T)`; what lies at or beyond a row's length is the pad value."""
    lengths: Tensor
    """`(B,)`, int64: how much of the last dimension is the row's own."""


class Padded(_Fields):
    """Rows that differ in length along their last dimension, `(B, S)`, `(B, C, S)`, `(B, F, T)`, ..., and the lengths.

    Raises:
        ValueError: When the shapes do not fit each other. Values are not looked at: they may be on a device, and
            walkers rebuild the tuple around whatever they made of its tensors.
    """

    __slots__ = ()

    def __new__(cls, data: Tensor, lengths: Tensor) -> Padded:
        """Checks the shapes; leaves that are no tensors pass, so that containers can be mapped over."""
        if isinstance(data, Tensor) and isinstance(lengths, Tensor):
            _check(data, lengths)
        return super().__new__(cls, data, lengths)

    @classmethod
    def stack(cls, rows: Sequence[Tensor], *, pad_value: float = 0.0) -> Padded:
        """Pads rows `(..., T_i)` at their ends to the longest and stacks them.

        Args:
            rows: Tensors that agree in all but their last dimension.
            pad_value: What to pad with.
        """
        if not rows:
            raise ValueError("Padded.stack needs at least one row")
        if any(row.dim() == 0 or row.shape[:-1] != rows[0].shape[:-1] for row in rows):
            shapes = ", ".join(str(tuple(row.shape)) for row in rows[:8])
            raise ValueError(f"rows may differ in their last dimension only, got {shapes}")
        lengths = [row.shape[-1] for row in rows]
        data = rows[0].new_full((len(rows), *rows[0].shape[:-1], max(lengths)), pad_value)
        for target, row in zip(data, rows, strict=True):
            target[..., : row.shape[-1]] = row
        return cls(data, torch.tensor(lengths, device=data.device))

    @property
    def shape(self) -> torch.Size:
        """Shape of `data`."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Device of `data`."""
        return self.data.device

    def mask(self) -> Tensor:
        """`(B, T)`, bool: which positions are the rows' own."""
        positions = torch.arange(self.data.shape[-1], device=self.data.device)
        return positions < self.lengths.to(self.data.device).unsqueeze(1)

    def unpad(self) -> list[Tensor]:
        """The rows as views `(..., T_i)`; waits for the device that holds the lengths."""
        return [row[..., :length] for row, length in zip(self.data, self.lengths.tolist(), strict=True)]

    def fill(self, pad_value: float) -> Padded:
        """The same rows with another value after their ends."""
        mask = self.mask().view(len(self.lengths), *(1,) * (self.data.dim() - 2), -1)
        return Padded(self.data.masked_fill(~mask, pad_value), self.lengths)

    def to(self, *args: Any, **kwargs: Any) -> Padded:
        """Moves both as `Tensor.to` does; a dtype changes the data only."""
        data = self.data.to(*args, **kwargs)
        return Padded(data, self.lengths.to(data.device, non_blocking=bool(kwargs.get("non_blocking", False))))

    def pin_memory(self) -> Padded:
        """Both in page-locked memory."""
        return Padded(self.data.pin_memory(), self.lengths.pin_memory())


def _check(data: Tensor, lengths: Tensor) -> None:
    if data.dim() < 2 or lengths.dim() != 1 or data.shape[0] != lengths.shape[0]:
        raise ValueError(
            f"Padded takes data (B, ..., T) and lengths (B,), got {tuple(data.shape)} and {tuple(lengths.shape)}"
        )
