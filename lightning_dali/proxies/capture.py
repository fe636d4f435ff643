"""While a dataset's `__getitem__` runs, the places where datasets decode return proxies.

Runs in the worker (and, with `num_workers=0`, in the rank's own process: then only the thread that captures sees it).
The replaced attributes are restored when the scope ends. Captured are `PIL.Image.open`, `PIL.Image.fromarray`,
`torchvision.io`'s image readers, and torchvision's v1 functionals, which do not know tv_tensors and are answered by their
v2 twins when they are handed a proxy (so v1 transform classes run unmodified, with their own draws).
"""

# Over 300 lines: a list of the places where datasets decode, a few lines each, and the scope that replaces them all.

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import PIL.Image
import torch
import torchvision.io
import torchvision.transforms.functional as F1
from torchvision import tv_tensors
from torchvision.io import ImageReadMode
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F2

from lightning_dali.media import ImageError
from lightning_dali.proxies.compose import compose
from lightning_dali.proxies.image import ProxyImage
from lightning_dali.proxies.scope import captured_kinds, capturing
from lightning_dali.proxies.source import ImageSource

_Patch = tuple[Any, str, Any]


def read_bytes(file: Any) -> tuple[bytes, str | None]:
    """The bytes and, where known, the path of what was handed to an `open`: a path or a binary file object."""
    if isinstance(file, (str, bytes, os.PathLike)):
        path = os.fsdecode(file)
        with open(path, "rb", buffering=0) as stream:  # read whole at once: a buffer would only copy
            return stream.readall(), path
    name = getattr(file, "name", None)
    return file.read(), name if isinstance(name, str) else None


def _open(original: Callable[..., Any], fp: Any, mode: str = "r", formats: Any = None) -> Any:
    if formats is not None:
        return original(fp, mode, formats)
    data, path = read_bytes(fp)
    try:
        return ProxyImage.make(ImageSource.from_bytes(data, path=path))
    except ImageError as error:
        error.path = path
        raise


def _fromarray(original: Callable[..., Any], obj: Any, mode: str | None = None) -> Any:
    if (
        not isinstance(obj, np.ndarray)
        or obj.dtype != np.uint8
        or obj.ndim not in (2, 3)
        or mode not in (None, "L", "RGB")
    ):
        return original(obj, mode) if mode is not None else original(obj)
    if obj.ndim == 3 and obj.shape[2] != 3:
        return original(obj, mode) if mode is not None else original(obj)
    return ProxyImage.make(ImageSource.from_pixels(obj, mode=mode))


def _frombuffer(
    original: Callable[..., Any], mode: str, size: tuple[int, int], data: Any, decoder: str = "raw", *args: Any
) -> Any:
    """`PIL.Image.frombuffer`, by which torchvision makes images of the arrays of its datasets in memory."""
    if mode not in _RAW_MODES or decoder != "raw" or args not in ((), (mode, 0, 1)):
        return original(mode, size, data, decoder, *args)
    width, height = size
    try:
        pixels = np.frombuffer(data, np.uint8)
        array = pixels[: width * height * _RAW_MODES[mode]].reshape(
            (height, width, -1) if mode == "RGB" else (height, width)
        )
    except (TypeError, ValueError, BufferError):
        return original(mode, size, data, decoder, *args)
    return ProxyImage.make(ImageSource.from_pixels(array, mode=mode))


_RAW_MODES = {"L": 1, "RGB": 3}


def _decode_image(original: Callable[..., Any], input: Any, mode: Any = "UNCHANGED", *args: Any, **kwargs: Any) -> Any:
    name = getattr(mode, "name", str(mode)).upper()
    encoded = isinstance(input, (str, os.PathLike, torch.Tensor))
    if not encoded or name not in ("RGB", "GRAY", "UNCHANGED") or any(args) or any(kwargs.values()):
        return original(input, mode, *args, **kwargs)
    data, path = (bytes(input.numpy()), None) if isinstance(input, torch.Tensor) else read_bytes(input)
    try:
        source = ImageSource.from_bytes(data, path=path)
    except ImageError as error:
        error.path = path
        raise
    wanted = {"RGB": "RGB", "GRAY": "L", "UNCHANGED": source.mode}[name]
    # torchvision's decoders and PIL agree on these; they differ on palettes, 16 bits, CMYK and gray of colour
    if not source.encoded or (source.mode, wanted) not in (("RGB", "RGB"), ("L", "L"), ("L", "RGB")):
        return original(input, mode, *args, **kwargs)
    return ProxyImage.make(source if wanted == source.mode else source.convert(wanted)).record("to_image", {})


