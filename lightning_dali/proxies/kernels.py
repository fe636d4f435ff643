"""torchvision's functionals on a proxy: they record instead of compute.

Runs in the worker. `register(proxy_class)` gives every image functional of `torchvision.transforms.v2.functional` a kernel
for the proxy through torchvision's public `register_kernel`. A kernel needs to know one thing: the shape (and dtype) that
the result would have. The output sizes follow torchvision's documentation of each functional and are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies.calls import bind
from lightning_dali.proxies.sizes import Size, five_crop_boxes, pad_size, pair, pil_rotation, resized_size

Kwargs = Mapping[str, Any]


def _rotate_size(old: Size, kwargs: Kwargs) -> Size:
    if not kwargs.get("expand", False):
        return old
    kwargs = dict(kwargs)
    if kwargs.pop("_pil", False):
        return pil_rotation(old, kwargs["angle"], kwargs.get("center"), True)[1]
    # torchvision sizes the canvas itself; a meta tensor asks it without touching pixels
    out = F.rotate(torch.empty((1, *old), device="meta"), **{**kwargs, "fill": None})
    return int(out.shape[-2]), int(out.shape[-1])


_SIZES: dict[str, Callable[[Size, Kwargs], Size]] = {
    "resize": lambda old, kw: resized_size(old, kw["size"], kw.get("max_size")),
    "resized_crop": lambda old, kw: resized_size((kw["height"], kw["width"]), kw["size"]),
    "crop": lambda old, kw: (int(kw["height"]), int(kw["width"])),
    "center_crop": lambda old, kw: pair(kw["output_size"]),
    "pad": pad_size,
    "rotate": _rotate_size,
}
_CHANNELS: dict[str, Callable[[Kwargs], int]] = {
    "rgb_to_grayscale": lambda kw: int(kw.get("num_output_channels", 1)),
    "grayscale_to_rgb": lambda kw: 3,
}
_SAME_SHAPE = (
    "erase", "jpeg", "adjust_brightness", "adjust_contrast", "adjust_gamma", "adjust_hue", "adjust_saturation",
    "adjust_sharpness", "autocontrast", "equalize", "invert", "permute_channels", "posterize", "solarize", "affine",
    "elastic", "horizontal_flip", "vertical_flip", "perspective", "gaussian_blur", "gaussian_noise", "normalize",
    "to_dtype",
)  # fmt: skip


_PLAIN = frozenset({int, float, bool, str, type(None), F.InterpolationMode})


_FEW = 16


def plain(value: Any) -> Any:
    """Arguments as plain numbers, so that they pickle small and compare."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) and value.ndim < 2 and value.numel() <= _FEW:
        return value.tolist()  # a mean and a std may be given as tensors
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


_WARPS = frozenset({"affine", "rotate", "perspective", "elastic"})
_RESIZES = frozenset({"resize", "resized_crop"})


_NUMBERS: dict[Any, str] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def _filter_name(interpolation: Any) -> str:
    """torchvision's name of a filter, given as an enum, a name or Pillow's number."""
    if isinstance(interpolation, F.InterpolationMode):
        return str(interpolation.value)
    return _NUMBERS.get(interpolation, str(interpolation))


def runs_on_device(name: str, kwargs: Kwargs) -> bool:
    """Whether the device has the filter: Pillow's other ones (Lanczos, box, Hamming, bicubic warps) are Pillow's alone."""
    if "interpolation" not in kwargs or not (name in _WARPS or name in _RESIZES):
        return True
    filters = ("nearest", "bilinear") if name in _WARPS else ("nearest", "nearest-exact", "bilinear", "bicubic")
    return _filter_name(kwargs["interpolation"]) in filters


