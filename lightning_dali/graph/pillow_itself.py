"""Calls that met PIL images, run by Pillow where the batch is on the CPU: faster there than its arithmetic in torch.

Runs in the rank. A GPU has `graph.pillow` and `graph.levels` instead, which give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.functionals import PILLOW, arguments, parameters
from lightning_dali.graph.plan import TailStep

Rows = torch.Tensor | list[torch.Tensor]
Chain = list[tuple[Callable[..., Image.Image], dict[str, Any]]]
_MOVES = ("horizontal_flip", "vertical_flip")
"""The same for PIL images and tensors: a row that is an image anyway does them as one."""


FEWEST_PIXELS = 96 * 96
"""Of an image. A call costs Pillow 0.1 ms of Python whatever the image; torch spreads that over the batch (decisions/0006)."""


def pays_with_pillow(rows: Rows) -> bool:
    """Whether `run_pillow` takes these rows, and is the faster way: on the CPU, from about 96 x 96 pixels."""
    first = rows[0]
    if first.device.type != "cpu" or first.dtype != torch.uint8 or first.ndim != 3:
        return False
    return sum(row[0].numel() for row in rows) >= FEWEST_PIXELS * len(rows)


def run_pillow(
    rows: Rows, steps: Sequence[TailStep], *, channels_last: bool = False
) -> tuple[Rows, Sequence[TailStep]]:
    """Runs what comes first in each row as long as it met a PIL image.

    Args:
        rows: `(n, C, H, W)` or n tensors `(C, H, W)`, uint8, C of 1 or 3, on the CPU. They are not changed.
        steps: The tail.
        channels_last: How the batch is to lie in memory in the end: better turned now than as floating point.

    Returns:
        The rows, and the steps that are left.
    """
    chains: list[Chain] = [[] for _ in rows]
    tensors: set[int] = set()
    """Rows that are past their last call of this kind."""
    left = []
    for step in steps:
        members = range(len(rows)) if step.rows is None else step.rows
        rest = []
        for place, row in enumerate(members):
            kwargs = step.arguments[place]
            name = kwargs.pop("_call", step.name)
            if row not in tensors and (name.endswith(PILLOW) or (name in _MOVES and chains[row])):
                chains[row].append(_as_torchvision_has_it(name, kwargs))
            else:
                tensors.add(row)
                rest.append(place)
        if rest:
            left.append(_only(step, members, rest))
    if not any(chains):
        return rows, steps
    threads = min(torch.get_num_threads(), len(rows))
    with ThreadPoolExecutor(threads) as pool:  # Pillow lets others run while it computes
        apply: Callable[..., Iterable[torch.Tensor]] = map if threads == 1 else pool.map
        done = list(apply(_run, rows, chains))
    return (_together(done, channels_last=channels_last) if isinstance(rows, torch.Tensor) else done), left


def _as_torchvision_has_it(name: str, kwargs: dict[str, Any]) -> tuple[Callable[..., Image.Image], dict[str, Any]]:
    names = parameters(name)
    return getattr(F, name.removesuffix(PILLOW)), {key: value for key, value in kwargs.items() if key in names}


def _only(step: TailStep, members: Sequence[int], places: list[int]) -> TailStep:
    if len(places) == len(members):
        return step
    picked = arguments(step.name, [step.arguments[place] for place in places])
    return replace(step, rows=tuple(members[place] for place in places), arguments=picked)


def _run(row: torch.Tensor, chain: Chain) -> torch.Tensor:
    if not chain:
        return row
    pixels = np.ascontiguousarray(row.movedim(0, -1).numpy())
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels)
    for functional, kwargs in chain:
        image = functional(image, **kwargs)
    changed = torch.from_numpy(np.array(image))
    return (changed.unsqueeze(-1) if changed.ndim == 2 else changed).movedim(-1, 0)


def _together(done: list[torch.Tensor], *, channels_last: bool) -> Rows:
    first = done[0]
    if any(item.shape != first.shape for item in done):
        return done
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    batch = torch.empty((len(done), *first.shape), dtype=first.dtype, memory_format=memory_format)
    for item, pixels in zip(batch, done, strict=True):
        item.copy_(pixels)
    return batch
