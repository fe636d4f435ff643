"""A short way through `v2.Compose` for a single proxy: the same draws and the same calls, without the plumbing.

Runs in the worker. `Transform.forward` flattens its inputs, checks them, finds which of them to transform, and builds the
structure again; for one image that is most of what recording costs. For transforms whose `forward` is torchvision's own
that plumbing has one outcome, so `make_params` and `transform` are called directly. Everything else is called as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2._utils import check_type

from lightning_dali.proxies.calls import Call, shared
from lightning_dali.proxies.image import ProxyImage
from lightning_dali.proxies.shortcuts import SHORTCUTS, happens, shortcut

_RandomApply: Any = v2.RandomHorizontalFlip.__mro__[1]
"""torchvision's private base of transforms that are applied with probability p."""


def compose(original: Callable[..., Any], self: v2.Compose, *inputs: Any) -> Any:
    """Stands in for `Compose.forward` while a dataset is captured."""
    if len(inputs) != 1 or type(inputs[0]) is not ProxyImage:
        return original(self, *inputs)
    image: Any = inputs[0]
    transforms, at = self.transforms, 0
    while at < len(transforms):
        kind = type(transforms[at]) if type(image) is ProxyImage else None
        if kind in _CONSTANT:
            image, at = _run(transforms, at, image)
            continue
        short = shortcut(transforms[at]) if kind in SHORTCUTS else None
        image, at = (short or _apply)(transforms[at], image), at + 1
    return image


_CONSTANT = frozenset({v2.ToImage, v2.ToDtype, v2.Normalize})
"""Transforms that draw nothing, keep the size and record the same for every image of one kind."""
_runs: dict[tuple[Any, ...], tuple[list[Any], tuple[Call, ...], torch.dtype]] = {}
"""What runs of them recorded: from the transforms' ids, settings and the image's kind to the transforms themselves (so that
their ids stay theirs), the calls and the dtype after them."""


def _run(transforms: Any, at: int, image: ProxyImage) -> tuple[Any, int]:
    """Applies the constant transforms from `at` on; records what they recorded for the last image of this kind."""
    stop = at
    while stop < len(transforms) and type(transforms[stop]) in _CONSTANT:
        stop += 1
    run = list(transforms[at:stop])
    key = (*((id(one), _settings(one)) for one in run), image.dtype, image.meets_pil, image.mode, len(image.calls) == 0)
    known = _runs.get(key)
    if known is not None and not any(one._forward_hooks or one._forward_pre_hooks for one in run):
        return image.with_calls((*image.calls, *known[1]), dtype=known[2]), stop
    out: Any = image
    for transform in run:
        out = _apply(transform, out)
    if type(out) is ProxyImage and out.source is image.source and out.shape == image.shape:
        same = out.calls[: len(image.calls)] == image.calls
        if same and len(_runs) < 256:
            _runs[key] = (run, tuple(map(shared, out.calls[len(image.calls) :])), out.dtype)
    return out, stop


def _settings(transform: Any) -> Any:
    """What a user may change on a transform that lives: a changed one records anew."""
    kind = type(transform)
    if kind is v2.Normalize:
        return (tuple(transform.mean), tuple(transform.std), len(transform._forward_hooks))
    if kind is v2.ToDtype:
        dtype = transform.dtype
        dtype = dtype if isinstance(dtype, torch.dtype) else tuple(dtype.items())
        return (dtype, transform.scale, len(transform._forward_hooks))
    return len(transform._forward_hooks)


def _apply(transform: Any, image: Any) -> Any:
    if type(image) is not ProxyImage:
        return transform(image)
    way = _way(type(transform), transform._transformed_types) if isinstance(transform, v2.Transform) else "call"  # type: ignore[arg-type]  # a type is hashable
    if way == "call" or transform._forward_hooks or transform._forward_pre_hooks:
        return transform(image)
    if way != "plain" or type(transform).check_inputs is not v2.Transform.check_inputs:
        transform.check_inputs([image])
    if way == "random" and not happens(transform.p):
        return image
    return transform.transform(image, transform.make_params([image]))


@functools.lru_cache(maxsize=512)
def _way(kind: type, transformed_types: tuple[Any, ...]) -> str:
    """ "plain" or "random": torchvision's own `forward`, and it would transform a proxy; else "call"."""
    forward = getattr(kind, "forward", None)
    own_call = kind.__call__ is not torch.nn.Module.__call__
    if own_call or kind._needs_transform_list is not v2.Transform._needs_transform_list:  # type: ignore[attr-defined]  # `kind` is a v2.Transform
        return "call"
    sample = _sample()
    if not check_type(sample, transformed_types):
        return "call"
    if forward is v2.Transform.forward:
        return "plain"
    return "random" if forward is _RandomApply.forward else "call"


@functools.lru_cache(maxsize=1)
def _sample() -> ProxyImage:
    import numpy as np

    from lightning_dali.proxies.source import ImageSource

    return ProxyImage.make(ImageSource.from_pixels(np.zeros((2, 2, 3), np.uint8)))