def _recorder(name: str) -> Callable[..., Any]:
    functional = getattr(F, name)
    size_of, channels_of = _SIZES.get(name), _CHANNELS.get(name)

    def kernel(inpt: Any, *args: Any, **kwargs: Any) -> Any:
        bound = {key: plain(value) for key, value in bind(functional, args, kwargs).items()}
        bound.pop("inplace", None)
        if not runs_on_device(name, bound):
            return functional(inpt.materialise(), *args, **kwargs)
        shape: Sequence[int] = inpt.shape
        *lead, channels, height, width = shape
        if size_of is not None:
            height, width = size_of((height, width), {**bound, "_pil": getattr(inpt, "meets_pil", False)})
        if channels_of is not None:
            channels = channels_of(bound)
        return inpt.record(name, bound, shape=(*lead, channels, height, width))

    return kernel


def _to_dtype(inpt: Any, dtype: torch.dtype = torch.float32, scale: bool = False) -> Any:
    if dtype == inpt.dtype:
        return inpt
    return inpt.record("to_dtype", {"dtype": dtype, "scale": scale}, dtype=dtype)


def _normalize(inpt: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    if getattr(inpt, "meets_pil", False):
        # Someone took the proxy, which is a tensor, for converted already (timm's MaybeToTensor): convert it now.
        inpt = F.to_dtype(inpt.record("to_image", {}), torch.float32, scale=True)
    if not inpt.dtype.is_floating_point:
        raise TypeError(f"Input tensor should be a float tensor. Got {inpt.dtype}.")
    return inpt.record("normalize", {"mean": plain(mean), "std": plain(std)})


def _gaussian_noise(inpt: Any, mean: float = 0.0, sigma: float = 0.1, clip: bool = True) -> Any:
    if not inpt.dtype.is_floating_point and inpt.dtype != torch.uint8:
        raise ValueError(f"Input tensor is expected to be in uint8 or float dtype, got dtype={inpt.dtype}")
    seed = int(torch.randint(2**62, ()))  # the draw travels, not the noise
    return inpt.record("gaussian_noise", {"mean": mean, "sigma": sigma, "clip": clip, "seed": seed})


def _five_crop(inpt: Any, size: Any) -> tuple[Any, ...]:
    boxes = five_crop_boxes((inpt.shape[-2], inpt.shape[-1]), size)
    return tuple(F.crop(inpt, *box) for box in boxes)


def _ten_crop(inpt: Any, size: Any, vertical_flip: bool = False) -> tuple[Any, ...]:
    flip = F.vertical_flip if vertical_flip else F.horizontal_flip
    return _five_crop(inpt, size) + _five_crop(flip(inpt), size)


def _needs_pixels(name: str) -> Callable[..., Any]:
    functional = getattr(F, name)

    def kernel(inpt: Any, *args: Any, **kwargs: Any) -> Any:
        return functional(inpt.materialise(name), *args, **kwargs)

    return kernel


def register(proxy: type, *, kind: str = "image", own: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Gives every functional that has a kernel for `kind` a recording kernel for `proxy`.

    Args:
        proxy: A subclass of `tv_tensors.Image` or `tv_tensors.Video` with a `record` method.
        kind: torchvision's suffix of its kernels: ``"image"`` or ``"video"``.
        own: Kernels by functional's name that are this proxy's alone.
    """
    special: dict[str, Callable[..., Any]] = {
        "to_dtype": _to_dtype,
        "gaussian_noise": _gaussian_noise,
        "normalize": _normalize,
        "five_crop": _five_crop,
        "ten_crop": _ten_crop,
        **(own or {}),
    }
    for name in sorted(vars(F)):
        if name.startswith(("get_", "_")) or (not hasattr(F, f"{name}_{kind}") and name not in ("resize",)):
            continue
        if name in special:
            kernel = special[name]
        elif name in _SIZES or name in _CHANNELS or name in _SAME_SHAPE:
            kernel = _recorder(name)
        else:  # a functional newer than this table: right, if slower
            kernel = _needs_pixels(name)
        F.register_kernel(getattr(F, name), proxy)(kernel)
