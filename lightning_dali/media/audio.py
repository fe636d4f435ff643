"""Facts from encoded audio: format, rate, channels, length, and whether DALI decodes it.

WAV and FLAC are read here, in microseconds; the rest by libsndfile, then by FFmpeg (PyAV). Runs in the worker.
"""

from __future__ import annotations

import io
import mmap
import os
from dataclasses import dataclass

import av
import soundfile

from lightning_dali.media.audio_flac import FlacInfo, last_sample, read_flac_info
from lightning_dali.media.audio_wav import AudioError, Buffer, WavLayout, cut_layout, read_wav_layout

_LINEAR = frozenset({"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"})
DALI_CODECS: dict[str, frozenset[str]] = {
    "WAV": _LINEAR,
    "WAVEX": _LINEAR,
    "RF64": _LINEAR,
    "W64": _LINEAR,
    "AIFF": _LINEAR,
    "AU": _LINEAR,
    "CAF": _LINEAR,
    "FLAC": frozenset({"PCM_S8", "PCM_16", "PCM_24"}),
    "OGG": frozenset({"VORBIS", "OPUS"}),
}
"""What DALI 2.4's `decoders.audio` decodes to libsndfile's own values (it contains libsndfile, without MP3);
`tests/media/test_audio.py` compares each."""
_UNKNOWN_LENGTH = 1 << 60
"""libsndfile reports about 2**63 frames where it cannot know."""
_OTHER_FILES = (
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"%PDF", "PDF"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"version https://git-lfs", "Git LFS pointer"),
    (b"<", "HTML or XML"),
    (b"{", "JSON"),
)


@dataclass(frozen=True)
class AudioHeader:
    """What is known about encoded audio before it is decoded."""

    format: str
    """Container: libsndfile's name where it reads it ("WAV", "FLAC", "OGG", "MP3", "AIFF", ...), else FFmpeg's."""
    codec: str
    """libsndfile's subtype ("PCM_16", "ULAW", "VORBIS", "OPUS", ...), else FFmpeg's codec name in capitals."""
    sample_rate: int
    """Hz. Opus in Ogg: the rate of the original, as libsndfile and DALI decode it (FFmpeg always gives 48000)."""
    num_channels: int
    """C."""
    num_samples: int | None
    """S: samples a channel, exact; None when only decoding tells."""
    estimated_seconds: float | None = None
    """The container's own idea of the length where `num_samples` is None."""
    wav: WavLayout | None = None
    """Where the samples lie, for WAV of fixed frame size: such a file can be cut without decoding."""
    flac: FlacInfo | None = None
    """STREAMINFO, for bare FLAC."""

    @property
    def duration_seconds(self) -> float | None:
        """Length in seconds; an estimate where `num_samples` is None."""
        return self.estimated_seconds if self.num_samples is None else self.num_samples / self.sample_rate

    @property
    def dali_decodes(self) -> bool:
        """Whether DALI decodes these very bytes, on CPU, to the values that `decode_audio` gives.

        False for a WAV whose data size was never filled in (libsndfile and DALI see no samples): `cut_wav` mends it.
        """
        if self.num_samples is None or (self.wav is not None and self.wav.streamed):
            return False
        return self.codec in DALI_CODECS.get(self.format, ())

    @property
    def missing_bytes(self) -> int:
        """Bytes that a WAV header promises and the file lacks; the samples that are there are usable."""
        return 0 if self.wav is None else self.wav.missing_bytes


class SeekableBytes(io.BytesIO):
    """A file in memory for libsndfile, which tries to seek before the start of damaged files.

    `soundfile` would print the `ValueError` of that to stderr, as it cannot raise it through C.
    """

    def seek(self, offset: int, whence: int = 0) -> int:
        """As `io.BytesIO.seek`, but stays where it is instead of raising."""
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def read_audio_header(data: Buffer) -> AudioHeader:
    """Reads the header of encoded audio; the file's extension plays no part.

    Args:
        data: The whole file.

    Raises:
        AudioError: With a short reason: "empty file", "zero samples", "sample rate 0", "truncated FLAC: ...",
            "not audio: starts with ...", "no audio stream".
    """
    if len(data) == 0:
        raise AudioError("empty file")
    magic = bytes(data[:12])
    header = None
    if magic[:4] == b"RIFF" and magic[8:] == b"WAVE":
        header = _wav_header(data)
    elif magic[:4] == b"fLaC":
        header = _flac_header(data)
    if header is None:
        header = _soundfile_header(data) or _pyav_header(data)
    if header.num_samples == 0:
        raise AudioError("zero samples")
    return header


