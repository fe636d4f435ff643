"""Raw pixels as a file that DALI's image decoder reads without loss: netpbm's binary PGM (gray) and PPM (RGB).

Runs in the worker. An image that PIL had to decode travels in the same encoded stream as the others; DALI copies it.
Layouts: https://netpbm.sourceforge.net/doc/ppm.html and pgm.html.
"""

import numpy as np
import numpy.typing as npt


def pnm_size(height: int, width: int, channels: int) -> int:
    """The number of bytes of an (H, W, C) uint8 image as PGM (C = 1) or PPM (C = 3)."""
    return len(_pnm_header(height, width, channels)) + height * width * channels


def write_pnm_into(buffer: memoryview | npt.NDArray[np.uint8], pixels: npt.NDArray[np.uint8]) -> int:
    """Write an image at the start of `buffer` (a slab's slice, say) and return the number of bytes written.

    Args:
        buffer: writable bytes, at least `pnm_size` of them.
        pixels: uint8, (H, W), (H, W, 1) or (H, W, 3); need not be contiguous.

    Raises:
        ValueError: other shape or dtype, or too small a buffer.
    """
    if pixels.dtype != np.uint8:
        raise ValueError(f"PNM here holds uint8; got {pixels.dtype}: send such pixels as an array instead")
    if pixels.ndim not in (2, 3):
        raise ValueError(f"expected (H, W) or (H, W, C) pixels; got shape {pixels.shape}")
    height, width = pixels.shape[:2]
    header = _pnm_header(height, width, pixels.shape[2] if pixels.ndim == 3 else 1)
    size = len(header) + pixels.size
    target = np.frombuffer(buffer, np.uint8)
    if len(target) < size:
        raise ValueError(f"an image of shape {pixels.shape} takes {size} bytes; the buffer has {len(target)}")
    target[: len(header)] = np.frombuffer(header, np.uint8)
    target[len(header) : size].reshape(pixels.shape)[...] = pixels
    return size


def encode_pnm(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Encode uint8 pixels, (H, W), (H, W, 1) or (H, W, 3), as a PGM or PPM file of bytes; see `write_pnm_into`."""
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    size = pnm_size(pixels.shape[0], pixels.shape[1], channels) if pixels.ndim in (2, 3) else 0
    encoded = np.empty(size, np.uint8)
    write_pnm_into(encoded, pixels)
    return encoded


def _pnm_header(height: int, width: int, channels: int) -> bytes:
    if channels not in (1, 3):
        raise ValueError(f"PNM holds 1 (gray) or 3 (RGB) channels; got {channels}: send them as an array instead")
    if height < 1 or width < 1:
        raise ValueError(f"an image has at least one pixel; got height={height}, width={width}")
    return b"P%d\n%d %d\n255\n" % (6 if channels == 3 else 5, width, height)
