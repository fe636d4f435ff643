"""The functionals that the device runs: their names, which of them share a kernel, and what may differ between samples.

The worker plans with this, the rank runs by it (`graph.tail`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import color, geometry, levels, pillow
from lightning_dali.graph.arguments import Arguments
from lightning_dali.proxies.calls import SharedArguments

Kwargs = Mapping[str, Any]
Kernel = Callable[[Tensor, Arguments], Tensor]
Key = tuple[Any, ...]
"""What samples must share to run together; first the functional that runs."""


class Batched(NamedTuple):
    """How a functional runs on samples whose arguments differ."""

    kernel: Kernel
    """Of `x` and the arguments of its samples."""
    per_sample: Set[str] = frozenset()
    """The arguments that may differ."""
    equal: bool = False
    """Whether torchvision's kernel is as good for equal arguments: it does not wait for the device."""


def _alike(functional: Callable[..., Tensor]) -> Kernel:
    """A kernel of torchvision's that takes no arguments."""
    return lambda x, rows: functional(x)


BATCHED = {
    "adjust_brightness": Batched(color.adjust_brightness, {"brightness_factor"}, equal=True),
    "adjust_contrast": Batched(color.adjust_contrast, {"contrast_factor"}, equal=True),
    "adjust_gamma": Batched(color.adjust_gamma, {"gamma", "gain"}, equal=True),
    "adjust_hue": Batched(color.adjust_hue, {"hue_factor"}, equal=True),
    "adjust_saturation": Batched(color.adjust_saturation, {"saturation_factor"}, equal=True),
    "adjust_sharpness": Batched(color.adjust_sharpness, {"sharpness_factor"}),
    "gaussian_blur": Batched(color.gaussian_blur, {"sigma"}),
    "gaussian_noise": Batched(color.gaussian_noise, {"mean", "sigma", "seed"}),
    "jpeg": Batched(color.jpeg, {"quality"}),
    "normalize": Batched(color.normalize),
    "permute_channels": Batched(color.permute_channels, {"permutation"}),
    "posterize": Batched(color.posterize, {"bits"}, equal=True),
    "solarize": Batched(color.solarize, {"threshold"}, equal=True),
    "affine": Batched(geometry.warp, {"angle", "translate", "scale", "shear", "center"}),
    "crop": Batched(geometry.crop, {"top", "left"}, equal=True),
    "elastic": Batched(geometry.elastic, {"displacement"}),
    "erase": Batched(geometry.erase, {"i", "j", "h", "w", "v", "inplace"}),
    "pad": Batched(geometry.pad),
    "perspective": Batched(geometry.perspective, {"startpoints", "endpoints", "coefficients"}),
    "resized_crop": Batched(geometry.resized_crop, {"top", "left"}, equal=True),
    "rotate": Batched(geometry.rotate, {"angle", "center"}),
    "warp": Batched(geometry.warp, {"angle", "translate", "scale", "shear", "center", "expand", "_call"}),
}
# What meets a PIL image (graph.pillow). Functionals that are not here compute the same for both.
_PILLOW = {
    "adjust_brightness": Batched(pillow.adjust_brightness, {"brightness_factor"}),
    "adjust_contrast": Batched(pillow.adjust_contrast, {"contrast_factor"}),
    "adjust_gamma": Batched(pillow.adjust_gamma, {"gamma", "gain"}),
    "adjust_hue": Batched(pillow.adjust_hue, {"hue_factor"}),
    "adjust_saturation": Batched(pillow.adjust_saturation, {"saturation_factor"}),
    "adjust_sharpness": Batched(color.adjust_sharpness, {"sharpness_factor"}),
    "posterize": Batched(color.posterize, {"bits"}),
    "solarize": Batched(color.solarize, {"threshold"}),
    "invert": Batched(_alike(F.invert)),
    "autocontrast": Batched(_alike(F.autocontrast)),
    "equalize": Batched(_alike(F.equalize)),
    "rgb_to_grayscale": Batched(pillow.rgb_to_grayscale),
    "affine": Batched(pillow.warp, {"angle", "translate", "scale", "shear", "center"}),
    "rotate": Batched(pillow.warp, {"angle", "center"}),
    "perspective": Batched(pillow.perspective, {"startpoints", "endpoints", "coefficients"}),
    "resize": Batched(pillow.resize),
    "resized_crop": Batched(pillow.resized_crop, {"top", "left"}),
    "warp": Batched(pillow.warp, {"angle", "translate", "scale", "shear", "center", "expand", "_call"}),
}
PILLOW = "_pil"
"""Ends the name of a functional that meets a PIL image, as in torchvision's own kernels."""
BATCHED |= {f"{name}{PILLOW}": batched for name, batched in _PILLOW.items()}
LEVELS = "levels"
BATCHED[LEVELS] = Batched(
    levels.levels, {"_call", "brightness_factor", "contrast_factor", "bits", "threshold", "gamma", "gain"}
)
_WARPS = ("warp", f"warp{PILLOW}")
_FAMILIES = (*_WARPS, LEVELS)
"""Kernels for several functionals, each sample's own under ``_call``."""


def pillow_name(name: str) -> str:
    """What a functional is called that meets a PIL image: its own name where the arithmetic is the same."""
    return f"{name}{PILLOW}" if name in _PILLOW else name


