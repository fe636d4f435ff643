"""Recorded calls that DALI does not do, run by torchvision's arithmetic on the whole batch. Runs in the rank process.

`apply_call(name, x, kwargs)` equals ``torch.stack([F.<name>(x[i], **kwargs[i]) for i in range(len(x))])`` of
torchvision's tensor kernels, in a few kernel launches. Three ways, chosen by `_BATCHED`:

- a functional listed there has a kernel of ours (`graph.color`, `graph.geometry`), which takes arguments that differ;
- where torchvision's own kernel serves equal arguments as well (``equal=True``), it is called once for them;
- any other functional is called once for all samples with equal arguments (torchvision's kernels take a batch).

Samples that fit none together are run group by group. `group_key`, which the worker uses too, says what fits together.
"""

# Over 300 lines: a table of functionals, a few lines each.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import color, geometry, pillow

Kwargs = Mapping[str, Any]
Kernel = Callable[[Tensor, Sequence[Kwargs]], Tensor]


class _Batched(NamedTuple):
    """How a functional runs on samples whose arguments differ."""

    kernel: Kernel
    """Of `x` and one mapping of arguments a sample."""
    per_sample: Set[str] = frozenset()
    """The arguments that may differ."""
    equal: bool = False
    """Whether torchvision's kernel is as good for equal arguments: it does not wait for the device."""


_BATCHED = {
    "adjust_brightness": _Batched(color.adjust_brightness, {"brightness_factor"}, equal=True),
    "adjust_contrast": _Batched(color.adjust_contrast, {"contrast_factor"}, equal=True),
    "adjust_gamma": _Batched(color.adjust_gamma, {"gamma"}, equal=True),
    "adjust_hue": _Batched(color.adjust_hue, {"hue_factor"}, equal=True),
    "adjust_saturation": _Batched(color.adjust_saturation, {"saturation_factor"}, equal=True),
    "adjust_sharpness": _Batched(color.adjust_sharpness, {"sharpness_factor"}),
    "gaussian_blur": _Batched(color.gaussian_blur, {"sigma"}),
    "gaussian_noise": _Batched(color.gaussian_noise, {"mean", "sigma", "seed"}),
    "jpeg": _Batched(color.jpeg, {"quality"}),
    "normalize": _Batched(color.normalize),
    "permute_channels": _Batched(color.permute_channels, {"permutation"}),
    "posterize": _Batched(color.posterize, {"bits"}, equal=True),
    "solarize": _Batched(color.solarize, {"threshold"}, equal=True),
    "affine": _Batched(geometry.warp, {"angle", "translate", "scale", "shear", "center"}),
    "crop": _Batched(geometry.crop, {"top", "left"}, equal=True),
    "elastic": _Batched(geometry.elastic, {"displacement"}),
    "erase": _Batched(geometry.erase, {"i", "j", "h", "w", "v", "inplace"}),
    "pad": _Batched(geometry.pad),
    "perspective": _Batched(geometry.perspective, {"startpoints", "endpoints", "coefficients"}),
    "resized_crop": _Batched(geometry.resized_crop, {"top", "left"}, equal=True),
    "rotate": _Batched(geometry.rotate, {"angle", "center"}),
    "warp": _Batched(geometry.warp, {"angle", "translate", "scale", "shear", "center", "expand", "_call"}),
}
# What meets a PIL image (graph.pillow). Functionals that are not here compute the same for both.
_PILLOW = {
    "adjust_brightness": _Batched(pillow.adjust_brightness, {"brightness_factor"}),
    "adjust_contrast": _Batched(pillow.adjust_contrast, {"contrast_factor"}),
    "adjust_gamma": _Batched(pillow.adjust_gamma, {"gamma", "gain"}),
    "adjust_hue": _Batched(pillow.adjust_hue, {"hue_factor"}),
    "adjust_saturation": _Batched(pillow.adjust_saturation, {"saturation_factor"}),
    "rgb_to_grayscale": _Batched(pillow.rgb_to_grayscale),
    "affine": _Batched(pillow.warp, {"angle", "translate", "scale", "shear", "center"}),
    "rotate": _Batched(pillow.warp, {"angle", "center"}),
    "perspective": _Batched(pillow.perspective, {"startpoints", "endpoints", "coefficients"}),
    "resize": _Batched(pillow.resize),
    "resized_crop": _Batched(pillow.resized_crop, {"top", "left"}),
    "warp": _Batched(pillow.warp, {"angle", "translate", "scale", "shear", "center", "expand", "_call"}),
}
PILLOW = "_pil"
"""Ends the name of a functional that meets a PIL image, as in torchvision's own kernels."""
_BATCHED |= {f"{name}{PILLOW}": batched for name, batched in _PILLOW.items()}
_WARPS = ("warp", f"warp{PILLOW}")


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
_CHUNK_VALUES = 2**19
"""Three images of 224 x 224: contrast then takes a third, hue two thirds of the CPU time that a batch of 32 takes."""
_EXTRA = {"gaussian_noise": {"seed": inspect.Parameter.empty}}  # the draw travels, not the noise