def _decode_op(original: Callable[..., Any], input: torch.Tensor, mode: int, rotate: bool = False) -> Any:
    """The operator below `torchvision.io`: reached by `from torchvision.io import decode_image` before the capture."""
    replaced = _decode_image(lambda data, *_: original(data, mode, rotate), input, ImageReadMode(mode), rotate)
    return replaced.as_subclass(torch.Tensor)


def _to_image(original: Callable[..., Any], inpt: Any) -> Any:
    return inpt.record("to_image", {}) if isinstance(inpt, ProxyImage) else original(inpt)


def _to_pil_image(original: Callable[..., Any], pic: Any, mode: Any = None) -> Any:
    if isinstance(pic, ProxyImage):
        pil_ready = pic.dtype == torch.uint8 and pic.shape[0] in (1, 3)
        return pic.record("to_pil_image", {}) if pil_ready else pic.materialise_pil("to_pil_image")
    return original(pic, mode)


def _to_tensor(original: Callable[..., Any], pic: Any) -> Any:
    if not isinstance(pic, ProxyImage):
        return original(pic)
    return F2.to_dtype(pic.record("to_image", {}), torch.float32, scale=True)


def _convert_image_dtype(original: Callable[..., Any], image: Any, dtype: torch.dtype = torch.float32) -> Any:
    return F2.to_dtype(image, dtype, scale=True) if isinstance(image, ProxyImage) else original(image, dtype)


