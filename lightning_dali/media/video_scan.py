"""Make a `VideoIndex` by demuxing a video once; nothing is decoded but the first frame. Runs in the worker process.

Only where the container does not say in which order frames are shown (AVI and raw streams with B-frames) are all
frames decoded, once, to see it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av
import numpy as np

from lightning_dali.media.bitstream import Start, is_shown, nal_length_bytes, start_kind
from lightning_dali.media.video_facts import read_facts
from lightning_dali.media.video_index import Bools, Ints, PacketTable, VideoError, VideoIndex
from lightning_dali.media.video_mux import empty_file
from lightning_dali.media.video_open import DIRECT, Source, open_file, open_video, read_at

_REORDERING = {"h264", "hevc", "vvc", "mpeg4", "mpeg1video", "mpeg2video", "vc1", "wmv3", "msmpeg4v3", "rv30", "rv40"}
"""Codecs that may show frames in another order than they are decoded in."""
_GUESSED = {"h264", "hevc", "vvc"}
"""Codecs whose `has_b_frames` can be wrong before anything is decoded."""
_HEAD = 32
"""How many packets are kept to decode the first frame from."""
_UNKNOWN = int(np.iinfo(np.int64).min)


@dataclass
class _Scan:
    """What demuxing said: one row a packet, in decode order."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    """(pts, dts, position, size, start kind, shown, discarded, corrupt)."""
    head: list[Any] = field(default_factory=list)
    """The first packets from the first key frame on."""
    last_duration: int = 0
    truncated: bool = False


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
        pts, dts, positions, sizes, starts, shown, discarded, _ = np.array(scan.rows, dtype=np.int64).T
        facts = read_facts(container, stream, scan.head)
        if _must_decode(container, stream, pts):
            order, times = _order_by_decoding(source, stream, dts)
        else:
            times = pts if np.all(pts != _UNKNOWN) else _counted(stream, dts)
            order = _order_by_time(times, starts, shown == 1)
        _check_time_goes_on(times[starts > 0], stream.time_base)
        direct = _direct(source, container, stream, positions, sizes, starts)
        clock, ids = _clock(container, pts, dts, positions)
        tick, claimed = stream.time_base, stream.frames
    frames = order[discarded[order] == 0]
    ranks = np.full(len(pts), -1, dtype=np.int64)
    ranks[order] = np.arange(len(order))
    table = PacketTable(ranks=ranks, starts=starts * (ranks >= 0), clock=clock, ids=ids, **direct)
    return VideoIndex(
        pts=times[frames],
        time_base=tick,
        end_pts=int(times[frames[-1]]) + scan.last_duration if scan.last_duration and frames.size else None,
        frame_packets=frames,
        packets=table,
        header_num_frames=claimed,
        truncated=scan.truncated or (container.format.name == DIRECT and claimed > len(pts)),
        **facts,
    )


def _demux(container: Any, stream: Any) -> _Scan:
    codec = stream.codec_context.name
    length_bytes = nal_length_bytes(codec, stream.codec_context.extradata)
    scan = _Scan()
    try:
        for packet in container.demux(stream):
            if not packet.size:
                continue
            data = bytes(packet) if packet.is_keyframe or codec in ("vp8", "vp9") else b""
            kind = start_kind(codec, data, length_bytes) if packet.is_keyframe else Start.NONE
            times = (_UNKNOWN if t is None else t for t in (packet.pts, packet.dts, packet.pos))
            flags = (is_shown(codec, data) if data else True, packet.is_discard, packet.is_corrupt)
            scan.rows.append((*times, packet.size, *map(int, (kind, *flags))))
            if (kind or scan.head) and len(scan.head) < _HEAD:
                scan.head.append(packet)
            scan.last_duration = packet.duration or scan.last_duration
    except av.error.FFmpegError:
        scan.truncated = True
    while scan.rows and scan.rows[-1][-1]:  # the file ends in the middle of these
        scan.rows.pop()
        scan.truncated = True
    if not scan.rows:
        raise VideoError("zero frames")
    if not scan.head:
        raise VideoError("no key frame")
    return scan


def _must_decode(container: Any, stream: Any, pts: Ints) -> bool:
    """Whether only a decoder knows the display order: AVI has none of its own, raw streams have no times at all."""
    context = stream.codec_context
    reorders = context.name in _GUESSED or (context.name in _REORDERING and context.has_b_frames)
    return bool(reorders and (container.format.name == "avi" or np.any(pts == _UNKNOWN)))


def _order_by_time(pts: Ints, starts: Ints, shown: Bools) -> Ints:
    """The packets that yield a picture, in display order; those that nothing can decode are left out."""
    first = int(np.flatnonzero(starts)[0])
    decodable = shown & (np.arange(len(pts)) >= first)
    if starts[first] < Start.CLEAN:
        decodable &= pts >= pts[first]
    pictures = np.flatnonzero(decodable)
    return pictures[np.argsort(pts[pictures], kind="stable")]


def _order_by_decoding(source: Source, stream: Any, dts: Ints) -> tuple[Ints, Ints]:
    """The same, as a decoder shows them, and a time for each packet: the decode times, in display order."""
    order: list[int] = []
    with open_video(source) as (container, again):
        again.codec_context.thread_count = 1
        packets = (packet for packet in container.demux(again) if packet.size)
        for number, packet in zip(range(len(dts) + 1), [*_numbered(packets, len(dts)), None], strict=False):
            order.extend(_shown_by(again.codec_context, packet))
    del number
    found = np.array(order, dtype=np.int64)
    times = _counted(stream, dts)
    times[found] = np.sort(times[found])
    return found, times
