"""Make a `VideoIndex` by demuxing a video once; nothing is decoded but the first frame. Runs in the worker process.

Only where the container does not say in which order frames are shown (AVI and raw streams with B-frames) are all
frames decoded, once, to see it.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import Any

import av
import numpy as np

from lightning_dali.media.bitstream import Start, format_signature, is_shown, nal_length_bytes, start_kind
from lightning_dali.media.video_facts import read_facts
from lightning_dali.media.video_index import Bools, Ints, PacketTable, VideoError, VideoIndex
from lightning_dali.media.video_mux import empty_file, fits_mp4
from lightning_dali.media.video_open import (
    DIRECT,
    Source,
    codec_name,
    demux,
    open_file,
    open_video,
    read_at,
    source_bytes,
)
from lightning_dali.media.video_pictures import pictures

_REORDERING = {"h264", "hevc", "vvc", "mpeg4", "mpeg1video", "mpeg2video", "vc1", "wmv3", "msmpeg4v3", "rv30", "rv40"}
"""Codecs that may show frames in another order than they are decoded in."""
_GUESSED = {"h264", "hevc", "vvc"}
"""Codecs whose `has_b_frames` can be wrong before anything is decoded."""
_HEAD = 32
"""How many packets are kept to decode the first frame from."""
_SAMPLES = 4
"""How many key packets are compared with the file."""
_POSITION, _START, _DISCARDED = 2, 4, 6
"""Where they are in a row of `_Scan.rows`."""
_UNKNOWN = int(np.iinfo(np.int64).min)


@dataclass
class _Scan:
    """What demuxing said: one row a packet, in decode order."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    """(pts, dts, position, size, start kind, shown, discarded, corrupt)."""
    head: list[Any] = field(default_factory=list)
    """The first packets from the first key frame on."""
    formats: dict[bytes, tuple[int, Any]] = field(default_factory=dict)
    """The first key packet, with its number, for each `format_signature`."""
    samples: list[tuple[int, bytes]] = field(default_factory=list)
    """A few packets with their numbers, to compare with the file."""
    last_duration: int = 0
    truncated: bool = False

    def note_key(self, packet: Any, data: bytes, signature: bytes) -> None:
        """Keep what later checks need of a key frame's packet."""
        self.formats.setdefault(signature, (len(self.rows), packet))
        if len(self.samples) < _SAMPLES:
            self.samples.append((len(self.rows), data))


def build_index(source: Source) -> VideoIndex:
    """The index of a video, from its packets; the header's word on the number of frames is not taken.

    Args:
        source: a path or a whole file.

    Raises:
        VideoError: not a video, no video stream, zero frames, no frame that decodes, changing size, joined recordings.
        OSError: the file cannot be opened.
    """
    with open_video(source) as (container, stream):
        scan = _demux(container, stream)
        facts = read_facts(container, stream, scan.head)
        _check_sizes(stream, scan.formats, (facts["width"], facts["height"]))
        order, times, table = _packet_table(source, container, stream, scan)
        discarded = np.array([row[_DISCARDED] for row in scan.rows])
        frames = order[discarded[order] == 0]
        return VideoIndex(
            pts=times[frames],
            time_base=stream.time_base,
            end_pts=int(times[frames[-1]]) + scan.last_duration if frames.size and scan.last_duration else None,
            frame_packets=frames,
            packets=table,
            header=empty_file(stream, facts["codec"]) if table.positions.size else b"",
            source_bytes=source_bytes(source),
            header_num_frames=stream.frames,
            truncated=scan.truncated or (container.format.name == DIRECT and stream.frames > len(scan.rows)),
            **facts,
        )


def _packet_table(source: Source, container: Any, stream: Any, scan: _Scan) -> tuple[Ints, Ints, PacketTable]:
    """The packets that yield pictures, in display order; a time for every packet; and all that reading them needs."""
    pts, dts, positions, sizes, kinds, shown, _, _ = np.array(scan.rows, dtype=np.int64).T
    if _must_decode(container, stream, pts):
        order, times = _order_by_decoding(source, stream, dts)
    else:
        times = pts if np.all(pts != _UNKNOWN) else _counted(stream, dts)
        order = _order_by_time(times, kinds, shown == 1)
    ranks = np.full(len(pts), -1, dtype=np.int64)
    ranks[order] = np.arange(len(order))
    starts = np.flatnonzero((kinds > 0) & (ranks >= 0))
    if not starts.size:
        raise VideoError("no key frame that decodes")
    _check_time_goes_on(times[starts], stream.time_base)
    clock, ids = _clock(container, pts, dts, positions)
    if not _stored(source, container, stream, scan):
        positions = np.zeros(0, dtype=np.int64)
    return order, times, PacketTable(ranks, starts, kinds[starts], ids, clock, positions, sizes)