@functools.cache
def canonical_name(name: str) -> str:
    """The functional's own name: aliases (``hflip``) and image kernels (``resize_video``) give their functional's.

    Raises:
        ValueError: If `name` is no functional that makes one image from one image.
    """
    if name in _WARPS:
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
def _defaults(name: str) -> dict[str, Any]:
    """The functional's arguments after the image; `inspect.Parameter.empty` where there is no default."""
    parameters = list(inspect.signature(getattr(F, name.removesuffix(PILLOW))).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters} | _EXTRA.get(name, {})


def _bind(name: str, kwargs: Kwargs) -> dict[str, Any]:
    """Fills in torchvision's defaults.

    Raises:
        TypeError: If an argument is missing or unknown.
    """
    if name in _WARPS:
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
    return frozenset(batched.per_sample) if batched is not None else frozenset()


def merge_family(name: str) -> str:
    """``"warp"`` for functionals that may share one warp (with their own name under ``_call``), else `name`."""
    name = canonical_name(name)
    kind = PILLOW if name.endswith(PILLOW) else ""
    return f"warp{kind}" if name.removesuffix(PILLOW) in ("affine", "rotate") else name


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
    if row.get("_call", name) == f"rotate{PILLOW}" and row["expand"]:  # another size: alone
        return (
            f"rotate{PILLOW}",
            *(_frozen(row[key]) for key in ("angle", "interpolation", "expand", "center", "fill")),
        )
    free = per_sample_params(name)
    return (name, *((key, _frozen(row[key])) for key in sorted(row) if key not in free))


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
    name = canonical_name(name)
    if len(x) == 0:
        return x
    rows = [_bind(name, one) for one in kwargs]
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_row_key(name, row), []).append(i)
    each = _for_each(name, rows, len(x))
    if len(groups) == 1:
        return _apply_group(next(iter(groups)), x, each)
    return _apply_groups(name, x, each, groups)


def apply_alike(name: str, x: Tensor, kwargs: Sequence[Kwargs]) -> Tensor:
    """`apply_call` for samples of one `group_key`, as `plan.plan_tail` puts them together: nothing is grouped again."""
    name = canonical_name(name)
    rows = [_bind(name, one) for one in kwargs]
    return _apply_group(_row_key(name, rows[0]), x, _for_each(name, rows, len(x)))


def _apply_group(key: Any, x: Tensor, rows: Sequence[Kwargs]) -> Tensor:
    """Runs samples of one key."""
    name = key[0]
    if name == "uniform_temporal_subsample" and x.ndim != 5:
        raise ValueError(f"{name} takes clips (B, T, C, H, W), got {tuple(x.shape)}.")
    if "_call" in rows[0] and name not in _WARPS:
        rows = [{key: value for key, value in row.items() if key != "_call"} for row in rows]
    batched = _BATCHED.get(name)
    if batched is not None and not (batched.equal and all(row == rows[0] for row in rows)):
        return _in_chunks(batched.kernel, x, rows)
    out: Tensor = x if name == "to_image" else getattr(F, name)(x, **rows[0])
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True))
    return out.contiguous() if overlaps else out


def _in_chunks(kernel: Kernel, x: Tensor, rows: Sequence[Kwargs]) -> Tensor:
    """Runs a kernel; on the CPU on a few samples at a time, so that what it makes on the way stays in the cache."""
    each = max(1, _CHUNK_VALUES // max(1, x[0].numel()))
    if x.device.type != "cpu" or each >= len(x):
        return kernel(x, rows)
    return torch.cat([kernel(x[i : i + each], rows[i : i + each]) for i in range(0, len(x), each)])


def _apply_groups(name: str, x: Tensor, rows: Sequence[Kwargs], groups: Mapping[Hashable, list[int]]) -> Tensor:
    """Runs group by group and puts the results in the samples' order."""
    out: Tensor | None = None
    for key, members in groups.items():
        at = slice(members[0], members[0] + 1) if len(members) == 1 else color.upload(members, x.device, torch.int64)
        part = _apply_group(key, x[at], [rows[i] for i in members])
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
