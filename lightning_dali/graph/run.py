"""Runs a lane's tail on what its graph gave: one tensor as long as sizes and dtypes agree, else item by item.

Runs in the rank's server thread, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dali.graph.plan import TailStep
from lightning_dali.graph.tail import apply_alike, apply_ragged

Rows = torch.Tensor | list[torch.Tensor]


def run_tail(rows: Rows, steps: Sequence[TailStep], *, channels_last: bool = False) -> Rows:
    """Runs `steps` in order.

    Args:
        rows: `(n, C, H, W)`, or n tensors `(C, H, W)` of different sizes. It is not changed.
        steps: Each names its rows and their arguments.
        channels_last: Whether the result lies in memory as (n, H, W, C).

    Returns:
        A tensor when the results have one size and dtype, else a list.
    """
    picked = _upload_rows(steps, rows[0].device) if steps else []
    for step, indices in zip(steps, picked, strict=True):
        rows = _step(rows, step, indices)
    if isinstance(rows, list):
        rows = _joined(rows)
    return in_format(rows, channels_last=channels_last)


def in_format(rows: Rows, *, channels_last: bool) -> Rows:
    """Lays images out in memory: `(n, C, H, W)` or a list of `(C, H, W)`."""
    if isinstance(rows, list):
        if not channels_last:
            return [item.contiguous() for item in rows]
        return [item.movedim(-3, -1).contiguous().movedim(-1, -3) for item in rows]
    channels_last = channels_last and rows.ndim == 4
    return rows.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _upload_rows(steps: Sequence[TailStep], device: torch.device) -> list[torch.Tensor]:
    """Every step's row numbers on the device, in one copy."""
    counts = [len(step.rows or ()) for step in steps]
    together = torch.tensor([row for step in steps for row in step.rows or ()], dtype=torch.int64)
    if device.type == "cuda":
        together = together.pin_memory()
    return list(together.to(device, non_blocking=True).split(counts))


def _step(rows: Rows, step: TailStep, picked: torch.Tensor) -> Rows:
    if isinstance(rows, torch.Tensor):
        if step.rows is None:
            return apply_alike(step.name, rows, step.kwargs)
        changed = apply_alike(step.name, rows.index_select(0, picked), step.kwargs)
        if changed.shape[1:] == rows.shape[1:] and changed.dtype == rows.dtype:
            return rows.index_copy(0, picked, changed)
        rows = list(rows)
        for row, item in zip(step.rows, changed, strict=True):
            rows[row] = item
        return rows
    chosen = range(len(rows)) if step.rows is None else step.rows
    kwargs = step.kwargs if len(step.kwargs) == len(chosen) else step.kwargs * len(chosen)
    joined = _joined([rows[row] for row in chosen])
    if isinstance(joined, torch.Tensor):
        changed_rows: Rows = apply_alike(step.name, joined, kwargs)
    else:
        changed_rows = apply_ragged(step.name, joined, kwargs)
    out = list(rows)
    for row, item in zip(chosen, changed_rows, strict=True):
        out[row] = item
    return _joined(out) if step.rows is None else out


def _joined(items: list[torch.Tensor]) -> Rows:
    """One tensor if the items agree in size and dtype."""
    first = items[0]
    if all(item.shape == first.shape and item.dtype == first.dtype for item in items):
        return torch.stack(items)
    return items
