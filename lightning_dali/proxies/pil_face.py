"""What datasets ask of a PIL image before they transform it, answered by a proxy.

Runs in the worker. `convert`, `crop`, flips and `resize` are recorded; whatever else a `PIL.Image.Image` can do is done on
pixels (the proxy is materialised).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from torchvision.transforms.v2 import functional as F

if TYPE_CHECKING:
    from lightning_dali.proxies.calls import Call
    from lightning_dali.proxies.source import ImageSource

_T = PIL.Image.Transpose
_TURN: Mapping[str, Any] = {"angle": 90.0, "expand": True}
# PIL's transpositions as torchvision's calls: (quarter turns counter-clockwise, then flips).
_TRANSPOSITIONS: Mapping[Any, tuple[int, tuple[str, ...]]] = {
    _T.FLIP_LEFT_RIGHT: (0, ("horizontal_flip",)),
    _T.FLIP_TOP_BOTTOM: (0, ("vertical_flip",)),
    _T.ROTATE_180: (0, ("horizontal_flip", "vertical_flip")),
    _T.ROTATE_90: (1, ()),
    _T.ROTATE_270: (1, ("horizontal_flip", "vertical_flip")),
    _T.TRANSPOSE: (1, ("vertical_flip",)),
    _T.TRANSVERSE: (1, ("horizontal_flip",)),
}
_IN_PLACE = frozenset({"thumbnail", "paste", "putpixel", "putalpha", "putdata", "putpalette", "alpha_composite"})
# Known from the file's header: no pixel is decoded for them.
_HEADER = frozenset({"info", "getexif", "_getexif", "n_frames", "is_animated", "getxmp", "text", "get_format_mimetype"})


class PILSize(tuple[int, int]):
    """`image.size` for PIL users and `image.size()` for torch users."""

    shape: tuple[int, ...]

    def __new__(cls, shape: tuple[int, ...]) -> PILSize:
        self = super().__new__(cls, (shape[-1], shape[-2]))
        self.shape = shape
        return self

    def __call__(self, dim: int | None = None) -> Any:
        return torch.Size(self.shape) if dim is None else self.shape[dim]


class PILFace:
    """The PIL half of `ProxyImage`."""

    if TYPE_CHECKING:
        source: ImageSource
        calls: tuple[Call, ...]
        mode: str
        shape: torch.Size

        @classmethod
        def make(cls, source: ImageSource) -> Any: ...
        def record(self, name: str, kwargs: Mapping[str, Any], *, shape: Sequence[int] | None = None) -> Any: ...
        def materialise_pil(self, reason: str | None = None) -> PIL.Image.Image: ...
        def become(self, image: PIL.Image.Image) -> None: ...
        def materialise_tensor(self, reason: str | None = None) -> torch.Tensor: ...

    @property
    def size(self) -> Any:
        return PILSize(tuple(self.shape))

    @property
    def width(self) -> int:
        return int(self.shape[-1])

    @property
    def height(self) -> int:
        return int(self.shape[-2])

    @property
    def format(self) -> str | None:
        return self.source.format

    @property
    def filename(self) -> str:
        return self.source.path or ""

    @property
    def readonly(self) -> int:
        return 1

    def convert(self, mode: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """PIL's `convert`: to RGB or L it stays encoded, anything else is done on pixels."""
        if mode is None or mode == self.mode:
            return self
        self.source.check_narrowing(mode)
        if args or kwargs or mode not in ("RGB", "L") or self.calls or self.source.converted:
            return self._delegate("convert", (mode, *args), kwargs)
        return type(self).make(self.source.convert(mode))

    def crop(self, box: Sequence[float] | None = None) -> Any:
        """PIL's `crop((left, top, right, bottom))`, recorded."""
        left, top, right, bottom = (0, 0, self.width, self.height) if box is None else (round(edge) for edge in box)
        kwargs = {"top": top, "left": left, "height": bottom - top, "width": right - left}
        return self.record("crop", kwargs, shape=(self.shape[0], bottom - top, right - left))

    def transpose(self, *args: Any, **kwargs: Any) -> Any:
        """PIL's `transpose(method)`, recorded; torch's `transpose(dim0, dim1)` materialises."""
        if len(args) != 1 or kwargs:
            return self.materialise_tensor().transpose(*args, **kwargs)
        turns, flips = _TRANSPOSITIONS[_T(args[0])]
        turned: Any = self
        if turns:
            channels, height, width = self.shape
            turned = self.record("rotate", _TURN, shape=(channels, width, height))
        for flip in flips:
            turned = turned.record(flip, {})
        return turned

    def resize(self, size: Any, resample: Any = None, *args: Any, **kwargs: Any) -> Any:
        """PIL's `resize((width, height), resample)`, recorded for the filters that torchvision has."""
        names = {PIL.Image.Resampling.BILINEAR: "bilinear", PIL.Image.Resampling.BICUBIC: "bicubic", None: "bicubic"}
        if args or kwargs or resample not in names:
            return self._delegate("resize", (size, resample, *args), kwargs)
        width, height = size
        recorded = {"size": [height, width], "interpolation": F.InterpolationMode(names[resample]), "antialias": True}
        return self.record("resize", recorded, shape=(self.shape[0], height, width))

    def load(self) -> None:
        """PIL's `load`: nothing to do, decoding comes later."""

    def close(self) -> None:
        """PIL's `close`: the bytes are read already."""

    def copy(self) -> Any:
        return self

    def split(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self.materialise_tensor().split(*args, **kwargs)
        return self._delegate("split", (), {})

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def getbands(self) -> tuple[str, ...]:
        return PIL.Image.getmodebandnames(self.mode)

    def _in_place(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method that changes the image itself: the proxy stands for what it made."""
        image = self.materialise_pil(f"PIL.Image.{name}")
        result = getattr(image, name)(*args, **kwargs)
        self.become(image)
        return result

    def _delegate(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self.materialise_pil(f"PIL.Image.{name}"), name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _IN_PLACE:
            return functools.partial(self._in_place, name)
        if name in _HEADER and self.source.header is not None:
            return getattr(self.source.opened(), name)
        # `draft` and `seek` change what will be decoded: without them the dataset gets a real image
        if (
            name.startswith("_")
            or name in ("draft", "seek")
            or (not hasattr(PIL.Image.Image, name) and name not in ("info", "palette", "im"))
        ):
            raise AttributeError(f"ProxyImage has no attribute {name!r}")
        return getattr(self.materialise_pil(f"PIL.Image.{name}"), name)
