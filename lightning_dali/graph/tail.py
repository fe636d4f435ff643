"""Recorded calls that DALI does not do, run by torchvision's arithmetic on the whole batch. Runs in the rank process.

`apply_call(name, x, kwargs)` equals ``torch.stack([F.<name>(x[i], **kwargs[i]) for i in range(len(x))])`` of
torchvision's tensor kernels, in a few kernel launches. Three ways, chosen by `functionals.BATCHED`:

- a functional listed there has a kernel of ours (`graph.color`, `graph.geometry`), which takes arguments that differ;
  a family, `warp` or `levels`, even takes several functionals at once, named by ``_call``;
- where torchvision's own kernel serves equal arguments as well (``equal=True``), it is called once for them;
- any other functional is called once for all samples with equal arguments (torchvision's kernels take a batch).

Samples that fit none together are run group by group. The keys of `functionals.bound_call`, which the
worker uses too, say what fits together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import color
from lightning_dali.graph.arguments import Arguments
from lightning_dali.graph.functionals import (
    BATCHED,
    LEVELS,
    Kernel,
    Kwargs,
    arguments,
    bound_call,
    defaults,
)

_CHUNK_VALUES = 2**19
"""Three images of 224 x 224: contrast then takes a third, hue two thirds of the CPU time that a batch of 32 takes."""


def _for_each(name: str, kwargs: Sequence[Kwargs], samples: int) -> Sequence[Kwargs]:
    if len(kwargs) not in (1, samples):
        raise ValueError(f"{name} needs arguments for each of {samples} samples or one for all, got {len(kwargs)}.")
    return list(kwargs) * samples if len(kwargs) == 1 else kwargs


def apply_call(name: str, x: Tensor, kwargs: Sequence[Kwargs]) -> Tensor:
    """Runs one functional on every sample of a batch, each with its own arguments.

    Args:
        name: A functional of `torchvision.transforms.v2.functional`, or ``"warp"`` (`merge_family`).
        x: (B, C, H, W) or (B, T, C, H, W), on any device. It is not changed; the result may share its memory.
        kwargs: For each sample the arguments after the image, as torchvision takes them; one mapping stands for all.
            `gaussian_noise` takes a `seed` besides.

    Raises:
        TypeError: If an argument is missing or unknown.
        ValueError: If the functional cannot run on images, an argument is out of range, or sizes would differ.
    """
    if len(x) == 0:
        return x
    bound = [bound_call(name, one) for one in kwargs]
    each = _for_each(name, [row for _, row in bound], len(x))
    groups: dict[Any, list[int]] = {}
    for i, (key, row) in enumerate(bound if len(bound) == len(x) else bound * len(x)):
        groups.setdefault((key, row.get("_call") if key[0] == LEVELS else None), []).append(i)
    parts = [(key[0], members, arguments(key[0], [each[i] for i in members])) for (key, _), members in groups.items()]
    if len(parts) == 1:
        return apply_alike(parts[0][0], x, parts[0][2])
    return _apply_parts(name, x, parts)


def apply_alike(name: str, x: Tensor, rows: Arguments) -> Tensor:
    """`apply_call` for samples of one key, as `plan.plan_tail` puts them together: nothing is bound or grouped again.

    Args:
        name: The key's first element.
        x: As `apply_call` takes it.
        rows: `arguments` of all samples.
    """
    if name == "uniform_temporal_subsample" and x.ndim != 5:
        raise ValueError(f"{name} takes clips (B, T, C, H, W), got {tuple(x.shape)}.")
    if name == LEVELS and x.dtype != torch.uint8:
        return _one_by_one(x, rows)
    batched = BATCHED.get(name)
    if batched is not None and not (batched.equal and not rows.columns):
        return _in_chunks(batched.kernel, x, rows)
    out: Tensor = x if name == "to_image" else getattr(F, name)(x, **rows.shared)
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True))
    return out.contiguous() if overlaps else out


def _one_by_one(x: Tensor, rows: Arguments) -> Tensor:
    """The functionals of a family, each for the samples that name it: there are no tables of floating-point levels."""
    parts: dict[str, list[int]] = {}
    for i, call in enumerate(rows.column("_call")):
        parts.setdefault(call, []).append(i)
    names = {call: defaults(call) for call in parts}
    return _apply_parts(
        LEVELS,
        x,
        [
            (call, members, arguments(call, [{key: rows[i][key] for key in names[call]} for i in members]))
            for call, members in parts.items()
        ],
    )


def _in_chunks(kernel: Kernel, x: Tensor, rows: Arguments) -> Tensor:
    """Runs a kernel; on the CPU on a few samples at a time, so that what it makes on the way stays in the cache."""
    each = max(1, _CHUNK_VALUES // max(1, x[0].numel()))
    if x.device.type != "cpu" or each >= len(x):
        return kernel(x, rows)
    return torch.cat([kernel(x[i : i + each], rows[i : i + each]) for i in range(0, len(x), each)])


def _apply_parts(name: str, x: Tensor, parts: Sequence[tuple[str, list[int], Arguments]]) -> Tensor:
    """Runs functionals on the samples that are theirs, and puts the results in the samples' order."""
    out: Tensor | None = None
    for call, members, rows in parts:
        at = slice(members[0], members[0] + 1) if len(members) == 1 else color.upload(members, x.device, torch.int64)
        part = apply_alike(call, x[at], rows)
        if out is None:
            out = part.new_empty((len(x), *part.shape[1:]))
        if (part.shape[1:], part.dtype) != (out.shape[1:], out.dtype):
            raise ValueError(
                f"{name} gives samples of {tuple(out.shape[1:])} {out.dtype} and of {tuple(part.shape[1:])} "
                f"{part.dtype}, which make no batch: use apply_ragged."
            )
        out[at] = part
    assert out is not None
    return out


def apply_ragged(name: str, xs: Sequence[Tensor], kwargs: Sequence[Kwargs]) -> list[Tensor]:
    """`apply_call` item by item, where sizes differ before or after.

    Args:
        name: As in `apply_call`.
        xs: Items (C, H, W) or (T, C, H, W).
        kwargs: One mapping an item; one alone stands for all.
    """
    each = zip(xs, _for_each(name, kwargs, len(xs)), strict=True)
    return [apply_call(name, x.unsqueeze(0), [one]).squeeze(0) for x, one in each]
