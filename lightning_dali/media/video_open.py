"""Open a video for reading, and say in a few words why it cannot be. Runs in the worker process."""

import contextlib
import os
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import av

from lightning_dali.media.video_index import VideoError

Source = str | os.PathLike[str] | bytes
"""A path on disk, or a whole encoded file."""

DIRECT = "mov,mp4,m4a,3gp,3g2,mj2"
"""FFmpeg's name for the formats whose packets lie in the file as they are."""

_SEALED = {"protocol_whitelist": "file"}
"""A file that is a playlist must not make a worker fetch something."""
_QUICK_DECODE = {"skip_frame": "all"}
_QUICK_PROBE = {"probesize": "32", "analyzeduration": "1"}
"""Options that keep FFmpeg from decoding a frame while it opens a file: 22 ms for H.264 at 1920x1080, else 0.5 ms."""
_QUICK_FORMATS = (DIRECT, "matroska,webm")
"""Formats whose header says all that demuxing needs."""

# Before PyAV 19 metadata that is not UTF-8 was an error by default; since then there is no such argument.
_LENIENT: dict[str, Any] = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}

_NOT_VIDEOS = ("image2", "tty", "bin", "xbin", "adf", "idf")
"""Demuxers that make a video stream of a picture or of any text."""
_PLAYLISTS = ("hls", "dash", "concat", "sdp", "imf")
"""Demuxers that go and open other files."""
_MAGICS = (b"\x1aE\xdf\xa3", b"RIFF")
"""How Matroska and AVI begin."""
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")


@contextlib.contextmanager
def open_video(source: Source, *, container: str | None = None) -> Iterator[tuple[Any, Any]]:
    """The open PyAV container of a source and its video stream, closed at the end of the `with` block.

    Args:
        source: a path or a whole file.
        container: the format, where an index has told it; MP4 and Matroska are then opened without decoding anything.

    Raises:
        VideoError: not a video, no video stream, encrypted, its index cut off.
        OSError: the file cannot be opened.
    """
    quick = container in _QUICK_FORMATS
    name = container.split(",")[0] if quick and container else None
    # `options` only for files known to be good: before PyAV 18 a file without streams crashes the process with them.
    options = {"options": _QUICK_DECODE} if quick else {}
    probe = _SEALED | (_QUICK_PROBE if quick else {})
    with open_file(source) as file:  # also where PyAV opens by name: its errors are not the usual ones
        encrypted = not quick and _is_encrypted(file)
        file.seek(0)
        name_or_file = file if isinstance(source, bytes) else f"file:{os.path.abspath(source)}"
        try:
            opened = av.open(name_or_file, format=name, container_options=probe, **options, **_LENIENT)
        except (av.error.FFmpegError, ValueError) as error:
            raise VideoError(_why_not(file, error)) from error
        with opened:
            stream = video_stream(opened)
            if encrypted:
                raise VideoError(f"encrypted ({codec_name(stream)})")
            yield opened, stream


@contextlib.contextmanager
def open_file(source: Source) -> Iterator[Any]:
    """A seekable binary file, without a buffer: it is read at a few places only."""
    with BytesIO(source) if isinstance(source, bytes) else open(source, "rb", buffering=0) as file:
        yield file


def read_at(file: Any, position: int, size: int) -> bytes:
    """`size` bytes from a place in a file; fewer at its end."""
    file.seek(position)
    data: bytes = file.read(size)
    return data


def new_packet(data: bytes) -> Any:
    """A packet with a copy of the data and zeros after it.

    `av.Packet(data)` (PyAV 14 to 18) points at the bytes as they are, without the zeros that FFmpeg's decoders read on
    into (AV_INPUT_BUFFER_PADDING_SIZE): half of all MPEG-4 clips came out with broken blocks.
    """
    packet = av.Packet(len(data))
    packet.update(data)
    return packet


def source_bytes(source: Source) -> int:
    """The size of a source in bytes."""
    return len(source) if isinstance(source, bytes) else os.stat(source).st_size


def video_stream(container: Any) -> Any:
    """The video stream of an open container that a player would show.

    Raises:
        VideoError: there is none, it is a still picture, or no decoder is known.
    """
    kind = container.format.name
    if kind in _NOT_VIDEOS or kind in _PLAYLISTS or kind.endswith("_pipe"):
        raise VideoError(f"not a video: a {'playlist' if kind in _PLAYLISTS else 'picture or text'} ({kind})")
    covers = [s for s in container.streams.video if s.disposition & av.stream.Disposition.attached_pic]
    streams = [s for s in container.streams.video if s not in covers]
    if not streams:
        raise VideoError(f"no video stream ({_what_else(container)})")
    best = container.streams.best("video")
    stream = best if best in streams else streams[0]
    if stream.codec_context is None:
        raise VideoError("codec unknown to FFmpeg, or encrypted")
    return stream


def demux(container: Any, stream: Any) -> Iterator[Any]:
    """The packets of a stream, from where the container stands to its end.

    Where a stream turned up after opening (in program and transport streams), PyAV 18 ends with an IndexError, after
    the last packet.
    """
    with contextlib.suppress(IndexError):
        yield from (packet for packet in container.demux(stream) if packet.size)


def codec_name(stream: Any) -> str:
    """FFmpeg's name of the codec, whichever library decodes it (av1 for libdav1d)."""
    name: str = stream.codec_context.codec.canonical_name
    return name


def _what_else(container: Any) -> str:
    kinds = {stream.type for stream in container.streams if stream.type != "video"}
    sound = [codec_name(s) if s.codec_context else "unknown" for s in container.streams.audio]
    if kinds == {"audio"}:
        return f"audio only: {', '.join(sound)}"
    return f"only {', '.join(sorted(kinds))}" if kinds else "no streams"


def _is_encrypted(file: Any) -> bool:
    """Whether an MP4 holds an encrypted video track (ISO/IEC 14496-12, 8.12): FFmpeg would decode it to noise."""
    at, head = 0, read_at(file, 0, 16)
    while len(head) == 16:
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        size = int.from_bytes(head[8:16], "big") if size == 1 else size
        if kind == b"moov":
            return b"encv" in (header := read_at(file, at, size)) and b"sinf" in header
        if size < 8 or (at == 0 and kind not in _MP4_BOXES):
            return False
        at += size
        head = read_at(file, at, 16)
    return False


def _why_not(file: Any, error: Exception) -> str:
    file.seek(0)
    head = file.read(12)
    if not head:
        return "empty file"
    if head[4:8] in _MP4_BOXES:
        return "truncated: its index is missing (no moov box)"
    fault = getattr(error, "strerror", None) or error
    return f"truncated: {fault}" if head.startswith(_MAGICS) else f"not a video: {fault}"
