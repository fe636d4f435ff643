"""Cut the packets of a clip out of a video. Runs in the worker process.

What comes out is a small file of its own, for a decoder in another process (NVDEC, DALI). Its frames are chosen by
their position in it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_dali.media.bitstream import parameter_sets, with_joint
from lightning_dali.media.video_index import Ints, VideoIndex
from lightning_dali.media.video_mux import Parcel, write_file
from lightning_dali.media.video_open import Source
from lightning_dali.media.video_packets import Packets, open_packets
from lightning_dali.media.video_plan import check_frames, needed, plan
from lightning_dali.media.video_sps import CodedPicture, Window, parameter_units, uncroppable


@dataclass(frozen=True, eq=False)
class CutClip:
    """A clip's packets as a file, and where its frames are in it."""

    data: bytes
    """A whole file, MP4 (Matroska for codecs that MP4 cannot hold), with one constant-rate video stream, not
    rotated."""
    frames: Ints
    """(T,) position in the file, in display order, of each wanted frame; -1 stays -1 (padding)."""
    num_frames: int
    """How many frames the file has."""
    codec: str
    """FFmpeg's name."""
    width: int
    """Pixels, as in the file's header: what its frames measure before the video's `rotation`."""
    height: int
    """Like `width`."""
    window: Window | None = None
    """top, left, height, width of what is to be shown of its frames, where the file was uncropped; None for all."""


def cut(source: Source, index: VideoIndex, frames: npt.ArrayLike, *, uncrop: bool = False) -> CutClip:
    """The packets that some frames need, as a small file; costs a millisecond, however long the video.

    Decoding starts at the last key frame before each wanted frame and ends with it. Frames far apart give several such
    stretches, joined where the codec allows it. Pictures that nothing needs are left out.

    Args:
        source: a path or a whole file, the one that `index` was made from.
        index: from `build_index` or `IndexCache`.
        frames: frame numbers in any order, also repeated; -1 for padding.
        uncrop: H.264 only: where it can be (`video_sps.uncroppable`) make the file show its whole coded picture, and say
            in `CutClip.window` what is to be cut out of it. DALI keeps a decoder from clip to clip only where the size
            that is shown is the coded one.

    Raises:
        ValueError: no frames, a frame that the video has not, `uncrop` for another codec.
        VideoError: the file has changed or is truncated, or its codec fits no format.
        OSError: the file cannot be opened.
    """
    wanted = check_frames(index, frames)
    if uncrop and index.codec != "h264":
        raise ValueError(f"uncrop is for h264, the video is {index.codec}")
    with open_packets(source, index) as packets:
        kept = _gather(index, packets, wanted)
        ranks = index.packets.ranks[list(kept)]
        shown = np.sort(ranks[ranks >= 0])
        parcels = _timed(index, kept, shown)
        picture = _whole_picture(index, packets, kept) if uncrop and index.cropped else None
        size = (picture.height, picture.width) if picture else (index.height, index.width)
        data = write_file(packets.template, parcels, index, uncrop=size if picture else None)
    positions = np.searchsorted(shown, index.packets.ranks[index.frame_packets[wanted]])
    return CutClip(
        data,
        np.where(wanted < 0, -1, positions),
        num_frames=len(shown),
        codec=index.codec,
        width=size[1],
        height=size[0],
        window=picture.window if picture else None,
    )


def _whole_picture(index: VideoIndex, packets: Packets, kept: dict[int, bytes]) -> CodedPicture | None:
    """What `uncroppable` says of a clip."""
    header = parameter_sets(index.codec, packets.template.codec_context.extradata, packets.length_bytes)
    units = parameter_units(header, 0)
    if not units:
        return None  # all in packets: the header could not be rewritten
    for data in kept.values():
        units |= parameter_units(data, packets.length_bytes)
    return uncroppable(index, units)


def _gather(index: VideoIndex, packets: Packets, wanted: Ints) -> dict[int, bytes]:
    """The needed packets by number, in decode order, fit to follow one another."""
    pictures = set(index.frame_packets[wanted[wanted >= 0]].tolist())
    kept: dict[int, bytes] = {}
    for segment in plan(index, wanted):
        data = packets.read(segment)
        if kept:
            data[0] = with_joint(index.codec, data[0], packets.length_bytes)
        for number in needed(index, segment, data, packets.length_bytes, pictures):
            kept[number] = data[number - segment.first]
    return kept


def _timed(index: VideoIndex, kept: dict[int, bytes], shown: Ints) -> list[Parcel]:
    """The packets with times at a constant rate; a packet without a picture has the time of its place in decode
    order."""
    places = np.arange(len(kept))
    ranks = index.packets.ranks[list(kept)]
    pts = places if np.any(ranks < 0) else np.searchsorted(shown, ranks)
    delay = int((places - pts).max())
    # Only the first is marked as a key frame: a decoder that seeks must not land on one whose leading frames it wants.
    return [
        Parcel(data, int(time) + delay, place, place == 0)
        for place, (data, time) in enumerate(zip(kept.values(), pts, strict=True))
    ]
