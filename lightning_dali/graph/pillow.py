"""What torchvision does to a PIL image, with Pillow's own arithmetic, on a batch. Runs in the rank process.

torchvision has two arithmetics: one for PIL images, Pillow's, and one for tensors. They differ by a level in most colour
functionals, by up to fourteen in hue, and along the whole border of a bilinear warp. A dataset that opened its files with
PIL gets Pillow's until its transforms make a tensor; so does the batch (docs/decisions/0003-pillow-arithmetic.md).

Every function takes ``x`` (B, C, H, W) uint8 with C of 1 or 3, on any device, and ``rows``: the keyword arguments of
`torchvision.transforms.v2.functional.<function's name>` for each of the B samples, defaults filled in. The arithmetic is
that of Pillow's `Blend.c`, `Convert.c` and `Geometry.c` (13.0), in its order and its precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.arguments import Arguments
from lightning_dali.graph.color import per_sample, upload
from lightning_dali.graph.geometry import Array, crop, inverse_matrices, perspective_coefficients, turns
from lightning_dali.proxies.sizes import pil_rotation, resized_size

# --- colour ----------------------------------------------------------------------------------------------------------


def _gray(x: Tensor) -> Tensor:
    """`convert("L")`: ITU-R 601-2 luma in 16-bit fixed point, rounded; (B, 1, H, W) int32."""
    if x.shape[-3] == 1:
        return x.to(torch.int32)
    red, green, blue = x.to(torch.int32).unbind(-3)
    return (
        (red * 19595)
        .add_(green, alpha=38470)
        .add_(blue, alpha=7471)
        .add_(0x8000)
        .bitwise_right_shift_(16)
        .unsqueeze(-3)
    )


def blend(degenerate: Tensor, x: Tensor, factors: Sequence[float]) -> Tensor:
    """`PIL.Image.blend(degenerate, x, factor)` per sample: in float32, truncated."""
    base = degenerate.to(torch.float32)
    # two roundings, as in C: no fused multiply-add
    moved = (x - base).mul_(per_sample(factors, x))
    return moved.add_(base).clamp_(0, 255).to(torch.uint8)


def factors(rows: Arguments, name: str) -> list[float]:
    """That argument of every row, none of them negative."""
    values = [float(value) for value in rows.column(name)]
    if min(values) < 0:
        raise ValueError(f"{name} ({min(values)}) is not non-negative.")
    return values


def adjust_brightness(x: Tensor, rows: Arguments) -> Tensor:
    """Blends with black by `brightness_factor`."""
    return blend(x.new_zeros(()), x, factors(rows, "brightness_factor"))


def adjust_contrast(x: Tensor, rows: Arguments) -> Tensor:
    """Blends with the rounded mean of the gray picture by `contrast_factor`."""
    return blend(mean_gray(x), x, factors(rows, "contrast_factor"))


def mean_gray(x: Tensor) -> Tensor:
    """The mean of the gray picture, rounded, one number an image: (B, 1, 1, 1)."""
    gray = _gray(x)
    total = gray.sum(dim=(-3, -2, -1), keepdim=True, dtype=torch.int64)
    return (total.to(torch.float64) / gray[0].numel() + 0.5).floor_()


def adjust_saturation(x: Tensor, rows: Arguments) -> Tensor:
    """Blends with the gray picture by `saturation_factor`."""
    return blend(_gray(x), x, factors(rows, "saturation_factor"))


def rgb_to_grayscale(x: Tensor, rows: Arguments) -> Tensor:
    """`convert("L")`, once or three times (`num_output_channels`)."""
    gray = _gray(x).to(torch.uint8)
    return gray.expand(-1, 3, -1, -1).contiguous() if rows[0]["num_output_channels"] == 3 else gray


def adjust_gamma(x: Tensor, rows: Arguments) -> Tensor:
    """Looks every value up in torchvision's table of `gain * value ** gamma`."""
    levels = np.arange(256) / 255.0
    pairs = zip(rows.column("gain"), rows.column("gamma"), strict=True)
    tables = [(255 + 1 - 1e-3) * gain * levels**gamma for gain, gamma in pairs]
    table = upload(np.clip(np.stack(tables), 0, 255).astype(np.uint8).tolist(), x.device, torch.uint8)
    return table.gather(1, x.reshape(len(x), -1).to(torch.int64)).view(x.shape)


def adjust_hue(x: Tensor, rows: Arguments) -> Tensor:
    """Turns the hue by `hue_factor`, by way of Pillow's HSV of three bytes."""
    if x.shape[-3] == 1:
        return x
    hues = [float(value) for value in rows.column("hue_factor")]
    if not all(-0.5 <= factor <= 0.5 for factor in hues):
        raise ValueError(f"hue_factor ({hues}) is not in [-0.5, 0.5].")
    shift = upload([int(factor * 255) % 256 for factor in hues], x.device, torch.int32).view(-1, 1, 1)
    hue, saturation, value = _hsv(x)
    return _rgb((hue + shift).remainder_(256), saturation, value)


