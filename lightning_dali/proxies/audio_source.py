"""Where a stand-in's samples come from: encoded bytes, a segment of them, or samples in memory.

Runs in the worker. DALI decodes what it decodes like libsndfile; the rest is decoded here and travels as float WAV.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lightning_dali.media import (
    AudioError,
    AudioHeader,
    check_finite,
    check_samples,
    cut_wav,
    decode_audio,
    encode_wav,
    read_audio_header,
)
from lightning_dali.proxies.notes import note

Span = Callable[[int], tuple[int, int]]
"""From a sample rate to a half-open range of samples; its end may lie beyond the file's, and -1 is the file's end."""
_WHOLE_SHARE = 0.5
"""A segment of at least this share of a file is cut on the device after DALI decoded all of it; of less, only the
segment is decoded, in the worker."""


@dataclass
class AudioSource:
    """Samples `(C, S)` that are still encoded, or a tensor."""

    sample_rate: int
    """Hz; 0 where nobody said."""
    num_channels: int
    """C."""
    num_samples: int
    """S, of the segment."""
    data: bytes | None = None
    """The encoded file; None for samples in memory."""
    header: AudioHeader | None = None
    """Its facts."""
    start: int = 0
    """First sample of the segment in the file."""
    path: str | None = None
    """Where the bytes came from, for messages."""
    wave: Any = None
    """Decoded samples `(C, S)`, float32, where they had to be decoded here."""
    result: torch.Tensor | None = None
    """A finished tensor, on which every transform has run already."""
    materialised: list[str] = field(default_factory=list)
    """Why samples were needed in the worker, if they were."""

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str | None = None, span: Span | None = None) -> AudioSource:
        """Reads the header, and takes the segment if one is asked for.

        Raises:
            AudioError: It is no usable audio, or the segment lies outside it; with the path.
        """
        try:
            return cls._of(data, read_audio_header(data), path, span)
        except AudioError as error:
            error.path = path
            raise

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], *, span: Span | None = None) -> AudioSource:
        """Reads a file; of a WAV only the segment.

        Raises:
            AudioError: As `from_bytes`.
            OSError: The file cannot be opened.
        """
        name = os.fspath(path)
        with open(name, "rb") as file:
            if span is None or os.fstat(file.fileno()).st_size == 0:
                return cls.from_bytes(file.read(), path=name, span=span)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                try:
                    header = read_audio_header(view)
                    if header.wav is not None:
                        first, last = _range(span, header.sample_rate, header.wav.num_samples)
                        return cls.from_bytes(cut_wav(view, header, first, last), path=name)
                    return cls._of(bytes(view), header, name, span)
                except AudioError as error:
                    error.path = name
                    raise

    @classmethod
    def _of(cls, data: bytes, header: AudioHeader, path: str | None, span: Span | None) -> AudioSource:
        if header.wav is not None and (span is not None or header.wav.streamed):
            first, last = _range(span or _everything, header.sample_rate, header.wav.num_samples)
            data = cut_wav(data, header, first, last)
            header, span = read_audio_header(data), None
        if header.num_samples is None:  # only decoding tells, and DALI could not anyway
            first, last = (span or _everything)(header.sample_rate)
            wave, rate = decode_audio(
                data, frame_offset=first, num_frames=-1 if last < 0 else last - first, header=header
            )
            return cls(rate, wave.shape[0], wave.shape[1], data, header, first, path, wave)
        first, last = _range(span or _everything, header.sample_rate, header.num_samples)
        return cls(header.sample_rate, header.num_channels, last - first, data, header, first, path)

    @classmethod
    def from_wave(cls, wave: torch.Tensor, sample_rate: int, *, path: str | None = None) -> AudioSource:
        """Wraps samples `(C, S)`."""
        array = np.ascontiguousarray(wave.detach().to(torch.float32).numpy())
        if array.shape[1] == 0:
            raise AudioError("zero samples", path)
        return cls(sample_rate, array.shape[0], array.shape[1], path=path, wave=array)

    @classmethod
    def from_result(cls, result: torch.Tensor) -> AudioSource:
        """Wraps a finished tensor so that it may stand in a batch beside stand-ins."""
        return cls(0, 1, result.shape[-1], result=result)

    def cut(self, start: int, stop: int) -> AudioSource | None:
        """The samples `[start, stop)` alone, where that is cheaper than to decode all; else None."""
        if self.wave is not None:
            return replace(self, wave=self.wave[:, start:stop], num_samples=stop - start, start=self.start + start)
        if self.header is None or self.data is None:
            return None
        if self.header.wav is not None:
            data = cut_wav(self.data, self.header, self.start + start, self.start + stop)
            return replace(self, data=data, header=read_audio_header(data), start=0, num_samples=stop - start)
        if stop - start >= _WHOLE_SHARE * (self.header.num_samples or 0):
            return None
        return replace(self, start=self.start + start, num_samples=stop - start)

    @property
    def in_file(self) -> tuple[int, int] | None:
        """The segment, if DALI decodes the whole file and it must be cut out afterwards."""
        whole = self.header is None or self.num_samples == self.header.num_samples
        return None if whole or not self.encoded else (self.start, self.start + self.num_samples)

    @property
    def encoded(self) -> bool:
        """Whether the file's own bytes travel, for DALI to decode."""
        if self.wave is not None or self.header is None or not self.header.dali_decodes:
            return False
        return self.num_samples >= _WHOLE_SHARE * (self.header.num_samples or 0)

    def payload(self) -> Any:
        """What travels, uint8: the file's bytes, or the samples as a WAV of floats."""
        if self.encoded:
            return np.frombuffer(self.data or b"", np.uint8)
        return np.frombuffer(encode_wav(self.decode(), max(self.sample_rate, 1)), np.uint8)

    def decode(self) -> Any:
        """The samples, `(C, S)`, float32.

        Raises:
            AudioError: They cannot be decoded; with the path.
        """
        if self.wave is None:
            try:
                self.wave, _ = decode_audio(
                    self.data or b"", frame_offset=self.start, num_frames=self.num_samples, header=self.header
                )
            except AudioError as error:
                error.path = self.path
                raise
        return self.wave

    def check(self) -> str | None:
        """Why the samples are no use; of what DALI will decode, as far as a cheap look tells."""
        try:
            if self.header is not None and self.data is not None and self.encoded:
                check_samples(self.data, self.header)
            elif self.result is None:
                check_finite(self.decode())
        except AudioError as error:
            return str(error)
        return None

    def note_materialised(self, reason: str) -> None:
        """Remembers why samples were needed."""
        note(reason)
        if reason not in self.materialised:
            self.materialised.append(reason)

    def __repr__(self) -> str:
        what = self.path or ("samples" if self.data is None else f"{len(self.data)} bytes")
        return f"{what}, {self.num_channels}x{self.num_samples} at {self.sample_rate} Hz"


def _everything(sample_rate: int) -> tuple[int, int]:
    return 0, -1


def _range(span: Span, sample_rate: int, num_samples: int) -> tuple[int, int]:
    """The segment inside a file."""
    first, last = span(sample_rate)
    last = num_samples if last < 0 else min(last, num_samples)
    if first >= last:
        raise AudioError(f"zero samples: the segment is [{first}, {last}), the file has {num_samples}")
    return first, last


def frames_span(frame_offset: int = 0, num_frames: int = -1) -> Span | None:
    """The span that torchaudio's arguments mean; None for the whole file."""
    if frame_offset == 0 and num_frames < 0:
        return None
    return lambda rate: (frame_offset, frame_offset + num_frames if num_frames >= 0 else -1)


def seconds_span(offset_seconds: float = 0.0, duration_seconds: float | None = None) -> Span | None:
    """The span of times; None for the whole file."""
    if not offset_seconds and duration_seconds is None:
        return None

    def span(rate: int) -> tuple[int, int]:
        first = round(offset_seconds * rate)
        return first, -1 if duration_seconds is None else first + round(duration_seconds * rate)

    return span