def _as_tensor(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.as_tensor` and `torch.tensor` would copy the stand-in's byte; so would every `tv_tensors.Image(data)`."""
    if not isinstance(data, ProxyImage):
        return original(data, *args, **kwargs)
    if all(value is None for value in (*args, *(kwargs.get(key) for key in ("dtype", "device")))):
        return data
    return original(data.materialise_tensor(), *args, **kwargs)


def _wrap(original: Callable[..., Any], wrappee: Any, *, like: Any, **kwargs: Any) -> Any:
    """What was computed from pixels is an image, not a proxy."""
    if not isinstance(like, ProxyImage):
        return original(wrappee, like=like, **kwargs)
    return wrappee.as_subclass(tv_tensors.Image)


def _get_fill(original: Callable[..., Any], fills: Any, kind: type) -> Any:
    """torchvision looks a fill up by the exact type: `fill={tv_tensors.Image: 127, "others": 0}`."""
    if kind is not ProxyImage:
        return original(fills, kind)
    return original(fills, next((known for known in (tv_tensors.Image, PIL.Image.Image) if known in fills), kind))


def _transform_dtype(original: Callable[..., Any], self: Any, inpt: Any, params: Any) -> Any:
    """`v2.ToDtype` looks its dtype up by the exact type too."""
    if not isinstance(inpt, ProxyImage) or not isinstance(self.dtype, dict):
        return original(self, inpt, params)
    kind = PIL.Image.Image if inpt.meets_pil else tv_tensors.Image
    if kind not in self.dtype and "others" not in self.dtype:
        return original(self, inpt, params)  # raises, and says why
    dtype = self.dtype.get(kind, self.dtype.get("others"))
    return inpt if dtype is None else F2.to_dtype(inpt, dtype=dtype, scale=self.scale)


def _get_dimensions(original: Callable[..., Any], img: Any) -> Any:
    return list(img.shape[-3:]) if isinstance(img, ProxyImage) else original(img)


def _get_image_size(original: Callable[..., Any], img: Any) -> Any:
    return [img.width, img.height] if isinstance(img, ProxyImage) else original(img)


def _get_image_num_channels(original: Callable[..., Any], img: Any) -> Any:
    return img.shape[-3] if isinstance(img, ProxyImage) else original(img)


def _v1_twin(twin: Callable[..., Any], original: Callable[..., Any], img: Any, *args: Any, **kwargs: Any) -> Any:
    function = twin if isinstance(img, ProxyImage) else original
    return function(img, *args, **kwargs)


def _only_while_capturing(
    original: Callable[..., Any], replacement: Callable[..., Any], kind: str = "image"
) -> Callable[..., Any]:
    """`replacement(original, ...)` in a thread that captures this kind of media, `original(...)` in every other."""

    @functools.wraps(original)
    def captured(*args: Any, **kwargs: Any) -> Any:
        if kind in captured_kinds():
            return replacement(original, *args, **kwargs)
        return original(*args, **kwargs)

    return captured


_V1_SPECIAL: dict[str, Callable[..., Any]] = {
    "to_tensor": _to_tensor,
    "pil_to_tensor": _to_image,
    "convert_image_dtype": _convert_image_dtype,
    "to_pil_image": _to_pil_image,
    "get_dimensions": _get_dimensions,
    "get_image_size": _get_image_size,
    "get_image_num_channels": _get_image_num_channels,
}


Replaced = tuple[Any, str, Callable[..., Any]]
"""(owner, name, replacement): while capturing, `owner.name(...)` is answered by `replacement(original, ...)`."""
_others: dict[str, Callable[[], list[Replaced]]] = {}


def register_capture(kind: str, replacements: Callable[[], list[Replaced]]) -> None:
    """Teaches `capture(kind)` what to replace.

    Args:
        kind: The media, for instance "audio".
        replacements: Called once, when the first scope opens.
    """
    _others[kind] = replacements


@functools.lru_cache(maxsize=1)
def _patches() -> tuple[_Patch, ...]:
    """Every attribute to replace for images: (owner, name, replacement)."""
    wanted: list[tuple[Any, str, Callable[..., Any]]] = [
        (PIL.Image, "open", _open),
        (PIL.Image, "fromarray", _fromarray),
        (PIL.Image, "frombuffer", _frombuffer),
        (torchvision.io, "decode_image", _decode_image),
        (torchvision.io, "read_image", _decode_image),
        *((torch.ops.image, name, _decode_op) for name in _DECODERS if hasattr(torch.ops.image, name)),
        (torch, "as_tensor", _as_tensor),
        (torch, "tensor", _as_tensor),
        (tv_tensors, "wrap", _wrap),
        (v2.ToDtype, "transform", _transform_dtype),
        (v2.Compose, "forward", compose),
        *((module, "_get_fill", _get_fill) for module in vars(v2).values() if hasattr(module, "_get_fill")),
        (F2, "convert_image_dtype", _convert_image_dtype),
        (F2, "to_image", _to_image),
        (F2, "pil_to_tensor", _to_image),
        (F2, "to_pil_image", _to_pil_image),
    ]
    for name in vars(F1):
        if name in _V1_SPECIAL:
            wanted.append((F1, name, _V1_SPECIAL[name]))
        elif name in V1_TWINS and hasattr(F2, name):
            wanted.append((F1, name, functools.partial(_v1_twin, getattr(F2, name))))
    patches = [
        (owner, name, _only_while_capturing(getattr(owner, name), replacement)) for owner, name, replacement in wanted
    ]
    for transform in (v2.ToImage, v2.PILToTensor, v2.ToTensor):
        types: Any = (
            transform._transformed_types
        )  # otherwise a proxy, being a tv_tensors.Image, would not be handed over
        with_proxies: Any = (*types, ProxyImage)
        patches.append((transform, "_transformed_types", with_proxies))
    return tuple(patches)


_DECODERS = ("decode_image", "decode_jpeg", "decode_png", "decode_webp")
V1_TWINS = frozenset(
    [
        "resize",
        "center_crop",
        "crop",
        "resized_crop",
        "pad",
        "hflip",
        "vflip",
        "perspective",
        "five_crop",
        "ten_crop",
        "adjust_brightness",
        "adjust_contrast",
        "adjust_saturation",
        "adjust_hue",
        "adjust_gamma",
        "rotate",
        "affine",
        "rgb_to_grayscale",
        "erase",
        "gaussian_blur",
        "invert",
        "posterize",
        "solarize",
        "adjust_sharpness",
        "autocontrast",
        "equalize",
        "elastic_transform",
        "normalize",
    ]
)


class capture:
    """While it is open, what this thread decodes of that kind of media comes as proxies."""

    __slots__ = ("_capturing", "_kind")

    def __init__(self, kind: str = "image") -> None:
        self._kind = kind

    def __enter__(self) -> None:
        _install(+1)
        self._capturing = capturing(self._kind)
        self._capturing.__enter__()

    def __exit__(self, *_: object) -> None:
        self._capturing.__exit__(None, None, None)
        _install(-1)


@contextmanager
def captures_follow() -> Iterator[None]:
    """Around many `capture`s: attributes are replaced once instead of for each. By itself it captures nothing."""
    _install(+1)
    try:
        yield
    finally:
        _install(-1)


_lock = threading.Lock()
_open_scopes = 0
_replaced: list[_Patch] = []


def _install(change: int) -> None:
    """Replaces the attributes for the first scope that opens, restores them after the last one that closes."""
    global _open_scopes
    with _lock:
        if _open_scopes == 0 and change > 0:
            for owner, name, replacement in _patches():
                _replaced.append((owner, name, vars(owner)[name]))
                setattr(owner, name, replacement)
            for kind, replacements in _others.items():  # around those of images, where both replace the same
                for owner, name, replace in replacements():
                    original = vars(owner)[name]
                    _replaced.append((owner, name, original))
                    setattr(owner, name, _only_while_capturing(original, replace, kind))
        _open_scopes += change
        if _open_scopes == 0:
            while _replaced:
                setattr(*_replaced.pop())
