"""Choose the packets that some frames need, and no others. Runs in the worker process."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_dali.media.bitstream import Start, reference_level
from lightning_dali.media.video_index import Ints, VideoIndex

_SKIP = 16
"""How many packets in a row must be of no use before reading starts anew after them."""


@dataclass(frozen=True)
class Segment:
    """Packets [first, stop) in decode order; decoding starts at the first."""

    first: int
    stop: int
    keep_leading: bool
    """Whether frames that are shown before the first packet's are wanted."""


def check_frames(index: VideoIndex, frames: npt.ArrayLike) -> Ints:
    """The frames as an int64 array.

    Raises:
        ValueError: one is neither -1 (padding) nor a frame of the video, or there is nothing but padding.
    """
    numbers = np.asarray(frames, dtype=np.int64)
    if numbers.ndim != 1 or not np.any(numbers >= 0):
        raise ValueError(f"frames must be a list with at least one frame number, got {numbers.tolist()}")
    if numbers.min() < -1 or numbers.max() >= index.num_frames:
        raise ValueError(f"frames must lie in [0, {index.num_frames}) or be -1 for padding, got {numbers.tolist()}")
    return numbers


def plan(index: VideoIndex, frames: Ints) -> list[Segment]:
    """The stretches of packets that the frames need, in decode order; padding (-1) needs none.

    A stretch runs from a key frame to the last wanted frame of its group. Stretches less than 16 packets apart are one,
    and so are those that may not be joined otherwise (H.264 key frames that are not IDR pictures).
    """
    table = index.packets
    wanted = index.frame_packets[np.unique(frames[frames >= 0])]
    groups = np.searchsorted(table.ranks[table.starts], table.ranks[wanted], side="right") - 1
    groups = np.minimum(groups, np.searchsorted(table.starts, wanted, side="right") - 1)  # for times that make no sense
    segments: list[Segment] = []
    for group in np.unique(groups).tolist():
        start = max(group, 0)
        first, stop = int(table.starts[start]), int(wanted[groups == group].max()) + 1
        last = segments[-1] if segments else None
        if last and (first - last.stop < _SKIP or table.start_kinds[start] < Start.JOIN):
            segments[-1] = Segment(last.first, max(stop, last.stop), last.keep_leading)
        else:
            segments.append(Segment(first, stop, group < 0))
    return segments


def starts_open(index: VideoIndex, frames: Ints) -> bool:
    """Whether decoding starts at an H.264 picture that is no IDR picture (open groups of pictures).

    FFmpeg shows what follows it, and so does NVDEC from bare packets; DALI 2.4's decoder does not.
    """
    if index.codec != "h264":
        return False
    first = plan(index, frames)[0].first
    start = int(np.searchsorted(index.packets.starts, first))
    return bool(index.packets.start_kinds[start] < Start.JOIN)


def needed(index: VideoIndex, segment: Segment, packets: list[bytes], length_bytes: int, wanted: set[int]) -> list[int]:
    """The numbers of a segment's packets that are worth decoding.

    Left out are pictures shown before the segment's first (they refer to what is not there), and pictures that are
    neither wanted nor referred to by others: B-frames, a third to a half of what a stride of four passes over.

    Args:
        index: the video's.
        segment: where the packets lie.
        packets: all of them.
        length_bytes: see `bitstream.nal_length_bytes`.
        wanted: the numbers of the packets whose pictures are wanted.
    """
    ranks = index.packets.ranks[segment.first : segment.stop].tolist()
    levels = [reference_level(index.codec, packet, length_bytes) for packet in packets]
    top = max(layer for layer, _ in levels)
    keep = []
    for number, rank, (layer, referred) in zip(range(segment.first, segment.stop), ranks, levels, strict=True):
        leading = 0 <= rank < ranks[0] and not segment.keep_leading
        if not leading and (number in wanted or referred or layer < top):
            keep.append(number)
    return keep
