"""Make a `VideoIndex` by demuxing a video once; nothing is decoded but the first frame. Runs in the worker process.

Only where the container does not say in which order frames are shown (AVI and raw streams with B-frames) are all frames decoded,
once, to see it.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np

from lightning_dali.media.bitstream import Start, is_shown, nal_length_bytes, start_kind
from lightning_dali.media.video_index import Bools, Ints, PacketTable, VideoError, VideoIndex
from lightning_dali.media.video_open import DIRECT, Source, open_video, read_at, source_bytes

_IN_ORDER = {"vp8", "vp9", "av1", "mjpeg", "h263", "ffv1", "png", "gif", "prores", "rawvideo", "theora", "flv1", "dvvideo"}
"""Codecs that show frames in decode order."""
_ALWAYS_REORDER = {"h264", "hevc", "vvc"}
"""Codecs whose `has_b_frames` may be a guess before anything is decoded."""
_HEAD = 32
"""How many packets are kept to decode the first frame from."""
_NO_TIME = np.iinfo(np.int64).min


@dataclass
class _Scan:
    """What demuxing said of each packet, in decode order."""

    pts: list[int] = field(default_factory=list)
    dts: list[int] = field(default_factory=list)
    pos: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    discarded: list[bool] = field(default_factory=list)
    key_bytes: dict[int, bytes] = field(default_factory=dict)
    head: list[Any] = field(default_factory=list)
    last_duration: int = 0
    truncated: bool = False

    def add(self, packet: Any, codec: str, length_bytes: int) -> None:
        number = len(self.pts)
        kind = Start.NONE
        if packet.is_keyframe:
            data = bytes(packet)
            kind = start_kind(codec, data, length_bytes)
            if len(self.key_bytes) < 2:
                self.key_bytes[number] = data
        self.pts.append(_NO_TIME if packet.pts is None else packet.pts)
        self.dts.append(_NO_TIME if packet.dts is None else packet.dts)
        self.pos.append(-1 if packet.pos is None else packet.pos)
        self.sizes.append(packet.size)
        self.starts.append(int(kind))
        self.shown.append(codec not in ("vp8", "vp9") or is_shown(codec, bytes(packet)))
        self.discarded.append(packet.is_discard)
        self.last_duration = packet.duration or self.last_duration
        if kind or 0 < len(self.head) < _HEAD:
            self.head.extend([packet] if len(self.head) < _HEAD else [])


def build_index(source: Source) -> VideoIndex:
    """The index of a video, from its packets; the header's word on the number of frames is not taken.

    Args:
        source: a path or a whole file.

    Raises:
        VideoError: not a video, no video stream, zero frames, no frame that decodes, several recordings joined.
        OSError: the file cannot be opened.
    """
    with open_video(source) as (container, stream):
        scan = _demux(container, stream)
        if not scan.pts:
            raise VideoError("zero frames")
        first = next((i for i, kind in enumerate(scan.starts) if kind), None)
        if first is None:
            raise VideoError("no key frame")
        facts = _facts(container, stream, scan)
        order, times = _display_order(source, container, stream, scan, first)
        header = _header(source, container, stream, scan)
    return VideoIndex(**_numbered(scan, order, times), **facts, header=header, source_bytes=source_bytes(source))
