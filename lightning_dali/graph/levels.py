"""Functionals that give every level of a channel another level, together: one table of 256 a sample, looked up once.

`RandAugment`, `AutoAugment` and `ColorJitter` draw several of them for the samples of a batch. Run one by one, each takes
its samples out and puts them back; as `levels` they share that, whatever each sample drew. Runs in the rank process.

A table is what the functional's own kernel (`graph.color`, `graph.pillow`) makes of a ramp, the picture of all levels, so
the arithmetic exists once. What depends on the sample (its mean, its extremes, its histogram) is measured on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import color, pillow
from lightning_dali.graph.arguments import Arguments

Array = np.ndarray[Any, Any]
LEVELS = 256
"""Of uint8."""


def levels(x: Tensor, rows: Arguments) -> Tensor:
    """Looks all pixels up in their sample's tables.

    Args:
        x: (B, C, H, W) or (B, T, C, H, W), uint8. Every frame of a clip is measured by itself.
        rows: Arguments of the functionals named by ``_call``, which lies in runs: few, if the samples are sorted by it.
    """
    if x.ndim == 5:
        return levels(x.flatten(0, 1), rows.repeat(x.shape[1])).view(x.shape)
    runs, begin = [], 0
    for call, members in groupby(rows.column("_call")):
        end = begin + sum(1 for _ in members)
        runs.append((call, slice(begin, end)))
        begin = end
    if any(call in _CHANNELS_MATTER for call, _ in runs):
        color.check_channels(x)
    ramp, known = _known([(call, rows[part]) for call, part in runs if call in _POINTS], x.device)
    tables = []
    for call, part in runs:
        if call in _POINTS:
            taken, known = known[: part.stop - part.start], known[part.stop - part.start :]
            tables.append(taken.expand(-1, x.shape[1], -1))
        else:
            table = _MEASURED[call](x[part], rows[part], ramp)
            tables.append(table.view(table.shape[0], -1, LEVELS).expand(-1, x.shape[1], -1))
    table = tables[0] if len(tables) == 1 else torch.cat(tables)
    return table.gather(2, x.reshape(*x.shape[:2], -1).to(torch.int64)).reshape(x.shape)


def _known(runs: list[tuple[str, Arguments]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The ramp (1, 1, 256), and the tables (n, 1, 256) that depend on the arguments alone: made on the host, one copy."""
    made = [tables[which] for tables, which in (point_tables(call, rows) for call, rows in runs)]
    together = np.concatenate([np.arange(LEVELS, dtype=np.uint8)[None], *made])
    tables = torch.from_numpy(together).view(-1, 1, LEVELS).to(device, non_blocking=True)
    return tables[:1], tables[1:]


def point_tables(call: str, rows: Arguments) -> tuple[Array, list[int]]:
    """The tables of a functional whose levels depend on its arguments alone.

    Returns:
        Distinct tables (m, 256), uint8; and which of them each row has.
    """
    names = _POINT_ARGUMENTS[call.removesuffix("_pil")]
    distinct, which = Arguments(len(rows), {}, {name: rows.column(name) for name in names}).distinct()
    keys = [(call, *(row[name] for name in names)) for row in distinct]
    missing = [number for number, key in enumerate(keys) if key not in _tables]
    made = {key: _tables[key] for key in keys if key in _tables}
    if missing:
        columns = {name: [distinct.column(name)[number] for number in missing] for name in names}
        ramp = torch.arange(LEVELS, dtype=torch.uint8).view(1, 1, 1, -1).expand(len(missing), -1, -1, -1)
        tables = _POINTS[call](ramp, Arguments(len(missing), {}, columns)).reshape(-1, LEVELS).numpy()
        new = {keys[number]: table for number, table in zip(missing, tables, strict=True)}
        made |= new
        if len(_tables) + len(new) > _MOST_TABLES:
            _tables.clear()
        _tables.update(new)
    return np.stack([made[key] for key in keys]), which


