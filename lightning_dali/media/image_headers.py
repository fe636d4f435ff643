"""What an encoded image says about itself: format, size, mode, and who may decode it.

Runs in the worker. Nothing here decodes a pixel, imports DALI or touches CUDA. JPEG, PNG, BMP, WebP and PNM are read
directly (a few microseconds); any other file, and any unusual one of these, goes to PIL's own lazy `open`, so that the
answer is always PIL's.

`ImageHeader.exact` rests on this: DALI 2.4.0's CPU `fn.decoders.image(adjust_orientation=False)` against Pillow 13.0.0,
616 files (smooth and noise, 1x1 to 1411x1411, odd sizes, ../shared/media/images): the worst mean / max difference in
255ths. `jpeg_fancy_upsampling` changes none.

| file | `RGB` | `GRAY` against `convert("L")` |
|---|---|---|
| JPEG YCbCr, every subsampling; baseline, progressive, restarts, EXIF-rotated, MPO | **0 / 0** | 0.67 / 25 (stored Y) |
| JPEG gray | **0 / 0** | **0 / 0** |
| JPEG stored as RGB; CMYK; extended sequential (SOF1) | 0 / 0 | 0 / 0; 1 / 1; 0.01 / 4 |
| PNG RGB, 8 bits (tRNS, gAMA, cICP, APNG too) | **0 / 0** | 1 / 1; 18 / 81 with cHRM |
| PNG gray, 8 bits | **0 / 0** | **0 / 0** |
| PNG palette, RGBA, gray-alpha, 1-, 2-, 4-bit gray, 16-bit RGB, interlaced | 0 / 0 | 1 / 1 |
| PNG and TIFF 16-bit gray, TIFF float | 133 / 252 | 133 / 252 |
| BMP 24 bits; WebP lossy, lossless; PNM P6, 255 | **0 / 0** | 0.002 / 1 |
| PNM P5, 255 | **0 / 0** | **0 / 0** |
| BMP 16 bits; some lossless WebP with EXIF; TIFF 1-bit; GIF; AVIF; PSD | error | error |
| PNM P6, 254; TIFF palette; JPEG 2000 of 16 bits | 0.5 / 1; 1 / 1; 4.3 / 255 | 0.5 / 1; 1 / 1; 4.9 / 150 |
| TIFF RGB, RGBA, CMYK; JPEG 2000 of 8 bits | 0 / 0 (but PIL turns a TIFF by its EXIF, DALI does not) | 0.002 / 1 |

Bold is what `exact` promises. The other zeros are left to PIL on purpose: they are rare, and what nvJPEG makes of them
on a GPU is not measured. (`output_type=ANY_DATA` is no way round this table: on a gray JPEG it kills the process.)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from struct import Struct
from struct import error as StructError

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from lightning_dali.media.errors import MediaError

Encoded = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""An encoded file in memory; arrays and views are one contiguous run of bytes."""

# Kept at import: while a dataset's `__getitem__` runs, `PIL.Image.open` itself may be replaced by our capture.
pil_open = Image.open

