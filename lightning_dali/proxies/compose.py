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

from lightning_dali.proxies.image import ProxyImage

_RandomApply: Any = v2.RandomHorizontalFlip.__mro__[1]
"""torchvision's private base of transforms that are applied with probability p."""


def compose(original: Callable[..., Any], self: v2.Compose, *inputs: Any) -> Any:
    """Stands in for `Compose.forward` while a dataset is captured."""
    if len(inputs) != 1 or type(inputs[0]) is not ProxyImage:
        return original(self, *inputs)
    image: Any = inputs[0]
    for transform in self.transforms:
        image = _apply(transform, image)
    return image


def _apply(transform: Any, image: Any) -> Any:
    if type(image) is not ProxyImage:
        return transform(image)
    way = _way(type(transform), transform._transformed_types) if isinstance(transform, v2.Transform) else "call"
    if way == "call" or transform._forward_hooks or transform._forward_pre_hooks:
        return transform(image)
    if way != "plain" or type(transform).check_inputs is not v2.Transform.check_inputs:
        transform.check_inputs([image])
    if way == "random" and torch.rand(1) >= transform.p:
        return image
    return transform.transform(image, transform.make_params([image]))


@functools.lru_cache(maxsize=512)
def _way(kind: type, transformed_types: tuple[Any, ...]) -> str:
    """ "plain" or "random": torchvision's own `forward`, and it would transform a proxy; else "call"."""
    forward = getattr(kind, "forward", None)
    own_call = kind.__call__ is not torch.nn.Module.__call__
    if own_call or kind._needs_transform_list is not v2.Transform._needs_transform_list:  # type: ignore[attr-defined]
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
