"""Write packets into a file in memory. Runs in the worker process."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

import av

from lightning_dali.media.bitstream import nal_length_bytes
from lightning_dali.media.video_index import VideoError, VideoIndex
from lightning_dali.media.video_open import new_packet
from lightning_dali.media.video_sps import all_shown, header_all_shown

_MP4_CODECS = {"h264", "hevc", "vvc", "av1", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "mjpeg"}
"""What FFmpeg's MP4 muxer takes and decoders expect there."""
_MOV_CODECS = {"h263", "prores", "dnxhd"}
"""What only its MOV muxer takes. Everything else goes into Matroska."""
_FRAME_SECONDS = Fraction(1, 30)
"""About how long each frame of a cut lasts: all the same, so that a decoder that dislikes odd frame rates sees none."""
_UPRIGHT = b"".join(n.to_bytes(4, "big") for n in (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30))
"""The matrix of an MP4 track that is not rotated (ISO/IEC 14496-12, 8.3.2)."""


@dataclass(frozen=True)
class Parcel:
    """One packet on its way into a file."""

    data: bytes
    pts: int
    """In frames."""
    dts: int
    """In frames."""
    is_keyframe: bool


def fits_mp4(codec: str) -> bool:
    """Whether a codec goes into an MP4 or MOV rather than Matroska."""
    return codec in _MP4_CODECS or codec in _MOV_CODECS


def empty_file(template: Any, codec: str) -> bytes:
    """An MP4 or MOV without packets that carries the codec parameters of an open stream, and no rotation."""
    buffer = BytesIO()
    with _output(buffer, template, codec, "empty_moov") as (output, _):
        output.start_encoding()
    return _upright(buffer.getvalue())


def write_file(
    template: Any, parcels: Iterable[Parcel], index: VideoIndex, *, uncrop: tuple[int, int] | None = None
) -> bytes:
    """A file with these packets, in decode order, as its only stream; without rotation.

    Args:
        template: an open stream with the packets' codec parameters.
        parcels: the packets.
        index: the video's: its codec decides the format (MP4, or Matroska for what MP4 cannot hold), its size goes into
            the header.
        uncrop: H.264 only: the size (H, W) of the coded picture, all of which the stream then shows and the header says.

    Raises:
        VideoError: no format here holds the codec.
    """
    buffer = BytesIO()
    length_bytes = nal_length_bytes(index.codec, template.codec_context.extradata)
    with _output(buffer, template, index.codec) as (output, stream):
        context, tick = stream.codec_context, template.time_base
        context.height, context.width = uncrop or (index.height, index.width)
        context.pix_fmt = index.pix_fmt
        if uncrop:  # without FFmpeg's h264_metadata, which gives nothing usable for transport streams
            context.extradata = header_all_shown(context.extradata, length_bytes)
        step = max(1, round(_FRAME_SECONDS / tick))
        for parcel in parcels:
            packet = new_packet(all_shown(parcel.data, length_bytes) if uncrop else parcel.data)
            packet.pts, packet.dts, packet.duration = parcel.pts * step, parcel.dts * step, step
            packet.time_base = tick
            packet.is_keyframe, packet.stream = parcel.is_keyframe, stream
            output.mux_one(packet)
    return _upright(buffer.getvalue())


@contextmanager
def _output(buffer: BytesIO, template: Any, codec: str, movflags: str = "") -> Iterator[tuple[Any, Any]]:
    """An output container and its stream; MP4 without an edit list, whose handling differs between decoders."""
    muxer = "mp4" if codec in _MP4_CODECS else "mov" if codec in _MOV_CODECS else "matroska"
    options = {} if muxer == "matroska" else {"use_editlist": "0"} | ({"movflags": movflags} if movflags else {})
    try:
        with av.open(buffer, "w", format=muxer, options=options) as output:
            yield output, output.add_stream_from_template(template, opaque=True)
    except (av.error.FFmpegError, ValueError) as error:
        raise VideoError(f"no format to carry {codec} in: {error}") from error


def _upright(data: bytes) -> bytes:
    """The file with its track's matrix set to no rotation; Matroska, which seldom has one, unchanged."""
    box = data.rfind(b"tkhd")
    if box < 0 or data[4:8] != b"ftyp":
        return data
    matrix = box + 4 + (52 if data[box + 4] else 40)  # version 1 has three 64-bit fields
    if data[matrix : matrix + len(_UPRIGHT)] == _UPRIGHT:
        return data
    return data[:matrix] + _UPRIGHT + data[matrix + len(_UPRIGHT) :]