def _demux(container: Any, stream: Any) -> _Scan:
    codec = codec_name(stream)
    length_bytes = nal_length_bytes(codec, stream.codec_context.extradata)
    scan = _Scan()
    try:
        for packet in demux(container, stream):
            data = bytes(packet) if packet.is_keyframe or codec in ("vp8", "vp9") else b""
            kind = start_kind(codec, data, length_bytes) if packet.is_keyframe else Start.NONE
            if kind:
                scan.note_key(packet, data, format_signature(codec, data, length_bytes))
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
        raise VideoError(f"truncated: zero frames of {stream.frames}" if stream.frames else "zero frames")
    if not any(row[_START] for row in scan.rows):
        raise VideoError("no key frame")
    scan.samples = [(number, data) for number, data in scan.samples if number < len(scan.rows)]
    return scan


def _check_sizes(stream: Any, formats: dict[bytes, tuple[int, Any]], size: tuple[int, int]) -> None:
    """Decode one key frame of each format that the packets announce."""
    for number, packet in list(formats.values())[1:]:
        stream.codec_context.flush_buffers()
        for _, frame in pictures(stream.codec_context, [(number, packet)]):
            if (frame.width, frame.height) != size:
                was, now = f"{size[0]}x{size[1]}", f"{frame.width}x{frame.height}"
                raise VideoError(f"changes size on the way: {was}, then {now} at packet {number}")


def _must_decode(container: Any, stream: Any, pts: Ints) -> bool:
    """Whether only a decoder knows the display order: AVI has none of its own, raw streams have no times at all."""
    codec = codec_name(stream)
    reorders = codec in _GUESSED or (codec in _REORDERING and stream.codec_context.has_b_frames)
    return bool(reorders and (container.format.name == "avi" or np.any(pts == _UNKNOWN)))


def _order_by_time(pts: Ints, starts: Ints, shown: Bools) -> Ints:
    """The packets that yield a picture, in display order; those that nothing can decode are left out."""
    first = int(np.flatnonzero(starts)[0])
    decodable = shown & (np.arange(len(pts)) >= first)
    if starts[first] < Start.CLEAN:
        decodable &= pts >= pts[first]
    found = np.flatnonzero(decodable)
    order: Ints = found[np.argsort(pts[found], kind="stable")]
    return order


def _order_by_decoding(source: Source, stream: Any, dts: Ints) -> tuple[Ints, Ints]:
    """The same as a decoder gives them, and a time for each packet: the decode times, dealt out in display order."""
    with open_video(source) as (container, again):
        packets = islice(demux(container, again), len(dts))
        shown = dict.fromkeys(number for number, _ in pictures(again.codec_context, enumerate(packets)))
    order = np.array([*shown], dtype=np.int64)  # damage can make one packet show twice
    times = _counted(stream, dts)
    times[order] = np.sort(times[order])
    return order, times


def _counted(stream: Any, dts: Ints) -> Ints:
    """A time for each packet where the container has none: when it is decoded, else by the frame rate."""
    if np.all(dts != _UNKNOWN):
        return np.array(dts, dtype=np.int64)
    rate = Fraction(stream.average_rate or stream.codec_context.framerate or 25)
    ticks = [int(number / (rate * stream.time_base)) for number in range(len(dts))]
    return np.array(ticks, dtype=np.int64)


def _check_time_goes_on(key_times: Ints, tick: Fraction) -> None:
    back = np.flatnonzero(np.diff(key_times) < 0)
    if back.size:
        seconds = float((key_times[back[0]] - key_times[back[0] + 1]) * tick)
        raise VideoError(
            f"time jumps back by {seconds:.3f} s at key frame {back[0] + 1} (recordings joined?): remux it"
        )


def _clock(container: Any, pts: Ints, dts: Ints, positions: Ints) -> tuple[str, Ints]:
    """What names a packet for good: AVI computes its pts as it goes, so there it is dts."""
    clocks = [("pts", pts), ("dts", dts), ("pos", positions)]
    for name, ids in clocks[1:] if container.format.name == "avi" else clocks:
        if ids.min() > (-1 if name == "pos" else _UNKNOWN) and len(np.unique(ids)) == len(ids):
            return name, ids
    return "", np.zeros(0, dtype=np.int64)


def _stored(source: Source, container: Any, stream: Any, scan: _Scan) -> bool:
    """Whether the packets lie in the file as they are (as in MP4 and MOV), and can be read without FFmpeg."""
    if container.format.name != DIRECT or not fits_mp4(codec_name(stream)):
        return False
    with open_file(source) as file:
        return all(
            scan.rows[n][_POSITION] >= 0 and read_at(file, scan.rows[n][_POSITION], len(data)) == data
            for n, data in scan.samples
        )
