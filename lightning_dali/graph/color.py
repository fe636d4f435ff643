"""Colour, blur and noise: functionals that leave pixels where they are, each sample with its own factors.

Runs in the rank process.

Every function takes ``x`` (B, C, H, W) or (B, T, C, H, W) on any device and ``rows``: the keyword arguments of
`torchvision.transforms.v2.functional.<function's name>` for each of the B samples, defaults filled in. Arguments that
`graph.functionals` does not list as per-sample are equal in all rows. The arithmetic, its order and its rounding follow
torchvision's tensor kernels (`torchvision/transforms/v2/functional/_color.py` and `_misc.py`, 0.26), so that uint8
results agree bit for bit except where noted. Nothing here waits for the device, draws at random, or writes into ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.arguments import Arguments

INF = float("inf")


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Host numbers as a tensor on `device`, in one small copy that the host does not wait for."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def working_dtype(x: Tensor) -> torch.dtype:
    """What torchvision computes in: float32, float64 for float64 (half types are rounded once, at the end)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def per_sample(values: Sequence[float], x: Tensor) -> Tensor:
    """One number a sample, shaped to broadcast over `x`: (B, 1, 1, 1) or (B, 1, 1, 1, 1)."""
    return upload(list(values), x.device, working_dtype(x)).view(-1, *[1] * (x.ndim - 1))


def distinct(parameters: list[list[float]]) -> list[list[float]]:
    """One row when all are equal: it broadcasts."""
    return parameters[:1] if all(one == parameters[0] for one in parameters) else parameters


def checked_values(rows: Arguments, name: str, low: float = 0.0, high: float = float("inf")) -> list[float]:
    """That argument of every row; ValueError for one that is out of range."""
    values = [float(value) for value in rows.column(name)]
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{name} must be in [{low}, {high}], got {value}.")
    return values


def _bound(x: Tensor) -> int:
    """The value of white."""
    return 1 if x.is_floating_point() else int(torch.iinfo(x.dtype).max)


def check_channels(x: Tensor) -> None:
    """Raises TypeError, torchvision's, for what is neither gray nor RGB."""
    if x.shape[-3] not in (1, 3):
        raise TypeError(f"Input image tensor permitted channel values are 1 or 3, but found {x.shape[-3]}")


def blend(x: Tensor, other: Tensor, ratios: Sequence[float]) -> Tensor:
    """``ratio * x + (1 - ratio) * other`` per sample, clamped.

    torchvision adds with `alpha`, a fused multiply-add; `addcmul` with a factor a sample is its twin on the CPU. Where it
    is not fused (CUDA), a pixel whose exact result is a whole number, a gray one, can be one level off.
    """
    blended = torch.addcmul(x * per_sample(ratios, x), other, per_sample([1.0 - ratio for ratio in ratios], x))
    return blended.clamp_(0, _bound(x)).to(x.dtype)


def adjust_brightness(x: Tensor, rows: Arguments) -> Tensor:
    """Multiplies by `brightness_factor`."""
    check_channels(x)
    factors = per_sample(checked_values(rows, "brightness_factor"), x)
    return (x * factors).clamp_(0, _bound(x)).to(x.dtype)


def adjust_saturation(x: Tensor, rows: Arguments) -> Tensor:
    """Blends with the picture's own gray by `saturation_factor`."""
    check_channels(x)
    ratios = checked_values(rows, "saturation_factor")
    if x.shape[-3] == 1:
        return x
    return blend(x, F.rgb_to_grayscale(x).to(working_dtype(x)), ratios)


def adjust_contrast(x: Tensor, rows: Arguments) -> Tensor:
    """Blends with the mean of the gray picture by `contrast_factor`.

    A mean over a batch may be summed in another order than one over a single picture, so uint8 can differ by one level.
    """
    check_channels(x)
    return blend(x, mean_gray(x), checked_values(rows, "contrast_factor"))


def mean_gray(x: Tensor) -> Tensor:
    """The mean of the gray picture, one number an image: (B, 1, 1, 1) or (B, T, 1, 1, 1)."""
    gray = (F.rgb_to_grayscale(x) if x.shape[-3] == 3 else x).to(working_dtype(x))
    return gray.mean(dim=(-3, -2, -1), keepdim=True)


def adjust_sharpness(x: Tensor, rows: Arguments) -> Tensor:
    """Blends the inner pixels with their 3 x 3 mean, of weight 5 in the middle and 1 around, by `sharpness_factor`.

    The thirteenths are summed by shifting, so that no convolution rounds to TF32; on integers this is exact, for a sum
    of thirteenths is never a tie.
    """
    height, width = x.shape[-2:]
    check_channels(x)
    ratios = checked_values(rows, "sharpness_factor")
    if x.numel() == 0 or height <= 2 or width <= 2:
        return x
    out = x.to(working_dtype(x), copy=True)
    core = out[..., 1:-1, 1:-1]
    across = (out[..., :-2] + out[..., 1:-1]).add_(out[..., 2:])
    blurred = (across[..., :-2, :] + across[..., 1:-1, :]).add_(across[..., 2:, :]).mul_(1 / 13)
    blurred.add_(core, alpha=4 / 13)
    if not x.is_floating_point():
        blurred.round_()
    core.addcmul_(blurred.sub_(core), per_sample([1.0 - ratio for ratio in ratios], x))
    return out.clamp_(0, _bound(x)).to(x.dtype)


