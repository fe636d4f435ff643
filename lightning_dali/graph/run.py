"""Runs a lane's tail on what its graph gave: one tensor as long as sizes and dtypes agree, else item by item.

Runs in the rank's server thread, on the device. On a GPU the steps that `graph.tail_kernels` takes are its, the rest is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_dali.graph.color import normalize_
from lightning_dali.graph.pillow_itself import pays_with_pillow, run_pillow
from lightning_dali.graph.plan import TailStep
from lightning_dali.graph.tail import apply_alike
from lightning_dali.graph.tail_kernels import is_dense, load_kernels

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
    given = rows
    if pays_with_pillow(rows):
        rows, steps = run_pillow(rows, steps, channels_last=channels_last)
    kernels = load_kernels(rows[0].device) if steps else None
    while steps:
        own = not _shares_memory(rows, given)
        if kernels is not None and isinstance(rows, torch.Tensor) and (done := kernels.num_leading(rows, steps)):
            if not own or not is_dense(rows):
                rows = rows.clone(memory_format=_memory_format(rows, channels_last=channels_last))
            kernels.run(rows, steps[:done])
        else:
            rows, done = _step(rows, steps[0], own=own), 1
        steps = steps[done:]
    if isinstance(rows, list):
        rows = _joined(rows)
    return in_format(rows, channels_last=channels_last)


def _shares_memory(rows: Rows, given: Rows) -> bool:
    """Whether writing into `rows` could change what was given: some functionals (crop) answer with a view."""
    if isinstance(rows, list) or isinstance(given, list):
        return isinstance(rows, list)  # a tensor made of a list is a stack of copies
    return rows.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def in_format(rows: Rows, *, channels_last: bool) -> Rows:
    """Lays images out in memory: `(n, C, H, W)` or a list of `(C, H, W)`."""
    if isinstance(rows, list):
        if not channels_last:
            return [item.contiguous() for item in rows]
        return [item.movedim(-3, -1).contiguous().movedim(-1, -3) for item in rows]
    return rows.contiguous(memory_format=_memory_format(rows, channels_last=channels_last))


def _memory_format(images: torch.Tensor, *, channels_last: bool) -> torch.memory_format:
    """Of a batch: clips (B, T, C, H, W) lie in their order in any case."""
    return torch.channels_last if channels_last and images.ndim == 4 else torch.contiguous_format


def _step(rows: Rows, step: TailStep, *, own: bool) -> Rows:
    """One step in torch; `own`: whether `rows` may be written into."""
    if isinstance(rows, torch.Tensor):
        if step.rows is None:
            if own and step.name == "normalize" and rows.is_floating_point():
                return normalize_(rows, step.arguments)
            return apply_alike(step.name, rows, step.arguments)
        picked = torch.tensor(step.rows)
        if rows.device.type == "cuda":
            picked = picked.pin_memory()
        picked = picked.to(rows.device, non_blocking=True)
        changed = apply_alike(step.name, rows.index_select(0, picked), step.arguments)
        if changed.shape[1:] == rows.shape[1:] and changed.dtype == rows.dtype:
            return rows.index_copy_(0, picked, changed) if own else rows.index_copy(0, picked, changed)
        rows = list(rows)
        for row, item in zip(step.rows, changed, strict=True):
            rows[row] = item
        return rows
    chosen = range(len(rows)) if step.rows is None else step.rows
    joined = _joined([rows[row] for row in chosen])
    if isinstance(joined, torch.Tensor):
        changed_rows: Rows = apply_alike(step.name, joined, step.arguments)
    else:
        changed_rows = [
            apply_alike(step.name, item.unsqueeze(0), step.arguments[i : i + 1]).squeeze(0)
            for i, item in enumerate(joined)
        ]
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
