"""The sound of a stretch of a video, in time with its frames. Runs in the worker process.

Times are those of the container: a sample and a frame that carry the same time are heard and seen together. Sample `k` of a
second at rate `r` stands at `k / r` seconds, counted from time zero, so stretches that meet share no sample and miss none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from typing import Any

import av
import numpy as np

from lightning_dali.media.audio_decode import Wave, check_finite
from lightning_dali.media.audio_wav import AudioError
from lightning_dali.media.clips import Clip
from lightning_dali.media.errors import MediaError
from lightning_dali.media.video_index import VideoError, VideoIndex
from lightning_dali.media.video_open import Source, open_video

_BACK_SECONDS = (1, 5, 25)
"""How far before the wanted time to start decoding, in turn, where seeking lands too late. Codecs need a run-up: after one
second AAC is within 6e-6 of what decoding from the file's start gives, after none it is off by 0.4; it costs 1 ms."""
_GAP_SECONDS = Fraction(1, 50)
"""A packet so far from where the one before it ended does not follow it: Matroska's times are rounded to a millisecond."""


def clip_span(index: VideoIndex, clip: Clip) -> tuple[Fraction, Fraction]:
    """When a clip is seen: from the time of its first real frame to the end of its last one, in seconds, half-open.

    A frame lasts until the next one of the file, whichever frames the clip skips. Padding lasts no time, unless there is
    nothing else: then it is when the frames that stand in for it are seen.

    Raises:
        VideoError: The clip has no frame of the video.
    """
    shown = clip.frames[clip.mask] if clip.mask.any() else clip.frames[clip.frames >= 0]
    if not shown.size:
        raise VideoError("the clip is nothing but black padding, so there is no sound to it")
    first, after = int(shown.min()), int(shown.max()) + 1
    end = index.end_pts if after == index.num_frames else int(index.pts[after])
    assert end is not None  # __post_init__ has set it
    return int(index.pts[first]) * index.time_base, end * index.time_base


def decode_sound(source: Source, index: VideoIndex, start: Fraction, stop: Fraction) -> tuple[Wave, int]:
    """Decodes what is heard in [start, stop).

    Args:
        source: A path or a whole file.
        index: The video's.
        start: In seconds.
        stop: In seconds.

    Returns:
        Samples `(C, S)` as float32 and their rate in Hz. `S = round(stop * rate) - round(start * rate)`, always: where the
        file has no sound, before it sets in and after its end, there are zeros. To the sample where the container counts
        finely enough (MP4, MOV, AVI, MPEG-TS); Matroska and WebM count milliseconds, so there within half of one.

    Raises:
        AudioError: There is no audio stream, or it does not decode.
        OSError: The file cannot be opened.
    """
    sound = _Sound(start, stop)
    for back in (*_BACK_SECONDS, None):
        try:
            with open_video(source, container=index.container) as (container, _):
                if sound.fill(*_decoded(container, start, back)):
                    break
        except MediaError:
            raise
        except (av.error.FFmpegError, ValueError) as error:
            raise AudioError(f"corrupt sound: {getattr(error, 'strerror', None) or error}") from error
    return sound.samples()


def _decoded(container: Any, start: Fraction, back: int | None) -> tuple[Any, Iterator[Any], bool]:
    """The audio stream, its frames from `back` seconds before `start` on, and whether they are the file's first."""
    stream = container.streams.best("audio")
    if stream is None or stream.codec_context is None:
        raise AudioError("the video has no sound: no audio stream that FFmpeg knows")
    for other in container.streams.video:
        other.discard = av.stream.Discard.all  # of an MP4 their packets are then not even read
    begin = (stream.start_time or 0) * stream.time_base
    wanted = begin if back is None else start - back
    from_begin = wanted <= begin
    if not from_begin:
        container.seek(int(wanted / stream.time_base), stream=stream)
    frames = _all(container, stream)
    # the first after a seek is cut short by Opus, and its time is then rounded twice
    return stream, frames if from_begin else islice(frames, 1, None), from_begin


def _all(container: Any, stream: Any) -> Iterator[Any]:
    with suppress(IndexError):  # as in `video_open.demux`
        yield from container.decode(stream)


class _Sound:
    """Samples on their way into their places."""

    def __init__(self, start: Fraction, stop: Fraction) -> None:
        self._start, self._stop = start, stop
        self._rate, self._first, self._last = 0, 0, 0
        self._wave: Wave = np.zeros((0, 0), np.float32)

    def fill(self, stream: Any, frames: Iterator[Any], from_begin: bool) -> bool:
        """Puts frames where they belong; False if they begin too late and there are earlier ones."""
        resampler, at = av.AudioResampler(format="fltp"), None
        for frame in frames:
            if at is None:
                # of HE-AAC the header may tell half the rate that is decoded
                self._make(frame.layout.nb_channels, frame.sample_rate)
                at = self._place(frame, self._first)
                if at > self._first and not from_begin:
                    return False
            place = self._place(frame, at)
            at = place if abs(place - at) > _GAP_SECONDS * self._rate else at
            for piece in resampler.resample(frame):
                self._put(piece.to_ndarray(), at - self._first)
                at += piece.samples
            if at >= self._last:
                return True
        if at is None and from_begin:
            self._make(stream.codec_context.channels, stream.codec_context.sample_rate)
        return at is not None

    def samples(self) -> tuple[Wave, int]:
        """Samples `(C, S)` and their rate.

        Raises:
            AudioError: There are none, or they are no numbers.
        """
        if not self._wave.size:
            raise AudioError(f"zero samples: the clip is seen for {float(self._stop - self._start):g} s")
        check_finite(self._wave)
        return self._wave, self._rate

    def _make(self, channels: int, rate: int) -> None:
        self._rate, self._first, self._last = int(rate), round(self._start * rate), round(self._stop * rate)
        self._wave = np.zeros((channels, max(0, self._last - self._first)), np.float32)

    def _place(self, frame: Any, expected: int) -> int:
        """Where a frame's first sample stands, counted from time zero; where it is expected, if it has no time."""
        return expected if frame.pts is None else round(frame.pts * frame.time_base * self._rate)

    def _put(self, piece: Wave, at: int) -> None:
        """Keeps of a piece that begins at `at` what lies inside."""
        low, high = max(at, 0), min(at + piece.shape[1], self._wave.shape[1])
        if low < high:
            self._wave[:, low:high] = piece[:, low - at : high - at]