def _hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three planes (B, H, W) of whole numbers in 0..255; `rgb2hsv_row` of `Convert.c`, its doubles and floats."""
    rgb = x.to(torch.float32)
    red, green, blue = rgb.unbind(-3)
    low, high = torch.aminmax(rgb, dim=-3)
    spread = high - low
    gray = spread == 0
    divisor = spread.masked_fill(gray, 1.0)
    to_red, to_green, to_blue = ((high - plane).div_(divisor) for plane in (red, green, blue))
    near_green = (to_red.double() + 2.0).sub_(to_blue).float()
    near_blue = (to_green.double() + 4.0).sub_(to_red).float()
    sixths = torch.where(red == high, to_blue - to_green, torch.where(green == high, near_green, near_blue))
    hue = (sixths.double() / 6.0).add_(1.0).fmod_(1.0).float()
    saturation = spread / high.masked_fill(high == 0, 1.0)

    def level(fraction: Tensor) -> Tensor:
        return (fraction.double() * 255.0).to(torch.int32).clamp_(0, 255).masked_fill_(gray, 0)

    return level(hue), level(saturation), high.to(torch.int32)


def _rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """`hsv2rgb` of `Convert.c`."""
    sixths = hue.double().mul_(6.0).div_(255.0)
    sector = sixths.floor()
    part = (sixths - sector).float().double()
    share = (saturation.double() / 255.0).float().double()
    bright = value.double()

    def level(scaled: Tensor) -> Tensor:
        return scaled.mul_(bright).add_(0.5).floor_().clamp_(0, 255)  # C's round: halves away from zero

    low, falling, rising = level(1.0 - share), level(1.0 - share * part), level(1.0 - share * (1.0 - part))
    # red over the six sectors; green is red two sectors later, blue four
    red = torch.stack((bright, falling, low, low, rising, bright), dim=-3)
    at = sector.to(torch.int64)
    rgb = red.gather(-3, torch.stack((at, at + 4, at + 2), dim=-3).remainder_(6))
    gray = (saturation == 0).unsqueeze(-3)
    return torch.where(gray, bright.unsqueeze(-3), rgb).to(torch.uint8)


# --- geometry --------------------------------------------------------------------------------------------------------


def is_bilinear(interpolation: Any) -> bool:
    """Else nearest; ValueError for what the worker does."""
    mode = str({0: "nearest", 2: "bilinear"}.get(interpolation, getattr(interpolation, "value", interpolation)))
    if mode not in ("nearest", "bilinear"):
        raise ValueError(f"interpolation must be nearest or bilinear, got {mode!r}: the worker does the others.")
    return mode == "bilinear"


def warp(x: Tensor, rows: Arguments) -> Tensor:
    """`affine` and `rotate` calls, mixed; all give one size."""
    size = (x.shape[-2], x.shape[-1])
    table, out_size = matrices(rows, size)
    if is_bilinear(rows[0]["interpolation"]):
        ys, xs = _pixel_centres(out_size, x.device)
        to = upload(table, x.device, torch.float64).view(-1, 6, 1, 1).unbind(1)
        return _sample(x, xs * to[0] + ys * to[1] + to[2], xs * to[3] + ys * to[4] + to[5], rows[0])
    return _nearest(x, *_fixed_point(table, out_size, x.device), rows[0]["fill"])


def matrices(rows: Arguments, size: tuple[int, int]) -> tuple[Array, tuple[int, int]]:
    """From output to input pixels, float64 (B, 6), and the (H, W) of the result."""
    table = inverse_matrices(rows, size, from_corner=True)
    turned = size
    for i in turns(rows):
        row = rows[i]
        table[i], turned = pil_rotation(size, row["angle"], row["center"], row["expand"])
    return table, turned


def fixed_matrices(table: Array) -> Array:
    """Matrices as `affine_fixed` takes them: from the middles of pixels, in 65536ths, int64."""
    half = table.copy()
    half[:, 2::3] = table[:, 0::3] * 0.5 + table[:, 1::3] * 0.5 + table[:, 2::3]
    fixed: Array = np.floor(half * 65536.0 + 0.5).astype(np.int64)
    return fixed


def _fixed_point(table: Array, size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which pixel each output pixel shows (B, H, W): `affine_fixed` counts in 65536ths."""
    fixed = torch.from_numpy(fixed_matrices(table)).to(device, non_blocking=True)
    a, b, c, d, e, f = fixed.view(-1, 6, 1, 1).unbind(1)
    ys, xs = torch.arange(size[0], device=device).view(-1, 1), torch.arange(size[1], device=device)
    planes = (torch.addcmul(torch.addcmul(start, y, ys), x, xs) for x, y, start in ((a, b, c), (d, e, f)))
    columns, lines = (plane.bitwise_right_shift_(16) for plane in planes)
    return columns, lines


