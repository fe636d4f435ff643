"""`ClipSampler`: every mode, every pad, both clocks, on made-up indexes; nothing here touches a video."""

import copy
import dataclasses
import doctest
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dali.media import ClipSampler, VideoIndex, clips, video_index

TEN = VideoIndex(pts=np.arange(10), time_base=Fraction(1, 10))
ODD = VideoIndex(pts=[0, 130, 260, 300, 430, 560, 600, 730, 860, 900], time_base=Fraction(1, 1000), end_pts=1000)
"""Case 25's variable frame rate: 10 frames a second, late by 0, 30, 60 ms in turn."""
WEBM = VideoIndex(pts=np.round(np.arange(60) * 1000 / 30).astype(int), time_base=Fraction(1, 1000), end_pts=2000)
"""Thirty frames a second, as rounded to milliseconds by WebM."""


def frames(index: VideoIndex, clip: int = 0, /, **options: Any) -> list[int]:
    return ClipSampler(**options).sample(index, clip=clip).frames.tolist()


@pytest.mark.parametrize("module", [clips, video_index])
def test_examples_in_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_frames": 3, "stride": 4, "mode": "start", "start_seconds": 0.3}, [3, 7, 9]),
        ({"num_frames": 2, "stride": 4, "mode": "start", "start_seconds": 0.3}, [3, 7]),
        ({"num_frames": 10, "mode": "center"}, list(range(10))),
        ({"num_frames": 4, "mode": "center"}, [3, 4, 5, 6]),
        ({"num_frames": 1, "mode": "center"}, [4]),
        ({"num_frames": 4, "mode": "uniform"}, [3, 4, 5, 6]),
        ({"num_frames": 2, "stride": 20, "mode": "center"}, [0, 9]),
        ({"num_frames": 2, "mode": "start", "start_seconds": 0.25, "end_seconds": 0.35}, [2, 3]),
        ({"num_frames": 2, "mode": "start", "start_seconds": 0.2, "end_seconds": 0.3, "pad": "constant"}, [2, -1]),
        ({"frames": [0, 7, 3, 9]}, [0, 7, 3, 9]),
        ({"frames": [0, 7, 3, 19], "pad": "constant"}, [0, 7, 3, -1]),
        ({"num_frames": 2, "seconds": [0.5, 0.05]}, [5, 0]),
        ({"seconds": [-1.0, 0.95, 1.0, 1.25], "pad": "constant"}, [0, 9, -1, -1]),
        ({"seconds": [0.9, 1.0, 1.1], "pad": "reflect_101"}, [9, 8, 7]),
        ({"num_frames": 5, "fps": 10, "mode": "start"}, [0, 1, 2, 3, 4]),
        ({"num_frames": 4, "fps": 2.5, "mode": "start"}, [0, 4, 8, 9]),
        ({"num_frames": 4, "fps": 2.5, "mode": "start", "pad": "reflect_1001"}, [0, 4, 8, 7]),
        ({"num_frames": 2, "fps": 2.5, "mode": "center"}, [2, 6]),
    ],
    ids=str,
)
def test_frames(options: dict[str, Any], expected: list[int]) -> None:
    assert frames(TEN, **options) == expected


def test_variable_frame_rate_is_by_real_times() -> None:
    assert frames(ODD, seconds=[0.5, 0.56, 0.299, 0.3]) == [4, 5, 2, 3]
    # 0, 0.1, ... 0.9 s: the frame shown then, which is not always the next one
    assert frames(ODD, num_frames=10, fps=10, mode="start") == [0, 0, 1, 3, 3, 4, 6, 6, 7, 9]
    assert ODD.seconds[ClipSampler(seconds=[0.5]).sample(ODD).frames[0]] == 0.43


@pytest.mark.parametrize("start", range(31))
def test_same_rate_takes_every_frame_however_the_container_rounds(start: int) -> None:
    assert frames(WEBM, num_frames=30, fps=30, mode="start", start_seconds=start / 30) == list(range(start, start + 30))


def test_ntsc_rate() -> None:
    ntsc = VideoIndex(pts=np.arange(300) * 1001, time_base=Fraction(1, 30000))
    assert frames(ntsc, num_frames=300, fps=30000 / 1001, mode="start") == list(range(300))
    assert frames(ntsc, seconds=[0.5]) == [14]
    assert frames(ntsc, seconds=[15 * 1001 / 30000]) == [15]


def test_uniform_clips_go_from_the_first_to_the_last_that_fits() -> None:
    starts = [frames(TEN, k, num_frames=4, mode="uniform", num_clips=4)[0] for k in range(4)]
    assert starts == [0, 2, 4, 6]
    starts = [frames(TEN, k, num_frames=2, fps=5, mode="uniform", num_clips=3)[0] for k in range(3)]
    assert starts == [0, 3, 7]


