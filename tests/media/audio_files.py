"""Audio encoded in memory, by libsndfile and by FFmpeg."""

from __future__ import annotations

import io

import av
import numpy as np
import soundfile

RATE, SAMPLES = 16000, 12345


def make_wave(channels: int = 1, samples: int = SAMPLES, rate: int = RATE) -> np.ndarray:
    """A tone in noise, other in each channel, `(C, S)`."""
    time = np.arange(samples) / rate
    noise = np.random.default_rng(channels).standard_normal((channels, samples))
    tones = np.stack([np.sin(2 * np.pi * (440 + 110 * c) * time) for c in range(channels)])
    return (0.5 * tones + 0.02 * noise).astype(np.float32)


def encode(wave: np.ndarray, container: str, codec: str | None = None, rate: int = RATE) -> bytes:
    """Encodes `(C, S)` with libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, wave.T, rate, format=container, subtype=codec)
    return file.getvalue()


def encode_av(wave: np.ndarray, container: str, codec: str, rate: int = 48000) -> bytes:
    """Encodes `(C, S)` with FFmpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono" if len(wave) == 1 else "stereo")
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=stream.layout.name)
        frame.sample_rate, frame.pts = rate, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()
