"""Functionals that move pixels, each sample with its own parameters. Runs in the rank process.

Every function takes ``x`` (B, C, H, W) or (B, T, C, H, W) on any device and ``rows``: the keyword arguments of
`torchvision.transforms.v2.functional.<function's name>` for each of the B samples, defaults filled in. Arguments that
`graph.functionals` does not list as per-sample are equal in all rows. Matrices, pixel centres, the fill mask and the rounding
follow torchvision's tensor kernels (`torchvision/transforms/v2/functional/_geometry.py` and `_misc.py`, 0.26). Sampling
grids are evaluated without matrix products: those would round to TF32, a tenth of a pixel, wherever
`torch.set_float32_matmul_precision("high")` is set. Nothing here waits for the device or writes into ``x``.
"""

# Over 300 lines: a functional is a few lines, and those that sample share the grids.

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.arguments import Arguments
from lightning_dali.graph.color import distinct, upload, working_dtype

Row = Mapping[str, Any]
Array = np.ndarray[Any, Any]
_MODES = {0: "nearest", 2: "bilinear"}  # Pillow's numbers


# --- warps: affine, rotate, perspective, elastic ---------------------------------------------------------------------


def turns(rows: Arguments) -> list[int]:
    """Which rows of a warp are `rotate` calls, the others being `affine` ones."""
    if not rows.has("translate"):
        return list(range(len(rows)))
    return [i for i, move in enumerate(rows.column("translate")) if move is None]


def _column_or_nothing(rows: Arguments, name: str) -> list[Any]:
    return list(rows.column(name)) if rows.has(name) else [None] * len(rows)


def inverse_matrices(rows: Arguments, size: tuple[int, int], *, from_corner: bool = False) -> Array:
    """Where output pixels come from, (B, 6) numbers about the image's centre or its upper left corner.

    Of `RandomAffine`'s parameters, in degrees; the operations are torchvision's in its order, so that digits agree.

    The forward map is T(translate + centre) R(angle) Shear_y Shear_x S(scale) T(-centre), torchvision's and Pillow's.
    """
    height, width = size
    angle, center = list(rows.column("angle")), rows.column("center")
    move, scale, shear = (_column_or_nothing(rows, name) for name in ("translate", "scale", "shear"))
    for i in turns(rows):  # rotate turns the other way
        angle[i], move[i], scale[i], shear[i] = -(angle[i] % 360), (0.0, 0.0), 1.0, 0.0
    if min(scale) <= 0.0:
        raise ValueError(f"Argument scale should be positive, got {min(scale)}.")
    turn = [math.radians(value) for value in angle]
    tilt = [
        (math.radians(value), 0.0)
        if isinstance(value, (int, float))
        else (math.radians(value[0]), math.radians(value[-1]))
        for value in shear
    ]
    middle = (width * 0.5, height * 0.5)
    x, y = (0.0, 0.0) if from_corner else middle
    pivot_x, pivot_y = np.array([(px - x, py - y) for px, py in (one or middle for one in center)]).T
    # the trigonometry by libm, as torchvision has it: numpy's own differs in the last digit
    cos_y, tan_x = (np.array([f(t[k]) for t in tilt]) for f, k in ((math.cos, 1), (math.tan, 0)))
    xx = np.array([math.cos(a - t[1]) for a, t in zip(turn, tilt, strict=True)]) / cos_y
    yx = np.array([math.sin(a - t[1]) for a, t in zip(turn, tilt, strict=True)]) / cos_y
    xy = -(xx * tan_x + np.array([math.sin(a) for a in turn]))
    yy = np.array([math.cos(a) for a in turn]) - yx * tan_x
    # the determinant is 1 before scaling, so the adjugate is the inverse
    by, moved = np.array(scale, np.float64), np.array(move, np.float64)
    to_x, to_y = pivot_x + moved[:, 0], pivot_y + moved[:, 1]
    a, b, d, e = yy / by, -xy / by, -yx / by, xx / by
    return np.stack((a, b, pivot_x - a * to_x - b * to_y, d, e, pivot_y - d * to_x - e * to_y), axis=-1)


