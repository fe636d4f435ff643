"""Cut a clip's packets for a decoder that takes them bare. Runs in the worker process."""

from __future__ import annotations

from dataclasses import dataclass

import av
import numpy as np
import numpy.typing as npt

from lightning_dali.media.video_cut import _gather
from lightning_dali.media.video_index import Ints, VideoIndex
from lightning_dali.media.video_open import Source, new_packet
from lightning_dali.media.video_packets import open_packets
from lightning_dali.media.video_plan import check_frames

_FILTERS = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
"""FFmpeg's filters that put start codes and parameter sets into packets that lack them (and leave the others alone)."""


@dataclass(frozen=True, eq=False)
class PacketCut:
    """A clip's packets in decode order, and where its frames are among what they decode to."""

    packets: list[bytes]
    """With start codes and parameter sets (H.264, HEVC), else as in the file."""
    frames: Ints
    """(T,) position, in display order, of each wanted frame among the decoded ones; -1 stays -1 (padding)."""
    num_frames: int
    """How many frames the packets decode to."""


def cut_packets(source: Source, index: VideoIndex, frames: npt.ArrayLike) -> PacketCut:
    """The packets that some frames need, without a file around them; like `cut`, and cheaper.

    Args:
        source: a path or a whole file, the one that `index` was made from.
        index: from `build_index` or `IndexCache`.
        frames: frame numbers in any order, also repeated; -1 for padding.

    Raises:
        ValueError: no frames, or a frame that the video has not.
        VideoError: the file has changed or is truncated.
        OSError: the file cannot be opened.
    """
    wanted = check_frames(index, frames)
    with open_packets(source, index) as packets:
        kept = _gather(index, packets, wanted)
        data = list(kept.values())
        if index.codec in _FILTERS:
            bitstream_filter = av.bitstream.BitStreamFilterContext(_FILTERS[index.codec], packets.template)
            data = [bytes(out) for one in data for out in bitstream_filter.filter(new_packet(one))]
            data += [bytes(out) for out in bitstream_filter.filter(None)]
    ranks = index.packets.ranks[list(kept)]
    shown = np.sort(ranks[ranks >= 0])
    positions = np.searchsorted(shown, index.packets.ranks[index.frame_packets[wanted]])
    return PacketCut(data, np.where(wanted < 0, -1, positions), len(shown))
