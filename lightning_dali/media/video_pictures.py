"""Decoded pictures with the number of the packet each came from, and their RGB pixels. Runs in the worker process."""

from collections.abc import Iterable, Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def pictures(context: Any, numbered_packets: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """(packet number, frame) in display order, from one decoder on one thread.

    The number travels through the decoder in the place of the time, so that it does not matter what times a file has.
    Packets that do not decode yield nothing.
    """
    if not context.is_open:
        context.thread_count = 1
    for number, packet in numbered_packets:
        packet.pts = packet.dts = number
        yield from _decode(context, packet)
    yield from _decode(context, None)


def _decode(context: Any, packet: Any) -> Iterator[tuple[int, Any]]:
    try:
        frames = context.decode(packet)
    except av.error.FFmpegError:
        return
    for frame in frames:
        yield frame.pts, frame


class RGBConverter:
    """Turns decoded frames of one size into RGB, upright, maybe resized; one swscale context, one thread.

    Colour range and matrix are the frame's own; unspecified ones are limited and BT.601 (swscale's defaults, so PyAV's
    and torchcodec's). Within 2 of 255 of the formulas of BT.601, BT.709 and BT.2020 in flat areas; without `size`
    equal, bit for bit, to PyAV's `frame.to_ndarray(format="rgb24")`. Chroma is not interpolated at the frame's own
    size, as there.
    """

    def __init__(self, rotation: int, size: tuple[int, int] | None) -> None:
        """Convert to `size`, (H, W) after `rotation` (degrees counterclockwise), or to the frame's own size."""
        self._turns = rotation // 90
        self._size = size if size is None or self._turns % 2 == 0 else (size[1], size[0])
        self._scaler = av.video.reformatter.VideoReformatter()

    def __call__(self, frame: Any) -> Pixels:
        """The (H, W, 3) uint8 pixels of a frame."""
        height, width = self._size or (frame.height, frame.width)
        rgb = self._scaler.reformat(frame, width=width, height=height, format="rgb24", threads=1)
        return np.rot90(rgb.to_ndarray(), self._turns)
