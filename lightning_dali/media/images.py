"""Encoded images in the worker: is the file whole, is its size sane, and, only when told, its pixels.

Runs in the worker: no DALI, no CUDA. Headers are read in `image_headers`, pixels are packed for DALI in `pnm`.

An image goes one of two ways. Where `header.dali_decodes(mode)` is true and `check_complete` has no complaint, its
bytes travel as they are and DALI decodes them. Otherwise the worker decodes with PIL (`decode_image`): what the dataset
would have had, or an `ImageError`; the pixels travel as PNM. So DALI sees no file known to be cut, and a gray tail is
passed on by neither.
"""

import re
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dali.media.image_headers import (
    PNM_HEADER,
    Encoded,
    ImageError,
    ImageHeader,
    as_bytes,
    jpeg_scan_offset,
    pil_open,
)

MAX_PIXELS = 178_956_970
"""The most pixels an image may have by default: twice Pillow's `Image.MAX_IMAGE_PIXELS` (a quarter of a gigabyte of
24-bit pixels), where Pillow turns its warning into `DecompressionBombError` (`PIL.Image._decompression_bomb_check`)."""

_END_OF_IMAGE = b"\xff\xd9"
_IEND = b"\0\0\0\0IEND"


def check_size(header: ImageHeader, max_pixels: int | None = MAX_PIXELS) -> None:
    """Refuse an image whose header announces more pixels than allowed, before anything is allocated for it.

    Args:
        header: the image's header.
        max_pixels: the most pixels (H x W) allowed; None for no limit. What Pillow decodes is under Pillow's own limit
            (`PIL.Image.MAX_IMAGE_PIXELS`) as well.

    Raises:
        ImageError: the image is larger; names its size and the limit.
    """
    pixels = header.width * header.height
    if max_pixels is not None and pixels > max_pixels:
        size = f"{header.width} x {header.height} = {pixels:,} pixels"
        raise ImageError(f"{size} exceed max_pixels={max_pixels:,}: a decompression bomb, or raise the limit")


def check_complete(data: Encoded, header: ImageHeader) -> str | None:
    """Why an encoded image looks cut short, or None; costs under a microsecond for a file that is whole.

    A reason is a suspicion, not a verdict: decode such a file with `decode_image` and use *its* pixels (PIL reads a PNG
    that lacks only IEND, DALI refuses it). None is no promise either: damage in the middle is not looked for, nor are
    formats that DALI is never given.
    """
    view = as_bytes(data)
    if header.format in ("JPEG", "MPO"):
        return _check_jpeg(view)
    if header.format == "PNG":
        # The last chunk normally ends the file; look for it elsewhere only if it does not.
        whole = view[-12:-4] == _IEND or bytes(view).rfind(_IEND) >= 0
        return None if whole else "truncated PNG: ends without an IEND chunk"
    expected = _announced_bytes(view, header)
    if expected is not None and len(view) < expected:
        return f"truncated {header.format}: {len(view)} bytes where its header announces {expected}"
    return None


def decode_image(data: Encoded, mode: str | None = None) -> npt.NDArray[Any]:
    """Decode an image with PIL, as a dataset would have.

    Args:
        data: the encoded file.
        mode: the argument of PIL's `convert`, or None for no conversion.

    Returns:
        A writable array, (H, W) or (H, W, C), of what PIL holds, in native byte order: uint8, but uint16 for mode
        "I;16", int32 for "I", float32 for "F" and bool for "1". Nothing is narrowed unless `mode` asks for it
        (`ImageHeader.narrows` tells).

    Raises:
        ImageError: the file is cut or damaged. (Who sets `PIL.ImageFile.LOAD_TRUNCATED_IMAGES` allows partial images.)
    """
    view = as_bytes(data)
    if len(view) == 0:
        raise ImageError("empty file")
    try:
        with pil_open(BytesIO(view)) as image:
            image.load()
            pixels = np.array(image if mode is None or mode == image.mode else image.convert(mode))
    except Exception as error:  # PIL's plugins raise anything on a damaged file: OSError, SyntaxError, EOFError, ...
        # PIL names the file object and its address where it has no path: not the same words twice, so not kept.
        reason = re.sub(r" <_io\.BytesIO object at 0x\w+>", "", str(error)) or type(error).__name__
        raise ImageError(f"cannot be decoded: {reason}") from error
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _check_jpeg(view: bytes | memoryview) -> str | None:
    if view[-2:] == _END_OF_IMAGE:
        return None
    # Padding, junk or further pictures may follow the end marker. An EXIF thumbnail has one of its own, so search the
    # scans only; within their data 0xFF is always followed by 0x00 or a restart marker.
    start = jpeg_scan_offset(view)
    if start is not None and bytes(view[start:]).rfind(_END_OF_IMAGE) >= 0:
        return None
    return "truncated JPEG: ends without an end-of-image marker"


def _announced_bytes(view: bytes | memoryview, header: ImageHeader) -> int | None:
    """The length the header implies, for the formats whose decoder in DALI may get the file; None for the others."""
    if header.format == "WEBP":
        return 8 + int.from_bytes(view[4:8], "little")
    if header.format == "BMP" and header.exact:
        return 54 + (header.width * 3 + 3) // 4 * 4 * header.height  # rows are padded to 4 bytes
    if header.format == "PPM" and (match := PNM_HEADER.match(view)):
        return match.end() + header.width * header.height * (3 if header.mode == "RGB" else 1)
    return None