def _planes(theta: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """``a x + b y + c`` for each row of `theta` (K, R, 3) at each pixel: (K, R, H, W).

    In the order, and with the fused multiply-add, of the matrix product that torchvision makes.
    """
    a, b, c = theta[..., None, None].unbind(2)
    return torch.addcmul(xs * a, ys.unsqueeze(-1), b).add_(c)


def _upload_theta(theta: Tensor, divisor: list[float], x: Tensor) -> Tensor:
    """(K, 2, 3) host matrices, divided into grid_sample's units in `x`'s precision, on the device."""
    dtype = x.dtype if x.is_floating_point() else torch.float32
    units = theta.to(dtype) / torch.tensor(divisor, dtype=dtype).unsqueeze(-1)
    return units.to(working_dtype(x)).to(x.device, non_blocking=True)


def _affine_grid(matrices: Array, x: Tensor, out_size: list[int]) -> Tensor:
    """Sampling grid (K, H, W, 2); pixels are counted from the centre, K is 1 when all matrices are equal."""
    height, width = x.shape[-2:]
    theta = torch.from_numpy(matrices[:1] if (matrices == matrices[0]).all() else matrices).view(-1, 2, 3)
    theta = _upload_theta(theta, [0.5 * width, 0.5 * height], x)
    ys, xs = (torch.linspace((1.0 - n) * 0.5, (n - 1.0) * 0.5, n, device=x.device, dtype=theta.dtype) for n in out_size)
    return _planes(theta, xs, ys).permute(0, 2, 3, 1)


def sampling_mode(interpolation: Any) -> str:
    """ "nearest" or "bilinear"; ValueError for what tensors are not warped with."""
    mode = str(_MODES.get(interpolation, getattr(interpolation, "value", interpolation)))
    if mode not in _MODES.values():
        raise ValueError(f"interpolation must be nearest or bilinear for tensors, got {mode!r}.")
    return mode


def _sample(x: Tensor, grid: Tensor, row: Row) -> Tensor:
    """`grid_sample` with torchvision's fill: a mask of ones is sampled along, and fills where it is not one."""
    mode = sampling_mode(row["interpolation"])
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-2], *grid.shape[1:3]))
    batch, *_, height, width = x.shape
    dtype = x.dtype if x.is_floating_point() else torch.float32
    sample = functools.partial(nnf.grid_sample, mode=mode, padding_mode="zeros", align_corners=False)
    grid = grid.to(dtype)
    flat = x.to(dtype).reshape(batch, -1, height, width)
    out: Tensor = sample(flat, grid.expand(batch, -1, -1, -1))
    out = out.view(*x.shape[:-2], *out.shape[-2:])
    if row["fill"] is not None:
        ones = flat.new_ones(()).expand(grid.shape[0], 1, height, width)
        mask = sample(ones, grid).view(-1, *[1] * (x.ndim - 3), *out.shape[-2:])
        fill = _fill(row["fill"], x, dtype)
        out = torch.where(mask < 0.5, fill, out) if mode == "nearest" else out.sub_(fill).mul_(mask).add_(fill)
    return out if x.is_floating_point() else out.round_().to(x.dtype)


def _fill(fill: Any, x: Tensor, dtype: torch.dtype) -> Tensor | float:
    if isinstance(fill, (int, float)):
        return float(fill)
    if len(fill) not in (1, x.shape[-3]):
        raise ValueError(f"fill must have one value or one for each of {x.shape[-3]} channels, got {fill}.")
    return upload(list(fill), x.device, dtype).view(-1, 1, 1) if len(fill) > 1 else float(fill[0])


def warp(x: Tensor, rows: Arguments) -> Tensor:
    """`affine` and `rotate` calls, mixed, of one interpolation and fill."""
    size = (x.shape[-2], x.shape[-1])
    return _sample(x, _affine_grid(inverse_matrices(rows, size), x, list(size)), rows[0])


def rotate(x: Tensor, rows: Arguments) -> Tensor:
    """Turns counter-clockwise by `angle` degrees; with `expand`, and for exact quarter turns, all rows are equal."""
    row, size = rows[0], list(x.shape[-2:])
    angle = row["angle"] % 360
    if row["center"] is None and (angle % 180 == 0 or (angle % 90 == 0 and (row["expand"] or size[0] == size[1]))):
        moved: Tensor = F.rotate(x, **row)  # pixels only change places
        return moved
    if not row["expand"]:
        return warp(x, rows)
    # torchvision sizes the canvas itself; a meta tensor asks it without touching pixels
    canvas = F.rotate(torch.empty((1, *size), device="meta"), **{**row, "fill": None}).shape[-2:]
    return _sample(x, _affine_grid(inverse_matrices(rows[:1], (size[0], size[1])), x, list(canvas)), row)


