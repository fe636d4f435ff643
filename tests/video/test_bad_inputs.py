"""Files that are no usable videos: found, named with index, path and reason, and handled by the common policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lightning_dali import BadSampleError, ClipSampler
from lightning_dali.media import build_index
from tests.media.video_files import make_video
from tests.video.clips import Videos, batches, datamodule, numbers

CLIP = ClipSampler(8, mode="start")


def sound_only(path: Path) -> Path:
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("aac", rate=48000)
        for k in range(10):
            frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = 48000, 1024 * k
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def cut_off(path: Path, share: float, **options: Any) -> Path:
    whole = make_video(path, num_frames=30, gop=6, **options)
    whole.write_bytes(whole.read_bytes()[: int(share * whole.stat().st_size)])
    return path


def damaged(path: Path) -> Path:
    """Its index is fine, its pictures are not."""
    make_video(path, "h264", gop=30, num_frames=30)
    table = build_index(path).packets
    data = bytearray(path.read_bytes())
    for start, size in zip(table.positions[3:6].tolist(), table.sizes[3:6].tolist(), strict=True):
        data[start : start + size] = bytes(size)
    path.write_bytes(data)
    return path


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


BAD: dict[str, Any] = {
    "audio only": (lambda folder: sound_only(folder / "bad.mp4"), "no video stream .audio only: aac"),
    "random bytes": (
        lambda folder: written(folder / "bad.mp4", np.random.default_rng(0).bytes(5000)),
        "not a video",
    ),
    "index cut off": (lambda folder: cut_off(folder / "bad.mp4", 0.6, codec="h264"), "truncated: its index is missing"),
    "empty": (lambda folder: written(folder / "bad.mp4", b""), "empty file"),
    "missing": (lambda folder: folder / "bad.mp4", "No such file"),
    "WebM cut to 10 %": (lambda folder: cut_off(folder / "bad.webm", 0.1, codec="vp9"), "frames|truncated"),
    "damaged pictures": (lambda folder: damaged(folder / "bad.mp4"), "do not decode"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("good")
    return [make_video(folder / f"{n}.mp4", "h264", gop=6, num_frames=20) for n in range(3)]


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_named_replaced_and_dropped(kind: str, good: list[Path], tmp_path: Path) -> None:
    make, reason = BAD[kind]
    bad = make(tmp_path)
    dataset = Videos([good[0], bad, good[1], good[2]])
    clip = ClipSampler(20, stride=1, mode="start", pad="none") if kind.startswith("WebM") else CLIP
    with pytest.raises(BadSampleError, match=f"sample 1 .*bad.* on rank 0 in epoch 0: .*({reason})") as raised:
        batches(dataset, tmp_path, clip=clip, batch_size=4)
    assert (raised.value.sample.dataset_index, raised.value.sample.path) == (1, str(bad))
    for policy in ("replace", "drop"):
        dm = datamodule(dataset, tmp_path, clip=clip, batch_size=4, on_bad_sample=policy)
        ((clips, labels),) = list(dm.val_dataloader())
        assert len(labels) == len(clips) == (4 if policy == "replace" else 3)
        assert 1 not in labels.tolist() and all(numbers(one)[0] == 0 for one in clips)
        (found,) = dm.bad_samples
        assert (found.dataset_index, found.path) == (1, str(bad))
        dm.close()


def test_a_video_too_short_for_a_clip_without_padding(good: list[Path], tmp_path: Path) -> None:
    short = make_video(tmp_path / "short.mp4", "h264", num_frames=6)
    dataset = Videos([good[0], short])
    with pytest.raises(BadSampleError, match=r"sample 1 .*short.*a clip of 8 frames .* reaches frame 7, .* \[0, 6\)"):
        batches(dataset, tmp_path, clip=ClipSampler(8, mode="start", pad="none"))
    ((clips, labels),) = batches(
        dataset, tmp_path, clip=ClipSampler(8, mode="start", pad="none"), on_bad_sample="replace"
    )
    assert labels.tolist() == [0, 0] and numbers(clips[1]) == [*range(8)]


def test_bad_files_are_bad_in_workers_too(good: list[Path], tmp_path: Path) -> None:
    dataset = Videos([*good, sound_only(tmp_path / "bad.mp4")])
    with pytest.raises(BadSampleError, match=r"sample 3 .*bad.mp4.*audio only"):
        batches(dataset, tmp_path, clip=CLIP, num_workers=2)


def test_a_webm_cut_to_sixty_percent_gives_the_frames_it_has(tmp_path: Path) -> None:
    """Case 26: a short decode is flagged by the mask, not filled with black."""
    path = cut_off(tmp_path / "cut.webm", 0.6, codec="vp9", width=160, height=128)
    ((field, _),) = batches(Videos([path]), tmp_path, clip=ClipSampler(30, mode="start"), with_times=True, batch_size=1)
    real = int(field["mask"].sum())
    assert 6 < real < 30
    assert numbers(field["video"][0]) == [*range(real), *[real - 1] * (30 - real)]


def test_counting_clips_leaves_bad_files_to_the_policy(good: list[Path], tmp_path: Path) -> None:
    dataset = Videos([good[0], written(tmp_path / "bad.mp4", b"no video"), good[1]])
    dm = datamodule(
        dataset, tmp_path, clip=ClipSampler(10, mode="all"), on_bad_sample="drop", batch_size=5, with_times=True
    )
    ((field, labels),) = list(dm.val_dataloader())
    assert labels.tolist() == [0, 0, 2, 2] and field["clip_index"].tolist() == [0, 1, 0, 1]
    assert [bad.path for bad in dm.bad_samples] == [str(tmp_path / "bad.mp4")]
    dm.close()