_REFUSED = {
    "five_crop": "gives five images: record five crops",
    "ten_crop": "gives ten images: record ten crops",
    "pil_to_tensor": "takes a PIL image",
    "to_pil_image": "gives a PIL image",
    "to_tensor": "takes a PIL image or an array: record to_image and to_dtype",
    "is_pure_tensor": "tells a type",
    "register_kernel": "registers a kernel",
}
_EXTRA = {"gaussian_noise": {"seed": inspect.Parameter.empty}}  # the draw travels, not the noise


@functools.cache
def canonical_name(name: str) -> str:
    """The functional's own name: aliases (``hflip``) and image kernels (``resize_video``) give their functional's.

    Raises:
        ValueError: If `name` is no functional that makes one image from one image.
    """
    if name in _FAMILIES:
        return name
    if name.endswith(PILLOW) and not hasattr(F, name):
        plain = canonical_name(name.removesuffix(PILLOW))
        return f"{plain}{PILLOW}" if plain in _PILLOW else plain
    functional = getattr(F, name, None)
    if not inspect.isfunction(functional) or name.startswith("_"):
        raise ValueError(f"{name!r} is no functional of torchvision.transforms.v2.functional.")
    base = name.removesuffix("_image").removesuffix("_video")
    name = base if base != name and hasattr(F, base) else functional.__name__
    reason = _REFUSED.get(name)
    if name.startswith("get_"):
        reason = "gives numbers, not an image"
    elif name.endswith(("_bounding_boxes", "_bounding_box_format", "_keypoints", "_mask")):
        reason = "takes no image, and torchvision runs it in the worker"
    if reason is not None:
        raise ValueError(f"{name!r} cannot run on a batch of images: it {reason}.")
    return name


@functools.cache
def defaults(name: str) -> dict[str, Any]:
    """The functional's arguments after the image; `inspect.Parameter.empty` where there is no default."""
    parameters = list(inspect.signature(getattr(F, name.removesuffix(PILLOW))).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters} | _EXTRA.get(name, {})


def _bind(name: str, kwargs: Kwargs) -> dict[str, Any]:
    """Fills in torchvision's defaults.

    Raises:
        TypeError: If an argument is missing or unknown.
    """
    if name in _FAMILIES:
        return {**_bind(kwargs["_call"], {k: v for k, v in kwargs.items() if k != "_call"}), "_call": kwargs["_call"]}
    known = defaults(name)
    row = {**known, **kwargs}
    missing = [key for key, value in row.items() if value is inspect.Parameter.empty]
    if missing or len(row) != len(known):
        unknown = sorted(row.keys() - known.keys())
        raise TypeError(f"{name}() lacks arguments {missing} or does not take {unknown}; it takes {list(known)}.")
    if name == "erase" and isinstance(row["v"], Tensor) and row["v"].ndim in (0, 3) and row["v"].shape[1:].numel() == 1:
        row["v"] = row["v"].flatten().tolist()  # a colour: numbers travel lighter than a tensor
    return row


class _Same:
    """Makes an argument hashable that has no hash of its own: equal to itself only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _frozen(value[key])) for key in sorted(value))
    if isinstance(value, Tensor) or not isinstance(value, Hashable):
        return _Same(value)
    return value


def parameters(name: str) -> frozenset[str]:
    """The arguments that a functional takes after the image."""
    return frozenset(defaults(canonical_name(name)))


def per_sample_params(name: str) -> frozenset[str]:
    """The arguments that may differ between samples of one batched group; all others are part of its key (`bound_call`)."""
    batched = BATCHED.get(canonical_name(name))
    return frozenset(batched.per_sample) if batched is not None else frozenset()


def merge_family(name: str) -> str:
    """The family's name for functionals that may share a kernel (with their own name under ``_call``), else `name`."""
    name = canonical_name(name)
    if name in levels.CALLS:
        return LEVELS
    kind = PILLOW if name.endswith(PILLOW) else ""
    return f"warp{kind}" if name.removesuffix(PILLOW) in ("affine", "rotate") else name


def bound_call(name: str, kwargs: Kwargs) -> tuple[Key, dict[str, Any]]:
    """A call's key, and its arguments with torchvision's defaults filled in: what `plan.plan_tail` needs.

    Args:
        name: A functional's name, or a family's with the functional's name in ``kwargs["_call"]``.
        kwargs: Its arguments after the image.
    """
    if isinstance(kwargs, SharedArguments):
        known = kwargs.made.get(("bound", name))
        if known is None:
            known = kwargs.made["bound", name] = bound_call(name, dict(kwargs))
        return known
    name = canonical_name(name)
    row = _bind(name, kwargs)
    key = _row_key(name, row)
    if key[0] != name:
        row.pop("_call", None)  # it is not run with its family
    return key, row


def _row_key(name: str, row: Kwargs) -> Key:
    if row.get("_call", name) == "rotate" and (row["expand"] or (row["center"] is None and row["angle"] % 90 == 0)):
        # another size, or pixels are only moved: alone
        return ("rotate", *(_frozen(row[key]) for key in ("angle", "interpolation", "expand", "center", "fill")))
    if row.get("_call", name) == f"rotate{PILLOW}" and row["expand"]:  # another size: alone
        return (
            f"rotate{PILLOW}",
            *(_frozen(row[key]) for key in ("angle", "interpolation", "expand", "center", "fill")),
        )
    free = per_sample_params(name)
    return (name, *((key, _frozen(row[key])) for key in sorted(row) if key not in free))


def arguments(name: str, rows: Sequence[Kwargs]) -> Arguments:
    """Bound calls of one key, as the functional's kernel takes them."""
    return Arguments.of(rows, per_sample_params(name))