def perspective_coefficients(rows: Arguments) -> list[list[float]]:
    """The eight numbers of each row's map, given or solved from four corners in float64, as torchvision does."""
    found = list(rows.column("coefficients"))
    unsolved = [i for i, given in enumerate(found) if given is None]
    if any(rows[i][name] is None for i in unsolved for name in ("startpoints", "endpoints")):
        raise ValueError("perspective needs startpoints and endpoints, or coefficients.")
    if unsolved:
        ends, starts = ([rows[i][name] for i in unsolved] for name in ("endpoints", "startpoints"))
        x, y = torch.tensor(ends, dtype=torch.float64).unbind(-1)  # (K, 4) each
        target = torch.tensor(starts, dtype=torch.float64)
        plane, nothing = torch.stack((x, y, torch.ones_like(x)), -1), torch.zeros(*x.shape, 3, dtype=torch.float64)
        affine_part = torch.stack((torch.cat((plane, nothing), -1), torch.cat((nothing, plane), -1)), -2)
        projective = -target.unsqueeze(-1) * torch.stack((x, y), -1).unsqueeze(-2)
        system = torch.cat((affine_part, projective), -1).flatten(1, 2)  # (K, 8, 8)
        solved = torch.linalg.lstsq(system, target.flatten(1).unsqueeze(-1), driver="gels").solution
        for i, solution in zip(unsolved, solved.squeeze(-1).float().tolist(), strict=True):
            found[i] = solution
    if any(len(given) != 8 for given in found):
        raise ValueError("Argument coefficients should have 8 float values")
    return [list(given) for given in found]


def perspective(x: Tensor, rows: Arguments) -> Tensor:
    """Maps `startpoints` to `endpoints`, or by `coefficients`: Pillow's quotient of planes at pixel centres."""
    height, width = x.shape[-2:]
    table = torch.tensor(distinct(perspective_coefficients(rows)), dtype=torch.float64)
    above = _upload_theta(table[:, :6].view(-1, 2, 3), [0.5 * width, 0.5 * height], x)
    below = torch.cat((table[:, 6:], torch.ones(len(table), 1, dtype=torch.float64)), 1).unsqueeze(1)
    below = _upload_theta(below, [1.0], x)
    ys, xs = (torch.linspace(0.5, n - 0.5, n, device=x.device, dtype=above.dtype) for n in (height, width))
    grid = _planes(above, xs, ys).div_(_planes(below, xs, ys)).sub_(1.0)
    return _sample(x, grid.permute(0, 2, 3, 1), rows[0])


def elastic(x: Tensor, rows: Arguments) -> Tensor:
    """Moves each pixel by its `displacement` (1, H, W, 2), in units of half the image."""
    height, width = x.shape[-2:]
    fields = rows.column("displacement")
    wanted = (1, height, width, 2)
    if any(field.shape != wanted for field in fields):
        raise ValueError(f"displacement must have shape {wanted}, got {[tuple(field.shape) for field in fields]}.")
    if all(field is fields[0] for field in fields):
        fields = fields[:1]
    shift = torch.cat(fields).to(x.device, working_dtype(x), non_blocking=True)
    ys, xs = (torch.linspace((1 - n) / n, (n - 1) / n, n, device=x.device, dtype=shift.dtype) for n in (height, width))
    identity = torch.stack((xs.expand(height, -1), ys.unsqueeze(-1).expand(-1, width)), -1)
    return _sample(x, identity + shift, rows[0])


# --- windows: crop, resized_crop, pad, erase -------------------------------------------------------------------------


def crop(x: Tensor, rows: Arguments) -> Tensor:
    """Cuts windows of one size at each row's `top` and `left`; zero outside of the image."""
    return _crop_copies(x, rows) if x.device.type == "cpu" else _crop_gather(x, rows)


def _crop_copies(x: Tensor, rows: Arguments) -> Tensor:
    """Sample by sample: on the CPU a seventh of the time of a gather."""
    (height, width), (full_height, full_width) = (rows[0]["height"], rows[0]["width"]), x.shape[-2:]
    out = x.new_zeros((*x.shape[:-2], height, width))
    for item, source, row in zip(out, x, rows, strict=True):
        top, left = row["top"], row["left"]
        ys = slice(max(top, 0), max(min(top + height, full_height), 0))
        xs = slice(max(left, 0), max(min(left + width, full_width), 0))
        seen = source[..., ys, xs]
        item[..., ys.start - top :, xs.start - left :][..., : seen.shape[-2], : seen.shape[-1]] = seen
    return out