@pytest.mark.parametrize(("pad", "clips"), [("edge", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9]]), ("none", None)])
def test_all_covers_the_video_once(pad: str, clips: list[list[int]] | None) -> None:
    sampler = ClipSampler(4, mode="all", pad=pad)
    expected = clips or [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sampler.count(TEN) == len(expected)
    assert [sampler.sample(TEN, clip=k).frames.tolist() for k in range(len(expected))] == expected
    with pytest.raises(ValueError, match=rf"clip must lie in \[0, {len(expected)}\), got {len(expected)}"):
        sampler.sample(TEN, clip=len(expected))


def test_all_by_rate() -> None:
    sampler = ClipSampler(3, fps=5, mode="all")
    assert [sampler.sample(TEN, clip=k).frames.tolist() for k in range(sampler.count(TEN))] == [[0, 2, 4], [6, 8, 9]]


def test_mask_and_times_of_padding() -> None:
    clip = ClipSampler(8, mode="start", start_seconds=0.5, pad="constant").sample(TEN)
    assert clip.num_real == 5
    assert clip.mask.tolist() == [True] * 5 + [False] * 3
    np.testing.assert_allclose(clip.pts_seconds, [0.5, 0.6, 0.7, 0.8, 0.9, np.nan, np.nan, np.nan])
    edge = ClipSampler(8, mode="start", start_seconds=0.5).sample(TEN)
    assert edge.pts_seconds[-1] == pytest.approx(0.9) and edge.num_real == 5
    assert edge.frames.dtype == np.int64 and edge.pts_seconds.dtype == np.float64


@pytest.mark.parametrize(
    ("pad", "numpy_mode"), [("reflect_101", "reflect"), ("reflect_1001", "symmetric"), ("edge", "edge")]
)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_pads_are_numpys(pad: str, numpy_mode: Any, length: int) -> None:
    index = VideoIndex(pts=np.arange(length), time_base=Fraction(1, 10))
    expected = np.pad(np.arange(length), (0, 17 - length), mode=numpy_mode)
    assert frames(index, num_frames=17, mode="start", pad=pad) == expected.tolist()


def test_no_pad_says_the_numbers() -> None:
    sampler = ClipSampler(4, stride=4, pad="none")
    with pytest.raises(ValueError, match=r"clip of 4 frames \(stride=4\) reaches frame 12, .* frames \[0, 10\)"):
        sampler.sample(TEN)
    with pytest.raises(ValueError, match=r"clip of 11 frames \(fps=10\) reaches frame 10"):
        ClipSampler(11, fps=10, pad="none").sample(TEN)
    with pytest.raises(ValueError, match=r"reaches frame 19"):
        ClipSampler(frames=[0, 19], pad="none").sample(TEN)
    assert len(ClipSampler(10, pad="none").sample(TEN).frames) == 10


@pytest.mark.parametrize("bounds", [(1.0, None), (5.0, 6.0), (None, -0.5), (None, 0.0)])
def test_bounds_without_frames(bounds: tuple[float | None, float | None]) -> None:
    sampler = ClipSampler(1, start_seconds=bounds[0], end_seconds=bounds[1])
    with pytest.raises(ValueError, match=r"no frames in .* the video lasts from 0.0 to 1.0 s"):
        sampler.sample(TEN)


def test_times_before_the_first_frame() -> None:
    late = VideoIndex(pts=[14, 15, 16], time_base=Fraction(1, 10))  # as MPEG-TS begins
    assert frames(late, seconds=[0.0, 1.4, 1.55]) == [0, 0, 1]
    early = VideoIndex(pts=[-2, -1, 0, 1], time_base=Fraction(1, 10))
    assert frames(early, seconds=[-0.1, 0.0]) == [1, 2]
    assert frames(early, num_frames=2, fps=10, mode="start", start_seconds=0.0) == [2, 3]


def test_random_is_torchs_generator() -> None:
    sampler = ClipSampler(3, stride=2)
    torch.manual_seed(3)
    first = [sampler.sample(TEN).frames.tolist() for _ in range(20)]
    torch.manual_seed(3)
    assert [sampler.sample(TEN).frames.tolist() for _ in range(20)] == first
    assert {clip[0] for clip in first} <= set(range(6)) and len({clip[0] for clip in first}) > 3


def test_random_reaches_every_start_evenly() -> None:
    torch.manual_seed(0)
    starts = [ClipSampler(3, stride=2).sample(TEN).frames[0] for _ in range(3000)]
    counts = np.bincount(starts, minlength=6)
    assert counts.size == 6 and counts.min() > 400  # of 500 expected
    by_rate = {int(ClipSampler(3, fps=5).sample(TEN).frames[0]) for _ in range(300)}
    assert by_rate == set(range(6))


def test_modes_other_than_random_draw_nothing() -> None:
    state = torch.get_rng_state()
    for mode in ("start", "center", "uniform", "all"):
        ClipSampler(3, mode=mode).sample(TEN)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "num_frames must be a whole number from 1 on, got 0"),
        ({"num_frames": 0}, "num_frames must be"),
        ({"num_frames": 2.5}, "num_frames must be a whole number from 1 on, got 2.5"),
        ({"num_frames": True}, "num_frames must be"),
        ({"num_frames": 2, "stride": 0}, "stride must be"),
        ({"num_frames": 2, "fps": 0}, "fps must be above 0, got 0"),
        ({"num_frames": 2, "fps": float("nan")}, "fps must be above 0"),
        ({"num_frames": 2, "stride": 2, "fps": 5}, "stride=2 and fps=5 say different things: give one"),
        ({"num_frames": 2, "mode": "middle"}, "mode must be one of random, start, center, uniform, all, explicit, got"),
        ({"num_frames": 2, "pad": "wrap"}, "pad must be one of edge, constant, reflect_101, reflect_1001, none, got"),
        ({"num_frames": 2, "num_clips": 2, "mode": "center"}, "num_clips=2 is for mode random or uniform, not center"),
        ({"num_frames": 2, "start_seconds": 2, "end_seconds": 1}, "start_seconds=2 must be below end_seconds=1"),
        ({"num_frames": 2, "frames": [1, 2, 3]}, "num_frames=2, but 3 frames or seconds are given"),
        ({"frames": []}, "num_frames=0, but 0 frames"),
        ({"frames": [-1]}, "frames must not be negative"),
        ({"frames": [1], "seconds": [1.0]}, "frames and seconds say different things"),
        ({"frames": [1], "stride": 2}, "name every frame: drop stride"),
        ({"seconds": [1.0], "start_seconds": 1.0}, "name every frame"),
        ({"seconds": [float("inf")]}, "seconds must be finite"),
        ({"num_frames": 2, "mode": "explicit"}, "needs frames="),
    ],
    ids=str,
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClipSampler(**options)