_tables: dict[tuple[Any, ...], Array] = {}
"""Made before: `RandAugment` and its kin draw the same few arguments again and again."""
_MOST_TABLES = 4096
_POINT_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "adjust_brightness": ("brightness_factor",),
    "adjust_gamma": ("gamma", "gain"),
    "posterize": ("bits",),
    "solarize": ("threshold",),
    "invert": (),
}
_POINTS: dict[str, Callable[[Tensor, Arguments], Tensor]] = {
    "adjust_brightness": color.adjust_brightness,
    "adjust_brightness_pil": pillow.adjust_brightness,
    "adjust_gamma": color.adjust_gamma,
    "adjust_gamma_pil": pillow.adjust_gamma,
    **dict.fromkeys(("posterize", "posterize_pil"), color.posterize),
    **dict.fromkeys(("solarize", "solarize_pil"), color.solarize),
    **dict.fromkeys(("invert", "invert_pil"), lambda ramp, rows: F.invert(ramp)),
}


# --- what is measured -------------------------------------------------------------------------------------------------


def _contrast(x: Tensor, rows: Arguments, ramp: Tensor) -> Tensor:
    return color.blend(ramp.unsqueeze(0), color.mean_gray(x), rows.column("contrast_factor"))


def _contrast_pil(x: Tensor, rows: Arguments, ramp: Tensor) -> Tensor:
    return pillow.blend(pillow.mean_gray(x), ramp.unsqueeze(0), pillow.factors(rows, "contrast_factor"))


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel's lowest and highest level, (B, C, 1)."""
    return x.amin(dim=(-2, -1)).unsqueeze(-1), x.amax(dim=(-2, -1)).unsqueeze(-1)


def _autocontrast(x: Tensor, rows: Arguments, ramp: Tensor) -> Tensor:
    """torchvision's kernel: a channel's extremes become 0 and 255."""
    low, high = _extremes(x)
    spread = (high - low).float()
    flat = spread == 0
    stretched = (ramp.float() - low).div_(spread.mul_(1.0 / 255).masked_fill_(flat, 1.0)).clamp_(0, 255)
    return torch.where(flat, ramp, stretched.to(torch.uint8))


def _autocontrast_pil(x: Tensor, rows: Arguments, ramp: Tensor) -> Tensor:
    """`PIL.ImageOps.autocontrast`: the same in float64, the products of both ends truncated."""
    low, high = _extremes(x)
    spread = (high - low).double()
    flat = spread == 0
    scale = 255.0 / spread.masked_fill_(flat, 255.0)
    stretched = (ramp.double() * scale).sub_(low * scale).clamp_(0, 255)
    return torch.where(flat, ramp, stretched.to(torch.uint8))


def _equalize(x: Tensor, rows: Arguments, ramp: Tensor) -> Tensor:
    """`PIL.ImageOps.equalize`, in whole numbers: as many pixels a level as the others have."""
    batch, channels, height, width = x.shape
    planes = batch * channels
    offsets = torch.arange(0, planes * LEVELS, LEVELS, device=x.device).view(batch, channels, 1)
    at = (x.reshape(batch, channels, -1) + offsets).reshape(-1)
    histogram = torch.zeros(planes * LEVELS, dtype=torch.int64, device=x.device)
    histogram = histogram.scatter_add_(0, at, at.new_ones(()).expand(at.shape)).view(batch, channels, LEVELS)
    last = histogram.gather(2, _extremes(x)[1].to(torch.int64))
    step = (height * width - last).div_(255, rounding_mode="floor")
    before = histogram.cumsum(2).sub_(histogram).add_(step.div(2, rounding_mode="floor"))
    table = before.div_(step.clamp(min=1), rounding_mode="floor").clamp_(0, 255)
    return torch.where(step == 0, ramp, table.to(torch.uint8))


_MEASURED: dict[str, Callable[[Tensor, Arguments, Tensor], Tensor]] = {
    "adjust_contrast": _contrast,
    "adjust_contrast_pil": _contrast_pil,
    "autocontrast": _autocontrast,
    "autocontrast_pil": _autocontrast_pil,
    **dict.fromkeys(("equalize", "equalize_pil"), _equalize),
}
_CHANNELS_MATTER = frozenset(
    name + kind for name in ("adjust_brightness", "adjust_contrast", "autocontrast") for kind in ("", "_pil")
)
"""Those that torchvision refuses for other pictures than gray and RGB ones."""
CALLS = frozenset(_POINTS) | frozenset(_MEASURED)
"""What may meet in one call of `levels`."""
