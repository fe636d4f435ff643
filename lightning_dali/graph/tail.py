"""Recorded calls that DALI does not do, run by torchvision's arithmetic on the whole batch. Runs in the rank process.

`apply_call(name, x, kwargs)` equals ``torch.stack([F.<name>(x[i], **kwargs[i]) for i in range(len(x))])`` of
torchvision's tensor kernels, in a few kernel launches. Three ways, chosen by `_BATCHED`:

- a functional listed there has a kernel of ours (`graph.color`, `graph.geometry`), which takes arguments that differ;
- where torchvision's own kernel serves equal arguments as well (``equal=True``), it is called once for them;
- any other functional is called once for all samples with equal arguments (torchvision's kernels take a batch).

Samples that fit none together are run group by group. `group_key`, which the worker uses too, says what fits together.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import color, geometry

Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class _Batched:
    """How a functional runs on samples whose arguments differ."""

    kernel: Callable[[Tensor, Sequence[Kwargs]], Tensor]
    """Of `x` and one mapping of arguments a sample."""
    per_sample: frozenset[str] = frozenset()
    """The arguments that may differ."""
    equal: bool = False
    """Whether torchvision's kernel is as good for equal arguments: it does not wait for the device."""


def _batched(kernel: Callable[[Tensor, Sequence[Kwargs]], Tensor], *per_sample: str, equal: bool = False) -> _Batched:
    return _Batched(kernel, frozenset(per_sample), equal)


_BATCHED = {
    "adjust_brightness": _batched(color.adjust_brightness, "brightness_factor", equal=True),
    "adjust_contrast": _batched(color.adjust_contrast, "contrast_factor", equal=True),
    "adjust_gamma": _batched(color.adjust_gamma, "gamma", equal=True),
    "adjust_hue": _batched(color.adjust_hue, "hue_factor", equal=True),
    "adjust_saturation": _batched(color.adjust_saturation, "saturation_factor", equal=True),
    "adjust_sharpness": _batched(color.adjust_sharpness, "sharpness_factor"),
    "gaussian_blur": _batched(color.gaussian_blur, "sigma"),
    "gaussian_noise": _batched(color.gaussian_noise, "mean", "sigma", "seed"),
    "jpeg": _batched(color.jpeg, "quality"),
    "normalize": _batched(color.normalize),
    "permute_channels": _batched(color.permute_channels, "permutation"),
    "posterize": _batched(color.posterize, "bits", equal=True),
    "solarize": _batched(color.solarize, "threshold", equal=True),
    "to_image": _batched(lambda x, rows: x),
    "affine": _batched(geometry.warp, "angle", "translate", "scale", "shear", "center"),
    "crop": _batched(geometry.crop, "top", "left", equal=True),
    "elastic": _batched(geometry.elastic, "displacement"),
    "erase": _batched(geometry.erase, "i", "j", "h", "w", "v", "inplace"),
    "pad": _batched(geometry.pad),
    "perspective": _batched(geometry.perspective, "startpoints", "endpoints", "coefficients"),
    "resized_crop": _batched(geometry.resized_crop, "top", "left", equal=True),
    "rotate": _batched(geometry.rotate, "angle", "center"),
    "warp": _batched(geometry.warp, "angle", "translate", "scale", "shear", "center", "expand", "_call"),
}
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
    functional = getattr(F, name, None)
    if name == "warp":
        return name
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
def _defaults(name: str) -> dict[str, Any]:
    """The functional's arguments after the image; `inspect.Parameter.empty` where there is no default."""
    parameters = list(inspect.signature(getattr(F, name)).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters} | _EXTRA.get(name, {})


def _bind(name: str, kwargs: Kwargs) -> dict[str, Any]:
    """Fills in torchvision's defaults.

    Raises:
        TypeError: If an argument is missing or unknown.
    """
    if name == "warp":
        return {**_bind(kwargs["_call"], {k: v for k, v in kwargs.items() if k != "_call"}), "_call": kwargs["_call"]}
    defaults = _defaults(name)
    row = {**defaults, **kwargs}
    missing = [key for key, value in row.items() if value is inspect.Parameter.empty]
    if missing or len(row) != len(defaults):
        unknown = sorted(row.keys() - defaults.keys())
        raise TypeError(f"{name}() lacks arguments {missing} or does not take {unknown}; it takes {list(defaults)}.")
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


def per_sample_params(name: str) -> frozenset[str]:
    """The arguments that may differ between samples of one batched group; all others are part of `group_key`."""
    batched = _BATCHED.get(canonical_name(name))
    return batched.per_sample if batched is not None else frozenset()


def merge_family(name: str) -> str:
    """``"warp"`` for functionals that may share one warp (with their own name under ``_call``), else `name`."""
    name = canonical_name(name)
    return "warp" if name in ("affine", "rotate") else name


