"""A lane whose items are finished: they only need to reach the device.

`PixelSpec` is written in the worker; the executor runs in the rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_dali.graph.run import in_format
from lightning_dali.graph.spec import Device, Executor, LaneSpec

if TYPE_CHECKING:
    from lightning_dali.wire import Lane


@dataclass(frozen=True)
class PixelSpec(LaneSpec):
    """No graph: tensors that were made in the worker."""

    def merge(self, other: LaneSpec) -> PixelSpec | None:
        """All such lanes are alike."""
        return self if isinstance(other, PixelSpec) else None

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Nothing to build."""
        return PixelExecutor(device)

    def describe(self) -> list[tuple[str, str]]:
        """One line for `explain`."""
        return [("everything", "worker")]


class PixelExecutor:
    """Copies tensors to the device."""

    def __init__(self, device: Device) -> None:
        self._device, self._channels_last = device.torch_device, device.channels_last
        self._waiting: deque[list[torch.Tensor]] = deque()

    def feed(self, lane: Lane) -> None:
        """Starts the copies."""
        self._waiting.append([item.to(self._device, non_blocking=True) for item in lane.heads])

    def collect(self, lane: Lane) -> Any:
        """The oldest batch: one tensor where shapes agree, else a list."""
        items = self._waiting.popleft()
        same = all(item.shape == items[0].shape and item.dtype == items[0].dtype for item in items)
        return in_format(torch.stack(items) if same else items, channels_last=self._channels_last)

    def close(self) -> None:
        """Drops what waits."""
        self._waiting.clear()