_NOTHING: frozenset[str] = frozenset()
_RGB = frozenset({"RGB"})
_GRAY = frozenset({"L", "RGB"})
_EIGHT_BIT_MODES = frozenset(
    {"1", "L", "P", "LA", "PA", "La", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB"}
)


class ImageError(MediaError):
    """A file that is not an image, or not all of one; its text is the reason, short, without path or index."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What is known of an encoded image before it is decoded.

    Raises:
        ValueError: the width or height is below 1.
    """

    format: str
    """The container, by PIL's name: "JPEG", "MPO", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF", "JPEG2000", "AVIF"..."""
    width: int
    """W, in pixels. As in PIL, an EXIF orientation is not applied, except in a TIFF."""
    height: int
    """H, in pixels."""
    mode: str
    """The `mode` that `PIL.Image.open` reports: "RGB", "L", "CMYK", "P", "1", "LA", "RGBA", "I;16", "I", "F", ..."""
    exact: frozenset[str] = _NOTHING
    """The modes ("RGB", "L") in which DALI's CPU decoder gives PIL's pixels; `tests/media/test_images.py` checks it."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ValueError(f"an image has at least one pixel; got width={self.width}, height={self.height}")

    def dali_decodes(self, target_mode: str) -> bool:
        """Whether DALI's decoder may stand in for PIL: decode, then `convert(target_mode)`.

        Args:
            target_mode: "RGB" (DALI's `output_type=RGB`), "L" (`output_type=GRAY`), or `mode` itself for no conversion.
        """
        return target_mode in self.exact

    def narrows(self, target_mode: str) -> bool:
        """Whether PIL's `convert(target_mode)` squeezes more than 8 bits into 8 (it clips, it does not rescale)."""
        return self.mode not in _EIGHT_BIT_MODES and target_mode in _EIGHT_BIT_MODES


def read_image_header(data: Encoded) -> ImageHeader:
    """Read format, size and mode of an encoded image, as `PIL.Image.open` would report them.

    Raises:
        ImageError: the file is empty, is not an image, or its header is cut or damaged.
    """
    view = as_bytes(data)
    if len(view) == 0:
        raise ImageError("empty file")
    reader = _READERS.get(bytes(view[:2]))
    if reader is not None:
        try:
            header = reader(view)
        except (StructError, IndexError):  # the file ends inside its header: PIL words the reason
            header = None
        if header is not None:
            return header
    return _read_with_pil(view)


def as_bytes(data: Encoded) -> bytes | memoryview:
    """The same memory, as something whose items are bytes."""
    if isinstance(data, bytes):
        return data
    view = memoryview(data.data if isinstance(data, np.ndarray) else data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def jpeg_scan_offset(view: bytes | memoryview) -> int | None:
    """The offset of a JPEG's first scan, past its headers and any EXIF thumbnail; None if the headers are irregular."""
    try:
        walked = _walk_jpeg(view)
    except (StructError, IndexError):
        return None
    return None if walked is None else walked.scan_offset


def _read_with_pil(view: bytes | memoryview) -> ImageHeader:
    try:
        with pil_open(BytesIO(view)) as image:
            return ImageHeader(image.format or "", image.width, image.height, image.mode)
    except Image.DecompressionBombError as error:
        raise ImageError(str(error)) from error
    except Exception as error:  # PIL's plugins raise anything on a damaged file: OSError, ValueError, EOFError, ...
        unidentified = isinstance(error, UnidentifiedImageError)  # its text is the address of our BytesIO
        start = bytes(view[:16])
        kind = next((name for magic, name in _MAGIC if start.startswith(magic)), None)
        if kind is None and unidentified:
            raise ImageError(f"not an image: starts with {start!r} ({len(view)} bytes)") from None
        detail = "" if unidentified else f": {error}"
        raise ImageError(f"truncated or damaged {kind or 'image'} header ({len(view)} bytes){detail}") from error


# ---- JPEG: ITU-T T.81 Annex B (segments), T.872 section 6 (the Adobe marker's colour transform) ----

_SEGMENT = Struct(">HH")  # marker, length with itself
_FRAME = Struct(">BHHB")  # precision, height, width, number of components
_SCAN, _APP2, _ADOBE = 0xFFDA, 0xFFE2, 0xFFEE
_JPEG_FRAMES = frozenset({0xFFC0, 0xFFC2})  # baseline, progressive
# Tables, restart interval, application data, comment. The rest (other frame types, fill bytes, junk) is PIL's to judge.
_JPEG_SKIPPED = frozenset({0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0)})
_JPEG_MODES = {1: ("L", _GRAY), 3: ("RGB", _RGB), 4: ("CMYK", _NOTHING)}


@dataclass(frozen=True, slots=True)
class _Jpeg:
    frame_offset: int
    scan_offset: int
    adobe_transform: int | None
    multi_picture: bool


def _walk_jpeg(view: bytes | memoryview) -> _Jpeg | None:
    position, frame, adobe, multi_picture = 2, 0, None, False
    while True:
        marker, length = _SEGMENT.unpack_from(view, position)
        if marker in _JPEG_FRAMES:
            if frame:
                return None
            frame = position + 4
        elif marker == _SCAN:
            return _Jpeg(frame, position, adobe, multi_picture) if frame else None
        elif marker not in _JPEG_SKIPPED or length < 2:
            return None
        elif marker == _ADOBE and length >= 14 and view[position + 4 : position + 9] == b"Adobe":
            adobe = view[position + 15]
        elif marker == _APP2 and view[position + 4 : position + 8] == b"MPF\0":
            multi_picture = True
        position += 2 + length


def _read_jpeg(view: bytes | memoryview) -> ImageHeader | None:
    jpeg = _walk_jpeg(view)
    if jpeg is None:
        return None
    precision, height, width, components = _FRAME.unpack_from(view, jpeg.frame_offset)
    if precision != 8 or components not in _JPEG_MODES or not width or not height:
        return None
    mode, exact = _JPEG_MODES[components]
    if components == 3:
        identifiers = bytes(view[jpeg.frame_offset + 6 : jpeg.frame_offset + 15 : 3])
        if (
            jpeg.adobe_transform not in (None, 1) or identifiers == b"RGB"
        ):  # stored as RGB, or decoders disagree about it
            exact = _NOTHING
    header = ImageHeader("JPEG", width, height, mode, exact)
    if jpeg.multi_picture:  # MPO or not depends on the number of pictures in the index: PIL's call
        header = replace(header, format=_read_with_pil(view).format)
    return header


# ---- PNG: ISO/IEC 15948, section 11.2.2 (IHDR) ----

_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR"
_IHDR = Struct(">IIBBBBB")
# (bit depth, colour type) -> PIL's mode. 16-bit colour is 8-bit in PIL, which keeps the high byte.
_PNG_MODES = {
    **{(1, 0): "1", (2, 0): "L", (4, 0): "L", (8, 0): "L", (16, 0): "I;16"},
    **{(8, 2): "RGB", (16, 2): "RGB", (1, 3): "P", (2, 3): "P", (4, 3): "P", (8, 3): "P"},
    **{(8, 4): "LA", (16, 4): "RGBA", (8, 6): "RGBA", (16, 6): "RGBA"},
}
_PNG_EXACT = {(8, 0, 0): _GRAY, (8, 2, 0): _RGB}  # (bit depth, colour type, interlace)


def _read_png(view: bytes | memoryview) -> ImageHeader | None:
    if view[:16] != _PNG_START:
        return None
    width, height, depth, color, _, _, interlace = _IHDR.unpack_from(view, 16)
    mode = _PNG_MODES.get((depth, color))
    if mode is None or not width or not height:
        return None
    return ImageHeader("PNG", width, height, mode, _PNG_EXACT.get((depth, color, interlace), _NOTHING))


# ---- BMP: only the common kind: BITMAPINFOHEADER, 24 bits, not compressed ----

_BMP = Struct(
    "<2xIIIIiiHHI"
)  # file size, reserved, offset of the pixels, header size, width, height, planes, bits, compression


def _read_bmp(view: bytes | memoryview) -> ImageHeader | None:
    _, _, offset, header_size, width, height, planes, bits, compression = _BMP.unpack_from(view, 0)
    if (offset, header_size, planes, bits, compression) != (54, 40, 1, 24, 0) or width < 1 or not height:
        return None
    return ImageHeader("BMP", width, abs(height), "RGB", _RGB)  # a negative height: rows run from the top


# ---- WebP: RFC 9649, sections 2.5 (lossy), 2.6 (lossless). Extended files (VP8X: alpha, EXIF, animation): PIL's. ----

_VP8 = Struct("<HH")
_VP8L = Struct("<I")


def _read_webp(view: bytes | memoryview) -> ImageHeader | None:
    chunk = view[8:16]
    if chunk == b"WEBPVP8 " and view[23:26] == b"\x9d\x01\x2a":
        width, height = _VP8.unpack_from(view, 26)
        width, height = width & 0x3FFF, height & 0x3FFF
        return ImageHeader("WEBP", width, height, "RGB", _RGB) if width and height else None
    if chunk == b"WEBPVP8L" and view[20] == 0x2F:
        (bits,) = _VP8L.unpack_from(view, 21)
        mode, exact = ("RGBA", _NOTHING) if bits >> 28 & 1 else ("RGB", _RGB)
        return ImageHeader("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, mode, exact)
    return None


# ---- PNM: netpbm's P5 and P6, 8 bits a value, no comments ----

PNM_HEADER = re.compile(rb"P([56])\s(\d{1,9})\s(\d{1,9})\s255\s")


def _read_pnm(view: bytes | memoryview) -> ImageHeader | None:
    match = PNM_HEADER.match(view)
    if match is None or not int(match[2]) or not int(match[3]):
        return None
    mode, exact = ("RGB", _RGB) if match[1] == b"6" else ("L", _GRAY)
    return ImageHeader("PPM", int(match[2]), int(match[3]), mode, exact)


_READERS: dict[bytes, Callable[[bytes | memoryview], ImageHeader | None]] = {
    b"\xff\xd8": _read_jpeg,
    b"\x89P": _read_png,
    b"BM": _read_bmp,
    b"RI": _read_webp,
    b"P5": _read_pnm,
    b"P6": _read_pnm,
}
_MAGIC = (
    *((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG", "PNG"), (b"GIF8", "GIF"), (b"BM", "BMP"), (b"RIFF", "WebP")),
    *((b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"\0\0\0\x0cjP  ", "JPEG 2000"), (b"P5", "PNM"), (b"P6", "PNM")),
)