def group_key(name: str, kwargs: Kwargs) -> Hashable:
    """Samples whose keys are equal run together. Its first element is the functional that runs.

    Args:
        name: A functional's name, or ``"warp"`` with the functional's name in ``kwargs["_call"]``.
        kwargs: Its arguments after the image.
    """
    name = canonical_name(name)
    return _row_key(name, _bind(name, kwargs))


def _row_key(name: str, row: Kwargs) -> tuple[Hashable, ...]:
    if row.get("_call", name) == "rotate" and (row["expand"] or (row["center"] is None and row["angle"] % 90 == 0)):
        # another size, or pixels are only moved: alone
        return ("rotate", *(_frozen(row[key]) for key in ("angle", "interpolation", "expand", "center", "fill")))
    free = per_sample_params(name)
    return (name, *((key, _frozen(row[key])) for key in sorted(row) if key not in free))


def apply_call(name: str, x: Tensor, kwargs: Sequence[Kwargs]) -> Tensor:
    """Runs one functional on every sample of a batch, each with its own arguments.

    Args:
        name: A functional of `torchvision.transforms.v2.functional`, or ``"warp"`` (`merge_family`).
        x: (B, C, H, W) or (B, T, C, H, W), uint8 or floating point, on any device. It is not changed; the result may
            share its memory.
        kwargs: For each sample the arguments after the image, as torchvision takes them; one mapping stands for all.
            `gaussian_noise` takes a `seed` besides.

    Raises:
        TypeError: If an argument is missing or unknown.
        ValueError: If the functional cannot run on images, an argument is out of range, or sizes would differ.
    """
    name = canonical_name(name)
    if len(kwargs) not in (1, len(x)):
        raise ValueError(f"{name} needs arguments for each of {len(x)} samples or one for all, got {len(kwargs)}.")
    if len(x) == 0:
        return x
    rows = [_bind(name, one) for one in kwargs]
    if len(rows) == 1:
        return _apply_group(_row_key(name, rows[0]), x, rows * len(x))
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_row_key(name, row), []).append(i)
    if len(groups) == 1:
        return _apply_group(next(iter(groups)), x, rows)
    return _apply_groups(name, x, rows, groups)


def _apply_group(key: Any, x: Tensor, rows: Sequence[Kwargs]) -> Tensor:
    """Runs samples of one key."""
    name = key[0]
    if name == "uniform_temporal_subsample" and x.ndim != 5:
        raise ValueError(f"{name} takes clips (B, T, C, H, W), got {tuple(x.shape)}.")
    if "_call" in rows[0] and name != "warp":
        rows = [{key: value for key, value in row.items() if key != "_call"} for row in rows]
    batched = _BATCHED.get(name)
    if batched is not None and not (batched.equal and all(row == rows[0] for row in rows)):
        return batched.kernel(x, rows)
    out: Tensor = getattr(F, name)(x, **rows[0])
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True))
    return out.contiguous() if overlaps else out


def _apply_groups(name: str, x: Tensor, rows: Sequence[Kwargs], groups: Mapping[Hashable, list[int]]) -> Tensor:
    """Runs group by group and puts the results in the samples' order."""
    out: Tensor | None = None
    for key, members in groups.items():
        first = members[0]
        alone = len(members) == 1
        index = None if alone else color.upload(members, x.device, torch.int64)
        part = _apply_group(key, x[first : first + 1] if index is None else x[index], [rows[i] for i in members])
        if out is None:
            out = part.new_empty((len(x), *part.shape[1:]))
        if (part.shape[1:], part.dtype) != (out.shape[1:], out.dtype):
            raise ValueError(
                f"{name} gives samples of {tuple(out.shape[1:])} {out.dtype} and of {tuple(part.shape[1:])} "
                f"{part.dtype}, which make no batch: use apply_ragged."
            )
        if index is None:
            out[first] = part[0]
        else:
            out[index] = part
    assert out is not None
    return out


def apply_ragged(name: str, xs: Sequence[Tensor], kwargs: Sequence[Kwargs]) -> list[Tensor]:
    """`apply_call` item by item, where sizes differ before or after.

    Args:
        name: As in `apply_call`.
        xs: Items (C, H, W) or (T, C, H, W).
        kwargs: One mapping an item; one alone stands for all.
    """
    if len(kwargs) not in (1, len(xs)):
        raise ValueError(f"{name} needs arguments for each of {len(xs)} samples or one for all, got {len(kwargs)}.")
    each = list(kwargs) * len(xs) if len(kwargs) == 1 and len(xs) != 1 else kwargs
    return [apply_call(name, x.unsqueeze(0), [one]).squeeze(0) for x, one in zip(xs, each, strict=True)]