def gaussian_blur(x: Tensor, rows: Arguments) -> Tensor:
    """Blurs with each row's `sigma`; one kernel size. Reflects at the border.

    Two one-dimensional passes, where torchvision convolves with their product: uint8 can differ by one level. Samples
    and channels are one axis of a depthwise convolution, which PyTorch runs without cuDNN, thus without TF32.
    """
    sizes = rows[0]["kernel_size"]
    across, down = (sizes, sizes) if isinstance(sizes, int) else sizes
    if not all(size % 2 == 1 and size > 0 for size in (across, down)):
        raise ValueError(f"kernel_size should have odd and positive integers. Got {sizes}")
    height, width = x.shape[-2:]
    dtype = working_dtype(x)
    sigmas = upload(distinct([_sigmas(row["sigma"], (across, down)) for row in rows]), x.device, dtype)
    flat = x.to(dtype).reshape(1, -1, height, width)
    planes = flat.shape[1]
    if planes == 1:  # not depthwise then: give it company
        flat = flat.expand(1, 2, -1, -1)
    out = nnf.pad(flat, [across // 2, across // 2, down // 2, down // 2], mode="reflect")
    for axis, size in ((0, across), (1, down)):
        weight = _gaussian(size, sigmas[:, axis : axis + 1]).unsqueeze(1)
        weight = weight.expand(-1, planes // len(x) if len(weight) > 1 else flat.shape[1], -1).reshape(-1, 1, 1, size)
        out = nnf.conv2d(out, weight if axis == 0 else weight.transpose(-1, -2), groups=flat.shape[1])
    out = out[:, :planes].view(x.shape)
    return out.to(x.dtype) if x.is_floating_point() else out.round_().to(x.dtype)


def _sigmas(sigma: Any, sizes: tuple[int, int]) -> list[float]:
    """(across, down); the default is OpenCV's for a kernel of that size."""
    if sigma is None:
        return [size * 0.15 + 0.35 for size in sizes]
    values = [float(sigma)] * 2 if isinstance(sigma, (int, float)) else [float(sigma[0]), float(sigma[-1])]
    if min(values) <= 0.0:
        raise ValueError(f"sigma should have positive values. Got {sigma}")
    return values


def _gaussian(size: int, sigmas: Tensor) -> Tensor:
    """(K, size) weights that sum to one, for `sigmas` (K, 1)."""
    reach = (size - 1) / (2.0 * math.sqrt(2.0))
    positions = torch.linspace(-reach, reach, size, device=sigmas.device, dtype=sigmas.dtype)
    return torch.softmax((positions / sigmas).pow(2).neg(), dim=-1)


def adjust_gamma(x: Tensor, rows: Arguments) -> Tensor:
    """Raises to the power `gamma`, on a scale of 0 to 1, and multiplies by `gain`."""
    scaled = x if x.is_floating_point() else F.to_dtype(x, torch.float32, scale=True)
    out = scaled.pow(per_sample(checked_values(rows, "gamma"), x))
    gains = [float(gain) for gain in rows.column("gain")]
    if any(gain != 1.0 for gain in gains):  # torchvision clamps only what it multiplies
        low, high = ([bound if gain != 1.0 else free for gain in gains] for bound, free in ((0.0, -INF), (1.0, INF)))
        out = out.mul_(per_sample(gains, x)).clamp_(per_sample(low, x), per_sample(high, x))
    result: Tensor = out.to(x.dtype) if x.is_floating_point() else F.to_dtype(out, x.dtype, scale=True)
    return result


def adjust_hue(x: Tensor, rows: Arguments) -> Tensor:
    """Turns the hue by `hue_factor` of a full circle, by way of HSV as Pillow's `Convert.c` defines it."""
    check_channels(x)
    factors = upload(checked_values(rows, "hue_factor", -0.5, 0.5), x.device).view(-1, *[1] * (x.ndim - 2))
    if x.shape[-3] == 1 or x.numel() == 0:
        return x
    hue, saturation, value = _hsv_from_rgb(F.to_dtype(x, torch.float32, scale=True))
    hue.add_(factors).remainder_(1.0)
    out: Tensor = F.to_dtype(_rgb_from_hsv(hue, saturation, value), x.dtype, scale=True)
    return out


def _hsv_from_rgb(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    red, green, _ = rgb.unbind(-3)
    low, high = torch.aminmax(rgb, dim=-3)
    spread = high - low
    gray = high == low  # hue and saturation are then 0 whatever they are divided by
    saturation = spread / high.masked_fill(gray, 1.0)
    distance = (high.unsqueeze(-3) - rgb).div_(spread.masked_fill_(gray, 1.0).unsqueeze(-3))
    to_red, to_green, to_blue = distance.unbind(-3)
    near_green = (to_red + 2.0).sub_(to_blue)
    near_blue = (to_green + 4.0).sub_(to_red)
    sixths = torch.where(high == red, to_blue - to_green, torch.where(high == green, near_green, near_blue))
    return sixths.mul_(1 / 6).add_(1.0).fmod_(1.0), saturation, high


def _rgb_from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    sixths = hue.mul_(6.0)
    sector = sixths.floor()
    partial = sixths.sub_(sector).mul_(saturation)
    rest = 1.0 - saturation
    falling = (1.0 - partial).mul_(value).clamp_(0.0, 1.0)
    rising = partial.add_(rest).mul_(value).clamp_(0.0, 1.0)
    least = rest.mul_(value).clamp_(0.0, 1.0)
    # red over the six sectors; green is red two sectors later, blue four
    red = torch.stack((value, falling, least, least, rising, value), dim=-3)
    at = sector.to(torch.int64)
    return red.gather(-3, torch.stack((at, at + 4, at + 2), dim=-3).remainder_(6))


def posterize(x: Tensor, rows: Arguments) -> Tensor:
    """Keeps the highest `bits` bits; on floating point, as many levels as they make."""
    bits = [int(value) for value in checked_values(rows, "bits", 0, 8)]
    if x.is_floating_point():
        levels = per_sample([1 << value for value in bits], x)
        steps = (x * levels).floor_().clamp_(min=0)
        return torch.minimum(steps, levels - 1).div_(levels).to(x.dtype)
    total = int(torch.iinfo(x.dtype).max).bit_length()
    masks = [((1 << kept) - 1) << (total - kept) if kept < total else -1 for kept in bits]
    return x & upload(masks, x.device, torch.int64).to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def solarize(x: Tensor, rows: Arguments) -> Tensor:
    """Inverts what is at least `threshold`."""
    thresholds = checked_values(rows, "threshold", float("-inf"), _bound(x))
    return torch.where(x >= per_sample(thresholds, x), F.invert(x), x)


def permute_channels(x: Tensor, rows: Arguments) -> Tensor:
    """Channel c of the result is channel ``permutation[c]``."""
    orders = [list(row["permutation"]) for row in rows]
    if any(sorted(order) != list(range(x.shape[-3])) for order in orders):
        raise ValueError(f"permutation must order the {x.shape[-3]} channels, got {orders}.")
    index = upload(orders, x.device, torch.int64).view(len(rows), *[1] * (x.ndim - 4), -1, 1, 1)
    return x.gather(-3, index.expand(x.shape))


def normalize(x: Tensor, rows: Arguments) -> Tensor:
    """Subtracts `mean` and divides by `std`, which are the same for all."""
    return _normalize(x, rows, inplace=False)


def normalize_(x: Tensor, rows: Arguments) -> Tensor:
    """The same in `x` itself: the batch is large, and memory that is new costs as much as the arithmetic."""
    return _normalize(x, rows, inplace=True)


def _normalize(x: Tensor, rows: Arguments, *, inplace: bool) -> Tensor:
    mean, std = rows.shared["mean"], rows.shared["std"]
    if not (all(std) if isinstance(std, (list, tuple)) else std):
        raise ValueError(f"std evaluated to zero, leading to division by zero: {std}.")
    dtype = x.dtype if x.is_floating_point() else torch.float32
    # as tensors that are on the device already: torchvision would copy the lists and wait
    out: Tensor = F.normalize(x, upload(mean, x.device, dtype), upload(std, x.device, dtype), inplace)
    return out


def gaussian_noise(x: Tensor, rows: Arguments) -> Tensor:
    """Adds noise of `mean` and `sigma`, drawn on the CPU from each row's `seed`: the same on every device."""
    sigmas = checked_values(rows, "sigma")
    means = [float(mean) for mean in rows.column("mean")]
    if not (x.is_floating_point() or x.dtype == torch.uint8):
        raise ValueError(f"Input tensor is expected to be in uint8 or float dtype, got dtype={x.dtype}")
    dtype = x.dtype if x.is_floating_point() else torch.float32
    noise = torch.empty(x.shape, dtype=dtype)
    for item, row in zip(noise, rows, strict=True):
        item.normal_(generator=torch.Generator().manual_seed(row["seed"]))
    noise = noise.to(x.device, non_blocking=True)
    if x.is_floating_point():
        out = x + (noise * per_sample(sigmas, x) + per_sample(means, x))
        return (out.clamp_(0, 1) if rows[0]["clip"] else out).to(x.dtype)
    noise.mul_(per_sample([sigma * 255 for sigma in sigmas], x)).add_(per_sample([mean * 255 for mean in means], x))
    shifted = noise.to(torch.int16).add_(x)
    return (shifted.clamp_(0, 255) if rows[0]["clip"] else shifted).to(x.dtype)


def jpeg(x: Tensor, rows: Arguments) -> Tensor:
    """Compresses with `quality` and decompresses, item by item on the CPU: this one waits for the device."""
    host = x.cpu().contiguous()
    coded = [F.jpeg(item, quality=row["quality"]) for item, row in zip(host, rows, strict=True)]
    return torch.stack(coded).to(x.device, non_blocking=True)