def perspective(x: Tensor, rows: Arguments) -> Tensor:
    """Maps `startpoints` to `endpoints`, or by `coefficients`."""
    table = upload(perspective_coefficients(rows), x.device, torch.float64).view(len(rows), 8, 1, 1)
    a, b, c, d, e, f, g, h = table.unbind(1)
    ys, xs = _pixel_centres((x.shape[-2], x.shape[-1]), x.device)
    below = (xs * g + ys * h).add_(1.0)
    from_x, from_y = (xs * a + ys * b + c).div_(below), (xs * d + ys * e + f).div_(below)
    if is_bilinear(rows[0]["interpolation"]):
        return _sample(x, from_x, from_y, rows[0])
    columns, lines = (plane.floor().clamp_(-1, 2**31 - 1).to(torch.int64) for plane in (from_x, from_y))
    return _nearest(x, columns, lines, rows[0]["fill"])


def _pixel_centres(size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns (H, 1) and rows (W,)."""
    ys, xs = (torch.arange(n, device=device, dtype=torch.float64).add_(0.5) for n in size)
    return ys.unsqueeze(-1), xs


def _fill(fill: Any, x: Tensor) -> Tensor:
    """(1, C or 1, 1, 1), whole numbers as in torchvision's `_parse_fill`."""
    values = [0] if fill is None else list(fill) if isinstance(fill, (list, tuple)) else [fill]
    return upload([int(value) for value in values], x.device, torch.int64).clamp(0, 255).to(x.dtype).view(1, -1, 1, 1)


def _nearest(x: Tensor, columns: Tensor, lines: Tensor, fill: Any) -> Tensor:
    """Looks pixels up; `fill` where there are none."""
    batch, channels, height, width = x.shape
    column, line = columns.clamp(0, width - 1), lines.clamp(0, height - 1)
    inside = (column == columns).logical_and_(line == lines)
    index = line.mul_(width).add_(column).view(batch, 1, -1).expand(-1, channels, -1)
    found = x.reshape(batch, channels, -1).gather(2, index).view(batch, channels, *inside.shape[-2:])
    return _where(inside.unsqueeze(1), found, fill)


def _where(inside: Tensor, found: Tensor, fill: Any) -> Tensor:
    """`found`, and `fill` outside; black needs no copy to the device."""
    black = fill is None or not any(fill if isinstance(fill, (list, tuple)) else [fill])
    return found.mul_(inside) if black else torch.where(inside, found, _fill(fill, found))


def _sample(x: Tensor, from_x: Tensor, from_y: Tensor, row: Any) -> Tensor:
    """Bilinear: the border's pixels go on to its edge, `fill` beyond; truncated."""
    height, width = x.shape[-2:]
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    grid = torch.stack((from_x.mul(2.0 / width).sub_(1.0), from_y.mul(2.0 / height).sub_(1.0)), dim=-1).float()
    out = nnf.grid_sample(x.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    # the four weights of a flat area add up to a little under one here, to exactly one in Pillow
    levels = out.add_(1 / 512).to(torch.uint8)
    return _where(inside.unsqueeze(1), levels, row["fill"])


def resize(x: Tensor, rows: Arguments) -> Tensor:
    """Nearest as Pillow counts it; the other filters are torchvision's, always antialiased."""
    row = rows[0]
    new = resized_size((x.shape[-2], x.shape[-1]), row["size"], row["max_size"])
    mode = str(getattr(row["interpolation"], "value", row["interpolation"]))
    if not mode.startswith("nearest"):
        smooth: Tensor = F.resize(x, list(new), interpolation=row["interpolation"], antialias=True)
        return smooth
    lines, columns = (_steps(old, length) for old, length in zip(x.shape[-2:], new, strict=True))
    on_device = [torch.from_numpy(index).to(x.device, non_blocking=True) for index in (lines, columns)]
    return x.index_select(-2, on_device[0]).index_select(-1, on_device[1])


def resized_crop(x: Tensor, rows: Arguments) -> Tensor:
    """Cuts windows of one size, then resizes them together."""
    return resize(crop(x, rows), Arguments(len(rows), rows[0] | {"max_size": None}, {}))


def _steps(old: int, new: int) -> np.ndarray[Any, Any]:
    """Which of `old` pixels each of `new` shows: `ImagingScaleAffine` adds the step up."""
    step = old / new
    positions = np.add.accumulate(np.concatenate(([step * 0.5], np.full(new - 1, step))))
    return np.clip(positions.astype(np.int64), 0, old - 1)
