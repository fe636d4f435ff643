"""Videos with sound, in which frames show their number and a click is heard when each of some frames begins to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from tests.media.video_files import CODECS, encoder_options, paint_number


def clicks(times: Sequence[Fraction], *, rate: int, seconds: float, channels: int = 2) -> np.ndarray:
    """`(C, S)`: the second channel is the first one's negative; nothing but clicks of one sample at `times`."""
    wave = np.zeros((channels, round(seconds * rate)), np.float32)
    for number, time in enumerate(times):
        wave[:, round(time * rate)] = (0.5 + number / 64) * np.array([1, -1][:channels])
    return wave


def make_talkie(
    path: Path,
    wave: np.ndarray,
    *,
    rate: int = 48_000,
    sound: str = "pcm_s16le",
    sound_start: int = 0,
    codec: str = "h264",
    pts: Sequence[int] = tuple(range(0, 2000, 40)),
    width: int = 64,
    height: int = 48,
) -> Path:
    """Writes a video whose frame `k` shows the number `k` from `pts[k]` milliseconds on, and `wave` beside it.

    Args:
        path: Its suffix says the container.
        wave: `(C, S)`.
        rate: In Hz.
        sound: FFmpeg's encoder.
        sound_start: The sample of the container's clock at which `wave` begins.
        codec: Of the pictures.
        pts: In milliseconds.
        width: In pixels.
        height: In pixels.
    """
    layout = {1: "mono", 2: "stereo"}[wave.shape[0]]
    with av.open(str(path), "w") as out:
        video: Any = out.add_stream(CODECS.get(codec, codec), rate=25)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        video.options, video.codec_context.thread_count = encoder_options(codec, 6, 2, False), 1
        video.codec_context.time_base = Fraction(1, 1000)
        audio: Any = out.add_stream(sound, rate=rate, layout=layout)
        kind = "s16" if sound in ("pcm_s16le", "flac") else "fltp"
        done = 0
        for number, time in enumerate(pts):
            picture = av.VideoFrame.from_ndarray(paint_number(number, width, height), format="rgb24")
            picture.pts, picture.time_base = time, Fraction(1, 1000)
            out.mux(video.encode(picture))
            upto = wave.shape[1] if number == len(pts) - 1 else min(wave.shape[1], rate * time // 1000)
            if upto > done:
                out.mux(audio.encode(_heard(wave[:, done:upto], kind, layout, rate, done + sound_start)))
                done = upto
        out.mux(video.encode())
        out.mux(audio.encode())
    return path


def _heard(wave: np.ndarray, kind: str, layout: str, rate: int, at: int) -> av.AudioFrame:
    values = np.ascontiguousarray(wave)
    if kind == "s16":
        values = np.rint(values.T * 32767).astype(np.int16).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(values, format=kind, layout=layout)
    frame.sample_rate, frame.pts, frame.time_base = rate, at, Fraction(1, rate)
    return frame