def probe_audio(path: str | os.PathLike[str]) -> AudioHeader:
    """Reads the header of a file; of WAV and FLAC only the pages that it needs.

    Raises:
        AudioError: As `read_audio_header`.
        OSError: When the file cannot be opened.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise AudioError("empty file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            return read_audio_header(data)


def cut_wav(data: Buffer, header: AudioHeader, start: int, stop: int) -> bytes:
    """Cuts samples out of a WAV file into a WAV file of its own, without decoding.

    Args:
        data: The whole file.
        header: Its header; `header.wav` must be set.
        start: First sample.
        stop: Sample after the last one.

    Raises:
        ValueError: When the codec has no fixed frame size, or the range does not lie in the file.
    """
    if header.wav is None:
        raise ValueError(f"cut_wav cannot cut {header.format}/{header.codec}: only WAV with PCM, float, u-law or a-law")
    if not 0 <= start < stop <= header.wav.num_samples:
        raise ValueError(f"cut_wav: samples [{start}, {stop}) do not lie in [0, {header.wav.num_samples})")
    return cut_layout(data, header.wav, start, stop)


def _wav_header(data: Buffer) -> AudioHeader | None:
    layout = read_wav_layout(data)
    if layout is None:
        return None
    return AudioHeader("WAV", layout.codec, layout.sample_rate, layout.num_channels, layout.num_samples, wav=layout)


def _flac_header(data: Buffer) -> AudioHeader:
    info = read_flac_info(data)
    if len(data) <= info.audio_offset:
        raise AudioError("zero samples" if info.num_samples == 0 else "truncated FLAC: no frames")
    if info.num_samples and last_sample(data, info) != info.num_samples and not _soundfile_reads_end(data):
        raise AudioError(f"truncated FLAC: {info.num_samples} samples in the header, fewer in the file")
    codec = "PCM_S8" if info.bits == 8 else f"PCM_{info.bits}"
    return AudioHeader("FLAC", codec, info.sample_rate, info.num_channels, info.num_samples or None, flac=info)


def _soundfile_reads_end(data: Buffer) -> bool:
    """Whether libsndfile can read the last sample."""
    try:
        with soundfile.SoundFile(SeekableBytes(data)) as file:
            file.seek(file.frames - 1)
            return len(file.read(1)) == 1
    except (soundfile.LibsndfileError, RuntimeError):
        return False


def _soundfile_header(data: Buffer) -> AudioHeader | None:
    try:
        with soundfile.SoundFile(SeekableBytes(data)) as file:
            exact = file.format != "MP3" and file.frames < _UNKNOWN_LENGTH  # libsndfile guesses an MP3's length
            frames, rate = int(file.frames), int(file.samplerate)
            header = AudioHeader(file.format, file.subtype, rate, int(file.channels), frames if exact else None)
    except soundfile.LibsndfileError:
        return None
    if exact or header.format != "MP3":
        return header
    try:
        seconds = _pyav_header(data).estimated_seconds
    except AudioError:
        seconds = frames / rate
    return AudioHeader(header.format, header.codec, rate, header.num_channels, None, seconds)


def _pyav_header(data: Buffer) -> AudioHeader:
    try:
        container = av.open(io.BytesIO(data))
    except (av.FFmpegError, ValueError) as error:
        raise AudioError(_not_audio(data)) from error
    with container:
        if not container.streams.audio:
            still = container.format.name.endswith("_pipe")  # FFmpeg reads pictures too
            raise AudioError(_not_audio(data) if still else f"no audio stream in {container.format.name}")
        stream = container.streams.audio[0]
        codec = stream.codec_context
        if codec is None:
            raise AudioError(f"unknown codec in {container.format.name}")
        if not codec.sample_rate:
            raise AudioError("sample rate 0")
        seconds = None
        if stream.duration is not None and stream.time_base is not None:
            seconds = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            seconds = container.duration / av.time_base
        return AudioHeader(container.format.name, codec.name.upper(), codec.sample_rate, codec.channels, None, seconds)


def _not_audio(data: Buffer) -> str:
    start = bytes(data[:8])
    kind = next((f" ({name})" for magic, name in _OTHER_FILES if bytes(data[:24]).startswith(magic)), "")
    return f"not audio: starts with {start!r}{kind}"
