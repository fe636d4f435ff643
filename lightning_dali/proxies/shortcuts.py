"""The commonest random transforms on a proxy, without their plumbing: the same draws from torch's generator, the same record.

Runs in the worker. torchvision's `make_params` and `transform` look for the size in nested inputs, make a tensor for each draw
and go through the dispatch of functionals; on a stand-in that is most of what a sample costs. Each shortcut is held against
torchvision's own transform when it is first asked for, draw by draw, and is left alone if they differ: then this version of
torchvision, or somebody's change to the class, does it in another way.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies.auto_augment import auto_augment, rand_augment, trivial_augment
from lightning_dali.proxies.image import ProxyImage
from lightning_dali.proxies.kernels import plain, runs_on_device
from lightning_dali.proxies.sizes import resized_size
from lightning_dali.proxies.source import ImageSource

logger = logging.getLogger(__name__)

Shortcut = Callable[[Any, ProxyImage], Any]
_METHODS = frozenset(
    {
        "forward",
        "make_params",
        "transform",
        "_AUGMENTATION_SPACE",
        "_apply_image_or_video_transform",
        "_get_random_item",
    }
)
"""What an instance may have replaced for itself."""


def shortcut(transform: Any) -> Shortcut | None:
    """The short way of a transform, if there is one that does what the transform does."""
    found = SHORTCUTS.get(type(transform))
    if found is None or not _agrees(type(transform), found):  # type: ignore[arg-type]  # mypy: a type is not Hashable
        return None
    own = transform.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or not own.keys().isdisjoint(_METHODS):
        return None
    return found


def _random_resized_crop(transform: Any, image: ProxyImage) -> Any:
    channels, height, width = image.shape
    top, left, h, w = _draw_window(height, width, transform.scale, transform._log_ratio.tolist(), transform.ratio)
    kwargs = {
        "top": top,
        "left": left,
        "height": h,
        "width": w,
        "size": plain(transform.size),
        "interpolation": transform.interpolation,
        "antialias": transform.antialias,
    }
    if not runs_on_device("resized_crop", kwargs):
        return F.resized_crop(image, **kwargs)  # the functional itself knows what becomes of it
    return image.record("resized_crop", kwargs, shape=(channels, *resized_size((h, w), transform.size)))


def _draw_window(height: int, width: int, scale: Any, log_ratio: Any, ratio: Any) -> tuple[int, int, int, int]:
    """(top, left, height, width) of `v2.RandomResizedCrop`: an area share, a log aspect ratio, a place, ten times at most."""
    area, number, place = height * width, torch.empty(1), torch.empty(1, dtype=torch.int64)
    for _ in range(10):
        target = area * number.uniform_(scale[0], scale[1]).item()
        aspect = number.uniform_(log_ratio[0], log_ratio[1]).exp_().item()
        w = round(math.sqrt(target * aspect))
        h = round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = int(place.random_(0, height - h + 1).item())
            return top, int(place.random_(0, width - w + 1).item()), h, w
    w, h = width, height
    if width / height < min(ratio):
        h = round(w / min(ratio))
    elif width / height > max(ratio):
        w = round(h * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


def _flip(name: str) -> Shortcut:
    def flip(transform: Any, image: ProxyImage) -> ProxyImage:
        return image.record(name, {}) if happens(transform.p) else image

    return flip


def happens(p: float) -> bool:
    """Draws as torchvision's `torch.rand(1) >= p` does, which compares in torch's default precision."""
    return bool(torch.rand(1).item() < _as_compared(p, torch.get_default_dtype()))


@functools.lru_cache(maxsize=256)
def _as_compared(p: float, dtype: torch.dtype) -> float:
    return torch.tensor(p, dtype=dtype).item()


def _random_erasing(transform: Any, image: ProxyImage) -> Any:
    channels, height, width = image.shape
    value = transform.value
    if value is None or image.meets_pil or len(value) not in (1, channels):  # noise is drawn; the others are refused
        return transform.forward(image)
    if not happens(transform.p):
        return image
    window = _draw_erased(height, width, transform.scale, transform._log_ratio.tolist())
    if window is None:
        return image
    i, j, h, w = window
    return image.record("erase", {"i": i, "j": j, "h": h, "w": w, "v": torch.tensor(value).view(-1, 1, 1)})


def _draw_erased(height: int, width: int, scale: Any, log_ratio: Any) -> tuple[int, int, int, int] | None:
    """(i, j, h, w) of `v2.RandomErasing`, as above; None where ten windows were too large."""
    area, number, place = height * width, torch.empty(1), torch.empty(1, dtype=torch.int64)
    for _ in range(10):
        target = area * number.uniform_(scale[0], scale[1]).item()
        aspect = number.uniform_(log_ratio[0], log_ratio[1]).exp_().item()
        h = round(math.sqrt(target * aspect))
        w = round(math.sqrt(target / aspect))
        if h < height and w < width:
            top = int(place.random_(0, height - h + 1).item())
            return top, int(place.random_(0, width - w + 1).item()), h, w
    return None


SHORTCUTS: dict[type, Shortcut] = {
    v2.RandomResizedCrop: _random_resized_crop,
    v2.RandomHorizontalFlip: _flip("horizontal_flip"),
    v2.RandomVerticalFlip: _flip("vertical_flip"),
    v2.RandomErasing: _random_erasing,
    v2.RandAugment: rand_augment,
    v2.TrivialAugmentWide: trivial_augment,
    v2.AutoAugment: auto_augment,
}
_EXAMPLES: dict[type, tuple[Callable[[], Any], ...]] = {
    v2.RandomResizedCrop: (
        lambda: v2.RandomResizedCrop(32),
        lambda: v2.RandomResizedCrop((20, 30), scale=(0.5, 2.0), ratio=(0.2, 0.3), antialias=False),
        lambda: v2.RandomResizedCrop(32, ratio=(3.0, 4.0)),
    ),
    v2.RandomHorizontalFlip: (v2.RandomHorizontalFlip, lambda: v2.RandomHorizontalFlip(0.3)),
    v2.RandomVerticalFlip: (v2.RandomVerticalFlip, lambda: v2.RandomVerticalFlip(0.3)),
    v2.RandomErasing: (
        lambda: v2.RandomErasing(0.7),
        lambda: v2.RandomErasing(1.0, scale=(0.5, 1.0), ratio=(0.2, 9.0), value=[1, 2, 3]),
    ),
    v2.RandAugment: (
        v2.RandAugment,
        lambda: v2.RandAugment(3, 5, 11, interpolation=v2.InterpolationMode.BILINEAR, fill=[1, 2, 3]),
    ),
    v2.TrivialAugmentWide: (v2.TrivialAugmentWide, lambda: v2.TrivialAugmentWide(7, fill={tv_tensors.Image: 5})),
    v2.AutoAugment: (v2.AutoAugment, lambda: v2.AutoAugment(v2.AutoAugmentPolicy.SVHN, fill=3)),
}
_DRAWS = 6


@functools.lru_cache(maxsize=64)
def _agrees(kind: type, short: Shortcut) -> bool:
    """Whether the shortcut records and draws what the class does."""
    state = torch.default_generator.get_state()
    try:
        agrees = all(
            _outcome(short, make(), image, seed) == _outcome(_long_way, make(), image, seed)
            for make in _EXAMPLES[kind]
            for image in _images(kind)
            for seed in range(_DRAWS)
        )
    except Exception as error:
        logger.debug("%s: its shortcut fails: %s", kind.__name__, error)
        return False
    finally:
        torch.default_generator.set_state(state)
    if not agrees:
        logger.info("%s draws in another way than known here: it is called as it is", kind.__name__)
    return agrees


def _long_way(transform: Any, image: ProxyImage) -> Any:
    return transform.forward(image)


def _outcome(way: Callable[..., Any], transform: Any, image: ProxyImage, seed: int) -> Any:
    torch.default_generator.manual_seed(seed)
    out = way(transform, image)
    calls = [(call.name, {key: _comparable(value) for key, value in call.kwargs.items()}) for call in out.calls]
    return calls, tuple(out.shape), out.dtype, torch.rand(3).tolist()


def _comparable(value: Any) -> Any:
    return (value.dtype, value.shape, value.tolist()) if isinstance(value, torch.Tensor) else value


def _images(kind: type) -> list[ProxyImage]:
    sizes = ((97, 131), (64, 30))
    images = [ProxyImage.make(ImageSource.from_pixels(np.zeros((*size, 3), np.uint8))) for size in sizes]
    return [image.record("to_image", {}) for image in images] if kind is v2.RandomErasing else images
