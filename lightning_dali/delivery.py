"""A batch that is ready: results put in the places of their slots, on the device, behind an event.

Runs in the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dali.graph.spec import Device
from lightning_dali.sampling import BatchTask
from lightning_dali.structure import map_leaves
from lightning_dali.wire import Slot, SlotStack


@dataclass
class Delivered:
    """A batch that is on the device, or will be when `event` has happened."""

    batch: Any
    task: BatchTask
    indices: tuple[int, ...]
    event: Any = None
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0


def assemble(batch: Any, results: list[Any]) -> Any:
    """Puts results in the places of their slots."""

    def place(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return results[leaf.lane][leaf.row]
        if not isinstance(leaf, SlotStack):
            return leaf
        stacked = _stacked(leaf, results)
        return stacked if leaf.lead is None or leaf.ragged else stacked.unflatten(0, leaf.lead)

    return map_leaves(place, batch, leaf=lambda value: isinstance(value, (Slot, SlotStack)))


def _stacked(stack: SlotStack, results: list[Any]) -> Any:
    whole = results[stack.lanes[0]]
    one_lane = stack.lanes.count(stack.lanes[0]) == len(stack.lanes)
    if one_lane and hasattr(whole, "stack_rows"):
        return whole.stack_rows(list(stack.rows))
    in_order = one_lane and stack.rows == tuple(range(len(whole)))
    if in_order and (stack.ragged or not isinstance(whole, list)):
        return whole if isinstance(whole, list) or not stack.ragged else list(whole)
    items = [results[lane][row] for lane, row in zip(stack.lanes, stack.rows, strict=True)]
    return items if stack.ragged else _join(items)


def _join(items: list[Any]) -> Any:
    first = items[0]
    joined = getattr(type(first), "join", None)
    if joined is not None:
        return joined(items)
    if first.ndim == 3 and first.stride(0) == 1 and first.shape[0] > 1:  # an image whose channels lie last
        return torch.stack([item.movedim(0, -1) for item in items]).movedim(-1, 1)
    return torch.stack(items)


def to_device(batch: Any, device: Device) -> Any:
    """Moves what is still on the CPU, through pinned memory so that nothing waits."""
    if device.index is None or device.outputs_on_cpu:
        return batch
    target = device.torch_device

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == target:
            return leaf
        return leaf.pin_memory().to(target, non_blocking=True) if leaf.device.type == "cpu" else leaf

    return map_leaves(move, batch)


def wait_for(delivered: Delivered) -> None:
    """Lets the consumer's stream wait for the batch, and tells torch's allocator that it reads it."""
    if delivered.event is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(delivered.event)

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)
        return leaf

    map_leaves(mark, delivered.batch)
