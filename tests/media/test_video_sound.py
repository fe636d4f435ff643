"""The sound of a stretch of a video against the samples that were put into it. 2 s."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from lightning_dali.media import (
    AudioError,
    Clip,
    ClipSampler,
    VideoError,
    VideoIndex,
    build_index,
    clip_span,
    decode_sound,
)
from tests.multimodal.talkies import make_talkie

RATE = 48_000
NOISE = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 3 * RATE)).astype(np.float32)
NOISE = np.rint(NOISE * 32767).astype(np.float32) / 32767
LONG = tuple(range(0, 3000, 40))
STRETCHES = [(Fraction(0), Fraction(1, 3)), (Fraction(41, 1000), Fraction(2)), (Fraction(2311, 1000), Fraction(3))]


def heard(wave: np.ndarray, start: Fraction, stop: Fraction, *, at: int = 0) -> np.ndarray:
    """What of a wave that begins at a sample is heard in a stretch: zeros around it."""
    first, last = round(start * RATE), round(stop * RATE)
    padded = np.pad(wave, ((0, 0), (at, max(0, last - at - wave.shape[1]))))
    return padded[:, first:last]


@pytest.mark.parametrize(
    ("suffix", "sound"), [("mov", "pcm_s16le"), ("mp4", "flac"), ("avi", "pcm_s16le"), ("mkv", "flac")]
)
def test_every_sample_is_the_one_that_was_put_there(suffix: str, sound: str, tmp_path: Path) -> None:
    path = make_talkie(
        tmp_path / f"a.{suffix}", NOISE, sound=sound, pts=LONG, codec="mpeg4" if suffix == "avi" else "h264"
    )
    index = build_index(path)
    for source in (str(path), path.read_bytes()):
        for start, stop in STRETCHES:
            wave, rate = decode_sound(source, index, start, stop)
            assert rate == RATE and wave.dtype == np.float32
            np.testing.assert_allclose(wave, heard(NOISE, start, stop), atol=1 / 32767)


@pytest.mark.parametrize(("suffix", "sound", "off"), [("mp4", "aac", 0), ("ts", "aac", 0), ("webm", "libopus", 24)])
def test_lossy_sound_is_in_time_also_after_a_seek(suffix: str, sound: str, off: int, tmp_path: Path) -> None:
    time = np.arange(4 * RATE) / RATE
    sweep = (0.5 * np.sin(2 * np.pi * (300 * time + 400 * time**2)))[None].astype(np.float32)
    path = make_talkie(
        tmp_path / f"a.{suffix}",
        sweep,
        sound=sound,
        pts=tuple(range(0, 4000, 40)),
        codec="vp8" if suffix == "webm" else "h264",
    )
    index = build_index(path)
    begin = Fraction(int(index.pts[0])) * index.time_base  # MPEG-TS does not begin at zero
    for start in (Fraction(1, 2), Fraction(29, 10)):
        wave, _ = decode_sound(str(path), index, begin + start, begin + start + Fraction(1, 2))
        assert wave.shape == (1, RATE // 2)
        lag, error = best_lag(wave[0], sweep[0], round(start * RATE))
        assert abs(lag) <= off and error < 0.02
        if not off:  # also where it begins: the decoder had a run-up
            whole, _ = decode_sound(str(path), index, begin, begin + 4)
            np.testing.assert_allclose(wave, whole[:, round(start * RATE) :][:, : RATE // 2], atol=1e-4)


def best_lag(wave: np.ndarray, whole: np.ndarray, at: int) -> tuple[int, float]:
    """By how many samples a piece is away from where it should begin, and how far its samples are off there."""
    errors = {lag: float(np.abs(wave - whole[at + lag :][: len(wave)]).mean()) for lag in range(-200, 201)}
    return min(errors.items(), key=lambda item: item[1])


def test_where_the_file_has_no_sound_there_is_silence(tmp_path: Path) -> None:
    short, at = NOISE[:, : RATE // 2], RATE // 4
    path = make_talkie(tmp_path / "a.mov", short, sound_start=at, pts=LONG)
    index = build_index(path)
    for start, stop in [(Fraction(0), Fraction(1)), (Fraction(0), Fraction(1, 5)), (Fraction(2), Fraction(3))]:
        wave, _ = decode_sound(str(path), index, start, stop)
        np.testing.assert_allclose(wave, heard(short, start, stop, at=at), atol=1 / 32767)


def test_without_sound_and_with_broken_sound(tmp_path: Path) -> None:
    path = make_talkie(tmp_path / "a.mp4", NOISE, sound="aac", pts=LONG)
    silent = tmp_path / "silent.mp4"
    with av.open(str(path)) as source, av.open(str(silent), "w") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    with pytest.raises(AudioError, match="the video has no sound: no audio stream"):
        decode_sound(str(silent), build_index(silent), Fraction(0), Fraction(1))
    index = build_index(path)
    with pytest.raises(AudioError, match="zero samples: the clip is seen for 0 s"):
        decode_sound(str(path), index, Fraction(1), Fraction(1))
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        for packet in container.demux(audio=0):
            if packet.size:
                data[packet.pos : packet.pos + packet.size] = b"\xff" * packet.size
    with pytest.raises(AudioError, match="corrupt sound: "):
        decode_sound(bytes(data), index, Fraction(0), Fraction(1))


def test_when_a_clip_is_seen() -> None:
    index = VideoIndex(pts=[0, 3, 4, 8, 9], end_pts=15, time_base=Fraction(1, 10))

    def span(*frames: int, **options: str) -> list[float]:
        return [float(time) for time in clip_span(index, ClipSampler(frames=frames, **options).sample(index))]

    assert span(0, 2) == [0, 0.8] and span(1) == [0.3, 0.4] and span(3, 4) == [0.8, 1.5]
    assert span(4, 1) == [0.3, 1.5]  # in whatever order they are shown
    assert span(3, 4, 5, 6) == [0.8, 1.5]  # the last frame again and again lasts no longer
    assert span(7, 8) == [0.9, 1.5] and span(4, 9, pad="constant") == [0.9, 1.5]
    black = Clip(np.array([-1]), np.array([np.nan]), np.array([False]))
    with pytest.raises(VideoError, match="nothing but black padding"):
        clip_span(index, black)
