"""Cut a clip's packets for a decoder that takes them bare, and decode such packets. Runs in the worker process.

A clip that the hardware refuses is decoded from its packets in the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from lightning_dali.media.bitstream import parameter_sets, with_start_codes
from lightning_dali.media.video_cut import _gather
from lightning_dali.media.video_index import Ints, VideoError, VideoIndex
from lightning_dali.media.video_open import Source, new_packet
from lightning_dali.media.video_packets import open_packets
from lightning_dali.media.video_pictures import Pixels, RGBConverter, pictures
from lightning_dali.media.video_plan import check_frames


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
        if index.codec in ("h264", "hevc"):
            data = [with_start_codes(one, packets.length_bytes) for one in data]
            # FFmpeg's own filter puts them before IDR pictures only, but a clip may begin with another one (open GOP)
            extradata = packets.template.codec_context.extradata
            data[0] = parameter_sets(index.codec, extradata, packets.length_bytes) + data[0]
    ranks = index.packets.ranks[list(kept)]
    shown = np.sort(ranks[ranks >= 0])
    positions = np.searchsorted(shown, index.packets.ranks[index.frame_packets[wanted]])
    return PacketCut(data, np.where(wanted < 0, -1, positions), len(shown))


def decode_packets(
    packets: Sequence[bytes | npt.NDArray[np.uint8]],
    frames: npt.ArrayLike,
    *,
    codec: str,
    size: tuple[int, int],
    rotation: int = 0,
) -> Pixels:
    """The RGB pixels of some of the frames that bare packets hold, (T, H, W, 3) uint8, upright.

    For clips that a hardware decoder refuses, where only their packets are at hand.

    Args:
        packets: as `cut_packets` gives them.
        frames: positions among the decoded frames; -1 gives a black one.
        codec: FFmpeg's name.
        size: (H, W) as stored, before `rotation`.
        rotation: degrees counterclockwise by which frames are turned.

    Raises:
        VideoError: a wanted frame does not decode, or has another size.
    """
    wanted = np.asarray(frames, dtype=np.int64)
    convert = RGBConverter(rotation, None)
    height, width = size if rotation % 180 == 0 else size[::-1]
    pixels = np.zeros((len(wanted), height, width, 3), dtype=np.uint8)
    context: Any = av.CodecContext.create(codec, "r")
    # else FFmpeg guesses how far H.264 reorders, and gives the first frames too early
    context.options = {"strict": "1"}
    numbered = ((number, new_packet(bytes(packet))) for number, packet in enumerate(packets))
    found = 0
    for position, (_, frame) in enumerate(pictures(context, numbered)):
        if (frame.height, frame.width) != size:
            raise VideoError(f"changes size on the way: {size[1]}x{size[0]}, then {frame.width}x{frame.height}")
        slots = np.flatnonzero(wanted == position)
        if slots.size:
            pixels[slots] = convert(frame)
            found += slots.size
    if found != np.count_nonzero(wanted >= 0):
        raise VideoError(f"{np.count_nonzero(wanted >= 0) - found} frames do not decode: damaged or truncated")
    return pixels
