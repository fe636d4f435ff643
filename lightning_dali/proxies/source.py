"""What a proxy stands for: encoded bytes or pixels in memory, with what the header tells.

Runs in the worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import PIL.Image
import torch

from lightning_dali.media import ImageError, ImageHeader, check_complete, check_size, read_image_header
from lightning_dali.proxies.notes import note

_PIL_OPEN = PIL.Image.open  # `capture` replaces the attribute while a dataset runs
_PIL_FROMARRAY = PIL.Image.fromarray
_CHANNELS = {"RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "HSV": 3, "LA": 2, "La": 2, "RGBa": 4, "RGBX": 4}


def channels_of_mode(mode: str) -> int:
    """How many channels torchvision makes of a PIL image of that mode."""
    return _CHANNELS.get(mode, 1)


@dataclass(frozen=True, eq=False)
class ImageSource:
    """An image that is not decoded yet, or pixels that are in memory already."""

    data: Any
    """Encoded bytes, or an array `(H, W[, C])`."""
    width: int
    """Pixels across."""
    height: int
    """Pixels down."""
    mode: str
    """The PIL mode after the dataset's own conversion."""
    path: str | None = None
    """Where the bytes came from, for messages."""
    header: ImageHeader | None = None
    """Facts of the encoded file; None for pixels in memory."""
    converted: bool = False
    """Whether the dataset called `convert`, to `mode`."""
    finished: bool = False
    """Whether `data` is a tensor `(C, H, W)` on which every transform has run already."""
    materialised: list[str] = field(default_factory=list)
    """Why pixels were needed in the worker, if they were."""
    settled: list[Any] = field(default_factory=list)
    """The PIL image, where it had to be decoded here."""

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str | None = None) -> ImageSource:
        """Reads the header; raises `ImageError` with the reason when this is no image."""
        header = read_image_header(data)
        check_size(header)
        return cls(data=data, width=header.width, height=header.height, mode=header.mode, path=path, header=header)

    @classmethod
    def from_pixels(cls, pixels: np.ndarray, *, mode: str | None = None) -> ImageSource:
        """Wraps an array `(H, W)` or `(H, W, C)`."""
        if mode is None:
            mode = {2: "L"}.get(pixels.ndim) or {1: "L", 3: "RGB", 4: "RGBA"}.get(pixels.shape[2], "RGB")
        return cls(data=pixels, width=pixels.shape[1], height=pixels.shape[0], mode=mode)

    @classmethod
    def from_result(cls, result: torch.Tensor) -> ImageSource:
        """Wraps a finished tensor `(C, H, W)` so that it may stand beside proxies in a batch."""
        return cls(data=result, width=result.shape[-1], height=result.shape[-2], mode="RGB", finished=True)

    def settle(self) -> None:
        """Decodes now with PIL; raises `ImageError` if that fails. The pixels travel instead of the bytes."""
        if not self.settled:
            self.settled.append(self.decode())

    def pixels(self) -> np.ndarray:
        """The decoded pixels `(H, W[, C])`."""
        if self.header is None:
            return np.asarray(self.data)
        self.settle()
        return np.asarray(self.settled[0])

    @property
    def format(self) -> str | None:
        """PIL's name of the file format."""
        return self.header.format if self.header else None

    @property
    def encoded(self) -> bool:
        """Whether DALI can decode it to exactly what the dataset would have got."""
        return self.header is not None and not self.settled and self.header.dali_decodes(self.mode)

    def convert(self, mode: str) -> ImageSource:
        """The same image, to be decoded into another PIL mode."""
        if self.header is None:
            pixels = np.asarray(self.decode().convert(mode))
            return replace(self, data=pixels, mode=mode)
        return replace(self, mode=mode, converted=True, settled=[])

    def check_narrowing(self, mode: str) -> None:
        """Refuses a PIL conversion that clips more than 8 bits to 8: it makes such images white, without a word."""
        if self.header is not None and not self.converted and self.header.narrows(mode):
            raise ImageError(
                f"its mode is {self.header.mode!r}, and convert({mode!r}) would narrow it to 8 bits by clipping: keep the mode "
                "(PIL.Image.open without convert, v2.ToImage, v2.ToDtype(torch.float32, scale=True)), or rescale the values",
                path=self.path,
            )

    def decode(self) -> Any:
        """Decodes with PIL, as the dataset would have: a PIL image; what is finished comes as it is, a tensor."""
        if self.finished:
            return self.data.clone()
        if self.header is None:
            return _PIL_FROMARRAY(self.data, self.mode) if self.data.dtype == np.uint8 else _PIL_FROMARRAY(self.data)
        if self.settled:
            return self.settled[0].copy()
        import io

        try:
            image = _PIL_OPEN(io.BytesIO(self.data))
            image.load()
        except Exception as error:
            raise ImageError(f"{type(error).__name__}: {error}") from error
        return image.convert(self.mode) if self.converted else image

    def opened(self) -> Any:
        """The file as PIL opens it, not decoded: for its EXIF and the like."""
        import io

        return _PIL_OPEN(io.BytesIO(self.data))

    def incomplete(self) -> str | None:
        """Why the encoded bytes look cut off, or None."""
        return None if self.header is None else check_complete(self.data, self.header)

    def note_materialised(self, reason: str) -> None:
        """Remembers why pixels were needed."""
        self.materialised.append(reason)
        note(reason)

    def __repr__(self) -> str:
        what = self.path or (f"{len(self.data)} bytes" if self.header else "pixels")
        return f"{what}, {self.width}x{self.height} {self.mode}"
