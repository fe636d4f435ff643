"""A batch of rows of different lengths while it is being computed on: lengths on the host, zeros after each row's end.

Lengths stay on the host so that no step has to wait for the device. Runs in the rank, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dali.padded import Padded


@dataclass(frozen=True)
class Rows:
    """A padded batch with lengths on the host."""

    data: Tensor
    """`(B, ..., T)`; zero at and beyond a row's length."""
    lengths: tuple[int, ...]
    """How much of the last dimension is the row's own."""

    @classmethod
    def of(cls, batch: Padded) -> Rows:
        """Reads the lengths (waiting for a device that holds them) and drops what no row needs."""
        lengths = tuple(batch.lengths.tolist())
        return cls(batch.data[..., : max(lengths, default=0)], lengths)

    def padded(self, device: torch.device) -> Padded:
        """The same with the lengths as a tensor on `device`."""
        return Padded(self.data, torch.tensor(self.lengths).to(device, non_blocking=True))

    @property
    def device(self) -> torch.device:
        """Where the data are."""
        return self.data.device

    def host(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers, one a row, on the data's device and shaped to broadcast over the data, `(B, 1, ..., 1)`."""
        return self.put(torch.tensor(values, dtype=dtype)).view(-1, *(1,) * (self.data.dim() - 1))

    def put(self, tensor: Tensor) -> Tensor:
        """Copies a small host tensor to the data's device, without waiting for what is queued there.

        From ordinary memory that is safe: the driver has its own copy by the time the call returns.
        """
        return tensor.to(self.device, non_blocking=True)

    def ends(self) -> Tensor:
        """Lengths, shaped to broadcast over the data."""
        return self.host(self.lengths, torch.int64)

    def valid(self) -> Tensor:
        """Which positions are the rows' own, `(B, 1, ..., T)`, bool."""
        return torch.arange(self.data.shape[-1], device=self.device) < self.ends()

    def cleaned(self) -> Rows:
        """Writes zeros after each row's end, in place; for data that a step has just made."""
        if any(length != self.data.shape[-1] for length in self.lengths):
            self.data.masked_fill_(~self.valid(), 0)
        return self

    def select(self, indices: Sequence[int]) -> Rows:
        """The rows with those numbers."""
        lengths = tuple(self.lengths[i] for i in indices)
        data = self.data.index_select(0, self.put(torch.tensor(indices)))
        return Rows(data[..., : max(lengths)], lengths)


def merge(parts: Sequence[tuple[Sequence[int], Rows]]) -> Rows:
    """Puts groups of rows back into one batch.

    Args:
        parts: For each group the rows' numbers and their data; together they are all rows.

    Raises:
        ValueError: When groups differ in more than their lengths.
    """
    shapes = {tuple(rows.data.shape[1:-1]) for _, rows in parts}
    if len(shapes) > 1:
        raise ValueError(f"rows of one batch must agree in channels and features, got {sorted(shapes)}")
    first = parts[0][1].data
    size = sum(len(indices) for indices, _ in parts)
    longest = max(rows.data.shape[-1] for _, rows in parts)
    data = first.new_zeros((size, *first.shape[1:-1], longest))
    lengths = [0] * size
    for indices, rows in parts:
        data[rows.put(torch.tensor(indices)), ..., : rows.data.shape[-1]] = rows.data
        for index, length in zip(indices, rows.lengths, strict=True):
            lengths[index] = length
    return Rows(data, tuple(lengths))


def exact_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product in full float32 precision.

    On CUDA a training script may have allowed TF32 (`torch.set_float32_matmul_precision("high")`, which Lightning
    advises); that rounds to 10 bits, 1e-3 in a log-mel. The switch is the process's, so it is not touched: float64 is
    used instead.
    """
    if left.is_cuda and _tf32_allowed():
        return (left.double() @ right.double()).float()
    return left @ right


def _tf32_allowed() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through `torch.backends.fp32_precision`: there is no one answer
        return True
