"""RIFF WAVE: where the samples lie, and cutting a piece out without decoding.

Runs in the worker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_dali.media.errors import MediaError

Buffer = bytes | bytearray | memoryview
"""Encoded bytes of a file."""

_PCM, _FLOAT, _ALAW, _ULAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
"""WAVE format tags, mmreg.h."""
_CODECS = {
    (_PCM, 8): "PCM_U8",
    (_PCM, 16): "PCM_16",
    (_PCM, 24): "PCM_24",
    (_PCM, 32): "PCM_32",
    (_FLOAT, 32): "FLOAT",
    (_FLOAT, 64): "DOUBLE",
    (_ALAW, 8): "ALAW",
    (_ULAW, 8): "ULAW",
}
"""(format tag, bits a sample) to libsndfile's subtype names: the codecs where a frame is a fixed number of bytes."""
STREAMED_SIZES = (0, 0xFFFFFFFF)
"""What writers that cannot seek leave as the size of the data chunk."""


class AudioError(MediaError):
    """Bytes that are no usable audio; the message is a short reason, without the path."""


@dataclass(frozen=True)
class WavLayout:
    """Where the samples of a WAV file lie."""

    fmt: bytes
    """Body of the `fmt ` chunk."""
    codec: str
    """libsndfile's subtype name."""
    sample_rate: int
    """Hz."""
    num_channels: int
    """C."""
    data_offset: int
    """Byte at which the samples start."""
    frame_bytes: int
    """Bytes of one sample of all channels."""
    num_samples: int
    """S: samples a channel that are really there."""
    streamed: bool
    """Whether the data chunk's size was never filled in."""
    missing_bytes: int
    """Bytes that the header promises and the file lacks."""


def _chunks(data: Buffer) -> Iterator[tuple[bytes, int, int]]:
    """Yields (id, offset of the body, size as written) of each chunk, up to `data`."""
    position = 12
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        yield name, position + 8, size
        position += 8 + size + (size & 1)


def read_wav_layout(data: Buffer) -> WavLayout | None:
    """Reads the chunks of a RIFF WAVE file.

    Args:
        data: The file, at least up to its data chunk.

    Returns:
        The layout, or None for codecs whose frames have no fixed size (ADPCM, GSM, MP3 in WAV).

    Raises:
        AudioError: When there is no `fmt ` or `data` chunk, or the rate or the number of channels is 0.
    """
    fmt = b""
    for name, offset, size in _chunks(data):
        if name == b"fmt ":
            fmt = bytes(data[offset : offset + size])
        elif name == b"data":
            if len(fmt) < 16:
                raise AudioError("WAV without a format chunk")
            return _layout(fmt, offset, size, len(data))
    raise AudioError("truncated WAV: no data chunk")


def _layout(fmt: bytes, offset: int, size: int, total: int) -> WavLayout | None:
    tag, num_channels, sample_rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", fmt)
    if tag == _EXTENSIBLE and len(fmt) >= 26:
        (tag,) = struct.unpack_from("<H", fmt, 24)  # the sub-format GUID starts with the plain tag
    if sample_rate == 0:
        raise AudioError("sample rate 0")
    if num_channels == 0:
        raise AudioError("0 channels")
    codec = _CODECS.get((tag, bits))
    if codec is None or frame_bytes != num_channels * bits // 8:
        return None
    available = total - offset
    streamed = size in STREAMED_SIZES and available > 0
    num_bytes = available if streamed else min(size, available)
    return WavLayout(
        fmt=fmt,
        codec=codec,
        sample_rate=sample_rate,
        num_channels=num_channels,
        data_offset=offset,
        frame_bytes=frame_bytes,
        num_samples=num_bytes // frame_bytes,
        streamed=streamed,
        missing_bytes=0 if streamed else size - num_bytes,
    )


def cut_layout(data: Buffer, layout: WavLayout, start: int, stop: int) -> bytes:
    """Makes a WAV file of the samples `[start, stop)`, without decoding.

    Args:
        data: The whole file.
        layout: What `read_wav_layout` said about it.
        start: First sample.
        stop: Sample after the last one.
    """
    first = layout.data_offset + start * layout.frame_bytes
    samples = data[first : layout.data_offset + stop * layout.frame_bytes]
    fact = b"" if layout.codec.startswith("PCM") else struct.pack("<4sII", b"fact", 4, stop - start)
    fmt = struct.pack("<4sI", b"fmt ", len(layout.fmt)) + layout.fmt + b"\0" * (len(layout.fmt) & 1)
    odd = b"\0" * (len(samples) & 1)
    body = fmt + fact + struct.pack("<4sI", b"data", len(samples))
    return b"".join((b"RIFF", struct.pack("<I", 4 + len(body) + len(samples) + len(odd)), b"WAVE", body, samples, odd))


def float_fmt(sample_rate: int, num_channels: int) -> bytes:
    """The `fmt ` chunk of 32-bit float samples."""
    return struct.pack(
        "<HHIIHHH", _FLOAT, num_channels, sample_rate, sample_rate * num_channels * 4, num_channels * 4, 32, 0
    )
