"""Decoding audio in the worker: what DALI lacks, segments, and pipelines that need samples.

libsndfile where it can, else FFmpeg (PyAV). Runs in the worker.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
import soundfile

from lightning_dali.media.audio import AudioHeader, SeekableBytes, cut_wav, read_audio_header
from lightning_dali.media.audio_wav import AudioError, Buffer, WavLayout, cut_layout, float_fmt

Wave = npt.NDArray[np.float32]
"""Samples `(C, S)`; full scale is 1."""
_OPPOSITE_ENERGY = 1e-3
"""A mean of channels with less than this share (-30 dB) of their mean energy is cancellation: equal channels keep 1,
independent ones 1 / C."""
_BLOCK = 1 << 22
"""Samples to read at a time: 87 s at 48 kHz."""
_SOUNDFILE_FORMATS = frozenset(soundfile.available_formats())


class Downmix(NamedTuple):
    """Mono, and whether making it cancelled the sound."""

    wave: Wave
    """`(1, S)`."""
    opposite_phase: bool
    """Whether the channels cancel each other: take one of them instead."""


def decode_audio(
    data: Buffer,
    *,
    frame_offset: int = 0,
    num_frames: int = -1,
    offset_seconds: float | None = None,
    duration_seconds: float | None = None,
    header: AudioHeader | None = None,
) -> tuple[Wave, int]:
    """Decodes audio, or a segment of it.

    libsndfile seeks to the segment; Opus (other samples after a seek) and FFmpeg's formats are decoded up to its end.

    Args:
        data: The whole file.
        frame_offset: First sample, as torchaudio calls it.
        num_frames: Samples to return at most; -1 for all.
        offset_seconds: Instead of `frame_offset`.
        duration_seconds: Instead of `num_frames`.
        header: What `read_audio_header` said, to not read it twice.

    Returns:
        Samples `(C, S)` as float32 and the sample rate in Hz.

    Raises:
        AudioError: As `read_audio_header`; "truncated ...", "corrupt ...", "NaN samples", "infinite samples".
    """
    header = read_audio_header(data) if header is None else header
    start = frame_offset if offset_seconds is None else round(offset_seconds * header.sample_rate)
    count = num_frames if duration_seconds is None else round(duration_seconds * header.sample_rate)
    stop = _stop(start, count)
    if header.wav is not None and header.wav.streamed:
        data = cut_wav(data, header, 0, header.wav.num_samples)
    if header.num_samples is None or header.format not in _SOUNDFILE_FORMATS:
        wave = _with_pyav(data, start, stop)  # MP3 too: libsndfile stops at the length it guesses from the file's size
    else:
        wave = _with_soundfile(data, header, start, min(header.num_samples, stop or header.num_samples))
    if wave.shape[1] == 0:
        raise AudioError(f"zero samples: the segment starts at {start}, the file has {header.num_samples or 'fewer'}")
    check_finite(wave)
    return wave, header.sample_rate


def _stop(start: int, count: int) -> int | None:
    if start < 0:
        raise ValueError(f"decode_audio starts at a sample of 0 or later, got {start}")
    if count == 0:
        raise ValueError("decode_audio was asked for 0 samples; num_frames=-1 means all")
    return None if count < 0 else start + count


def check_finite(wave: npt.NDArray[np.floating]) -> None:
    """Raises `AudioError` for samples that are no numbers."""
    if not np.isfinite(wave).all():
        raise AudioError("NaN samples" if np.isnan(wave).any() else "infinite samples")


def check_samples(data: Buffer, header: AudioHeader) -> None:
    """Looks for NaN where encoded bytes can hold it, WAV of floats, without decoding; DALI would pass it on.

    Raises:
        AudioError: "NaN samples" or "infinite samples".
    """
    if header.wav is None or header.codec not in ("FLOAT", "DOUBLE"):
        return
    dtype = "<f4" if header.codec == "FLOAT" else "<f8"
    count = header.wav.num_samples * header.wav.num_channels
    check_finite(np.frombuffer(data, dtype=dtype, count=count, offset=header.wav.data_offset))


def downmix(wave: Wave) -> Downmix:
    """Mixes to mono: the mean of the channels.

    Args:
        wave: `(C, S)`.

    Returns:
        `(1, S)` and whether the channels cancel each other, as stereo with one side's polarity reversed does.
    """
    mono = wave.mean(axis=0, keepdims=True, dtype=np.float32)
    energy = float(np.square(wave, dtype=np.float64).mean())
    cancelled = float(np.square(mono, dtype=np.float64).mean()) < _OPPOSITE_ENERGY * energy
    return Downmix(mono, bool(wave.shape[0] > 1 and cancelled))


def encode_wav(wave: Wave, sample_rate: int) -> bytes:
    """Writes samples as a WAV file of 32-bit floats, which DALI decodes to the same values.

    Args:
        wave: `(C, S)`.
        sample_rate: Hz.
    """
    channels, samples = wave.shape
    layout = WavLayout(
        float_fmt(sample_rate, channels), "FLOAT", sample_rate, channels, 0, 4 * channels, samples, False, 0
    )
    return cut_layout(np.ascontiguousarray(wave.T, dtype="<f4").tobytes(), layout, 0, samples)


def _with_soundfile(data: Buffer, header: AudioHeader, start: int, stop: int) -> Wave:
    if start >= stop:
        return np.zeros((header.num_channels, 0), np.float32)
    first = 0 if header.codec == "OPUS" else start
    try:
        with soundfile.SoundFile(SeekableBytes(data)) as file:
            if first and file.seek(first) != first:
                raise AudioError(f"corrupt {header.format}: cannot go to sample {first}")
            wave = _read(file, stop - first)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise AudioError(f"corrupt {header.format}: {_last_words(error)}") from error
    if len(wave) < stop - first:
        raise AudioError(f"truncated {header.format}: {first + len(wave)} samples of {header.num_samples}")
    return np.ascontiguousarray(wave[start - first :].T)


def _read(file: soundfile.SoundFile, count: int) -> Wave:
    """Reads `(S, C)` in blocks, so that a damaged length cannot allocate the machine away."""
    blocks: list[Wave] = []
    while count > 0:
        wanted = min(count, _BLOCK)
        blocks.append(file.read(wanted, dtype="float32", always_2d=True))
        count = count - wanted if len(blocks[-1]) == wanted else 0
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _with_pyav(data: Buffer, start: int, stop: int | None) -> Wave:
    pieces: list[Wave] = []
    position = 0
    for piece in _pyav_pieces(data):
        end = position + piece.shape[1]
        if end > start:
            pieces.append(piece[:, max(0, start - position) : None if stop is None else stop - position])
        position = end
        if stop is not None and position >= stop:
            break
    return np.concatenate(pieces, axis=1) if pieces else np.zeros((1, 0), np.float32)


def _pyav_pieces(data: Buffer) -> Iterator[Wave]:
    """Decodes frame by frame into planar float32 `(C, S)`, at the stream's own rate and layout."""
    try:
        with av.open(io.BytesIO(data)) as container:
            resampler = av.AudioResampler(format="fltp")
            for frame in container.decode(container.streams.audio[0]):
                for piece in resampler.resample(frame):
                    yield piece.to_ndarray()
            for piece in resampler.resample(None):
                yield piece.to_ndarray()
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise AudioError(f"corrupt audio: {_last_words(error)}") from error


def _last_words(error: Exception) -> str:
    text = getattr(error, "error_string", None) or getattr(error, "strerror", None) or str(error)
    return str(text).strip().rstrip(".")