def test_it_is_a_value() -> None:
    sampler = ClipSampler(frames=[1, 2])
    assert sampler == ClipSampler(2, frames=(1, 2)) and hash(sampler) == hash(copy.deepcopy(sampler))
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    assert dataclasses.replace(sampler, pad="constant").frames == (1, 2)
    assert eval(repr(sampler)) == sampler
    assert (sampler.num_frames, sampler.mode, sampler.is_random) == (2, "explicit", False)
    assert "ClipSampler(num_frames=16, stride=4" in repr(ClipSampler(16, stride=4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.pad = "edge"  # type: ignore[misc]
    with pytest.raises(TypeError):
        ClipSampler(16, 4)  # type: ignore[misc]


@st.composite
def _indexes(draw: st.DrawFn) -> VideoIndex:
    gaps = draw(st.lists(st.integers(1, 200), min_size=1, max_size=60))
    start = draw(st.integers(-500, 2000))
    time_base = draw(st.sampled_from([Fraction(1, 1000), Fraction(1, 90000), Fraction(1001, 30000), Fraction(1, 25)]))
    return VideoIndex(pts=start + np.cumsum([0, *gaps[:-1]]), time_base=time_base, end_pts=start + sum(gaps))


@given(
    index=_indexes(),
    num_frames=st.integers(1, 20),
    by=st.one_of(
        st.fixed_dictionaries({"stride": st.integers(1, 7)}), st.fixed_dictionaries({"fps": st.floats(0.5, 100)})
    ),
    mode=st.sampled_from(["random", "start", "center", "uniform", "all"]),
    pad=st.sampled_from(clips.PADS),
    clip=st.integers(0, 3),
)
def test_every_clip_keeps_the_contract(
    index: VideoIndex, num_frames: int, by: dict[str, Any], mode: str, pad: str, clip: int
) -> None:
    num_clips = 4 if mode in ("random", "uniform") else 1
    sampler = ClipSampler(num_frames, **by, mode=mode, pad=pad, num_clips=num_clips)
    clip %= sampler.count(index)
    try:
        result = sampler.sample(index, clip=clip)
    except ValueError:
        assert pad == "none"  # and with any other pad there is a real frame missing
        assert (
            ClipSampler(num_frames, **by, mode=mode, num_clips=num_clips).sample(index, clip=clip).num_real < num_frames
        )
        return
    assert len(result.frames) == num_frames
    real = result.frames[result.mask]
    assert result.mask[0] and np.all(np.diff(result.mask.astype(int)) <= 0)  # padding comes last
    assert np.all(np.diff(real) >= (by.get("stride", 0))) and real.min() >= 0 and real.max() < index.num_frames
    if "stride" in by:
        assert np.all(np.diff(real) == by["stride"])
    padded = result.frames[~result.mask]
    assert np.all(padded == -1) if pad == "constant" else np.all((padded >= 0) & (padded < index.num_frames))
    good = result.frames >= 0
    np.testing.assert_array_equal(result.pts_seconds[good], index.seconds[result.frames[good]])
    assert np.all(np.isnan(result.pts_seconds[~good]))
    if pad == "none":
        assert result.num_real == num_frames
    if "fps" in by:  # at or before each wanted instant, to a millisecond or a tick
        wanted = result.pts_seconds[0] + np.arange(num_frames) / by["fps"]
        if mode != "all":
            assert np.all(index.seconds[real] <= wanted[result.mask] + 1e-3 + 1e-5)
