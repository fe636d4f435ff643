"""`RandAugment`, `TrivialAugmentWide` and `AutoAugment` on a proxy: drawn anew each time, recorded from memory.

Runs in the worker. What one of their operations records follows from its name and magnitude, of which there are few. Each is applied
by torchvision the first time; from then on the calls that it recorded are looked up. The draws are torchvision's, in its order.
`proxies.shortcuts` holds the outcome against torchvision's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_dali.proxies.calls import Call, shared
from lightning_dali.proxies.image import ProxyImage

_MOST_KNOWN = 4096
_AUTO_AUGMENT_BINS = 10
"""Of the magnitudes in the policies of the paper, and in torchvision."""
_known: dict[tuple[Any, ...], tuple[Call, ...]] = {}
"""From settings and an operation to what it records."""


class _Operation(NamedTuple):
    """What was drawn."""

    name: str
    magnitude: float
    sign: float
    """Of the magnitude: 0.0 and -0.0 are equal, and recorded as they are."""


def rand_augment(transform: Any, image: ProxyImage) -> Any:
    """`v2.RandAugment`: `num_ops` operations, all of one magnitude."""
    size, bins = tuple(image.shape[-2:]), transform.num_magnitude_bins
    return _apply(
        transform,
        image,
        [_draw(transform, _name(transform), size, bins, transform.magnitude) for _ in range(transform.num_ops)],
    )


def trivial_augment(transform: Any, image: ProxyImage) -> Any:
    """`v2.TrivialAugmentWide`: one operation of a random magnitude."""
    size = tuple(image.shape[-2:])
    return _apply(transform, image, [_draw(transform, _name(transform), size, transform.num_magnitude_bins, None)])


def auto_augment(transform: Any, image: ProxyImage) -> Any:
    """`v2.AutoAugment`: a random pair of the policy's, each with its own probability and magnitude."""
    size, policies = tuple(image.shape[-2:]), transform._policies
    policy = policies[int(torch.randint(len(policies), ()))]
    operations = [
        _draw(transform, name, size, _AUTO_AUGMENT_BINS, at)
        for name, probability, at in policy
        if _at_most(probability)
    ]
    return _apply(transform, image, operations)


def _name(transform: Any) -> str:
    names: tuple[str, ...] = tuple(transform._AUGMENTATION_SPACE)
    return names[int(torch.randint(len(names), ()))]


def _draw(transform: Any, name: str, size: tuple[int, ...], bins: int, at: int | None) -> _Operation:
    """An operation of magnitude number `at`, None for any of the `bins`; some have none, some a random sign."""
    make, signed = transform._AUGMENTATION_SPACE[name]
    magnitudes = _magnitudes(make, bins, *size, torch.get_default_dtype())
    if magnitudes is None:
        return _Operation(name, 0.0, 1.0)
    magnitude = magnitudes[int(torch.randint(bins, ())) if at is None else at]
    if signed and _at_most(0.5):
        magnitude *= -1
    return _Operation(name, magnitude, math.copysign(1.0, magnitude))


def _at_most(p: float) -> bool:
    """Draws as torchvision's `torch.rand(()) <= p` does, which compares in torch's default precision."""
    return bool(torch.rand(()).item() <= _as_compared(p, torch.get_default_dtype()))


@functools.lru_cache(maxsize=256)
def _as_compared(p: float, dtype: torch.dtype) -> float:
    return torch.tensor(p, dtype=dtype).item()


@functools.lru_cache(maxsize=1024)
def _magnitudes(
    make: Callable[..., Any], bins: int, height: int, width: int, dtype: torch.dtype
) -> Sequence[float] | None:
    """torchvision's table, in `dtype`, torch's default; None for an operation without magnitude."""
    made = make(bins, height, width)
    return None if made is None else [float(value) for value in made]


def _apply(transform: Any, image: ProxyImage, operations: list[_Operation]) -> Any:
    settings = (
        type(transform), transform.interpolation, repr(transform._fill),
        image.dtype, image.meets_pil, image.mode, image.shape[0],
    )  # fmt: skip
    found = [_known.get((*settings, *operation)) for operation in operations]
    if None in found:
        return _learn(transform, image, operations, settings)
    calls = [call for known in found for call in known or ()]
    return image.with_calls((*image.calls, *calls), dtype=image.dtype) if calls else image


def _learn(transform: Any, image: Any, operations: list[_Operation], settings: tuple[Any, ...]) -> Any:
    """Has torchvision apply the operations; keeps what they recorded, if all that they did was to record."""
    for operation in operations:
        before = image
        image = transform._apply_image_or_video_transform(
            image, operation.name, operation.magnitude, interpolation=transform.interpolation, fill=transform._fill
        )
        if type(image) is ProxyImage and type(before) is ProxyImage and _is_alike(before, image):
            calls = image.calls[len(before.calls) :]
            if len(_known) < _MOST_KNOWN:
                key = (*settings, *operation)
                _known[key] = tuple(map(shared, calls))
    return image


def _is_alike(before: ProxyImage, after: ProxyImage) -> bool:
    """Whether one is the other with more calls."""
    return (
        after.source is before.source
        and (after.shape, after.dtype, after.mode) == (before.shape, before.dtype, before.mode)
        and after.meets_pil == before.meets_pil
        and after.calls[: len(before.calls)] == before.calls
    )