def _crop_gather(x: Tensor, rows: Arguments) -> Tensor:
    """All samples at once."""
    (height, width), (full_height, full_width) = (rows[0]["height"], rows[0]["width"]), x.shape[-2:]
    corners = upload(list(zip(rows.column("top"), rows.column("left"), strict=True)), x.device, torch.int64)
    ys = corners[:, :1] + torch.arange(height, device=x.device)
    xs = corners[:, 1:] + torch.arange(width, device=x.device)
    index = ys.clamp(0, full_height - 1).mul_(full_width).unsqueeze(-1) + xs.clamp(0, full_width - 1).unsqueeze(-2)
    flat = x.reshape(len(rows), -1, full_height * full_width)
    out = flat.gather(-1, index.view(len(rows), 1, -1).expand(-1, flat.shape[1], -1)).view(*x.shape[:-2], height, width)
    inside = [
        0 <= row["top"] <= full_height - height and 0 <= row["left"] <= full_width - width for row in rows
    ]  # known on the host: no need to look
    if all(inside):
        return out
    outside_y, outside_x = (ys < 0) | (ys >= full_height), (xs < 0) | (xs >= full_width)
    outside = outside_y.unsqueeze(-1) | outside_x.unsqueeze(-2)
    return out.masked_fill_(outside.view(-1, *[1] * (x.ndim - 3), height, width), 0)


def resized_crop(x: Tensor, rows: Arguments) -> Tensor:
    """Cuts windows of one size, then resizes them together."""
    row = rows[0]
    window = crop(x, rows)
    out: Tensor = F.resize(window, row["size"], interpolation=row["interpolation"], antialias=row["antialias"])
    return out


def pad(x: Tensor, rows: Arguments) -> Tensor:
    """Pads all samples alike; only a fill by channel differs from torchvision, which would wait for it."""
    row = rows[0]
    fill, padding = row["fill"], row["padding"]
    sides = [padding] if isinstance(padding, int) else list(padding)
    left, top, right, bottom = sides * (4 // len(sides)) if len(sides) in (1, 2, 4) else (-1,) * 4
    by_channel = isinstance(fill, (list, tuple)) and len(fill) > 1
    if not by_channel or row["padding_mode"] != "constant" or min(sides) < 0:
        padded: Tensor = F.pad(x, **row)
        return padded
    height, width = x.shape[-2:]
    color = torch.tensor(fill).to(x.dtype).to(x.device, non_blocking=True).view(-1, 1, 1)
    out = x.new_empty((*x.shape[:-2], top + height + bottom, left + width + right)).copy_(color)
    out[..., top : top + height, left : left + width] = x
    return out


def erase(x: Tensor, rows: Arguments) -> Tensor:
    """Sets each row's window to `v`: one value, one a channel, or a whole patch."""
    values = rows.column("v")
    if x.device.type == "cpu" or any(isinstance(value, Tensor) for value in values):
        given = [v if isinstance(v, Tensor) else torch.tensor(v).view(-1, 1, 1) for v in values]
        return _erase_patches(x, rows, [patch.to(x.dtype) for patch in given])
    return _erase_colors(x, rows, values)


def _erase_colors(x: Tensor, rows: Arguments, values: list[Any]) -> Tensor:
    """All samples at once."""
    channels = x.shape[-3]
    by_channel = [value if isinstance(value, list) else [value] for value in values]
    colors = upload([value * channels if len(value) == 1 else value for value in by_channel], x.device, x.dtype)
    windows = zip(*(rows.column(name) for name in "ijhw"), strict=True)
    box = upload([(i, i + h, j, j + w) for i, j, h, w in windows], x.device, torch.int64)
    top, bottom, left, right = box.view(len(rows), 4, *[1] * (x.ndim - 1)).unbind(1)
    ys, xs = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1), torch.arange(x.shape[-1], device=x.device)
    window = ((ys >= top) & (ys < bottom)) & ((xs >= left) & (xs < right))
    return torch.where(window, colors.view(len(rows), *[1] * (x.ndim - 4), channels, 1, 1), x)


def _erase_patches(x: Tensor, rows: Arguments, values: list[Tensor]) -> Tensor:
    """All patches travel in one copy, then each is put in its place; on the CPU the faster way for colours too."""
    packed = torch.cat([value.flatten() for value in values]).to(x.device, non_blocking=True)
    patches = torch.split(packed, [value.numel() for value in values])
    out = x.clone()
    for item, row, value, patch in zip(out, rows, values, patches, strict=True):
        i, j, h, w = (row[name] for name in "ijhw")
        item[..., i : i + h, j : j + w] = patch.view(value.shape)
    return out
