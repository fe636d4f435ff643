"""torchvision's Kinetics, UCF101 and HMDB51, unmodified and without torchcodec: made by a function, read as stand-ins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets import HMDB51, UCF101, Kinetics
from torchvision.datasets.video_utils import VideoClips
from torchvision.transforms import v2

from lightning_dali.media import IndexCache, build_index
from lightning_dali.proxies.video_capture import capture_video
from tests.media.video_files import make_video
from tests.video.clips import batches, datamodule, numbers

FLOAT = v2.Compose([v2.Resize((24, 32)), v2.ToDtype(torch.float32, scale=True)])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of two videos in the layouts of all three."""
    folder = tmp_path_factory.mktemp("datasets")
    for n in range(4):
        name = "ab"[n % 2]
        for parent in (folder / "train" / name, folder / "flat" / name):
            parent.mkdir(parents=True, exist_ok=True)
            make_video(parent / f"v_{n}.avi", "mpeg4", num_frames=14 + n, gop=5)
    (folder / "lists").mkdir()
    (folder / "lists" / "trainlist01.txt").write_text("a/v_0.avi 1\nb/v_1.avi 2\nb/v_3.avi 2\n")
    for name, lines in (("a", "v_0.avi 1\nv_2.avi 2\n"), ("b", "v_1.avi 1\nv_3.avi 1\n")):
        (folder / "lists" / f"{name}_test_split1.txt").write_text(lines)
    return folder


def factories(root: Path, **options: Any) -> dict[str, Callable[..., Any]]:
    flat, lists = str(root / "flat"), str(root / "lists")
    return {
        "Kinetics": partial(Kinetics, str(root), 5, extensions=("avi",), **options),
        "UCF101": partial(UCF101, flat, lists, 5, **{"output_format": "TCHW", **options}),
        "HMDB51": partial(HMDB51, flat, lists, 5, **{"output_format": "TCHW", **options}),
    }


VIDEOS = {"Kinetics": [14, 16, 15, 17], "UCF101": [14, 15, 17], "HMDB51": [14, 15, 17]}
"""Frames of each video, in the dataset's order."""


@pytest.mark.parametrize("name", VIDEOS)
def test_they_give_their_own_clips(name: str, root: Path, tmp_path: Path) -> None:
    make = factories(root, step_between_clips=5, transform=FLOAT)[name]
    dm = datamodule(make, tmp_path, batch_size=4)
    loader = dm.val_dataloader()
    found = list(loader)
    assert loader.trace().notes == []
    dm.close()
    clips = [clip for batch in found for clip in batch[0]]
    starts = [start for count in VIDEOS[name] for start in range(0, count - 4, 5)]
    assert len(clips) == len(starts) and found[0][1].shape == (4, 1, 0)
    for clip, start in zip(clips, starts, strict=True):
        assert numbers((clip * 255).round().byte()) == [*range(start, start + 5)]
    counts = [0 if count in (14, 16) else 1 for count in VIDEOS[name] for _ in range(0, count - 4, 5)]
    assert [int(label) for batch in found for label in batch[2]] == counts


@pytest.mark.parametrize("frame_rate", [5, 4, 20])
def test_another_frame_rate_is_torchvisions(frame_rate: int, root: Path, tmp_path: Path) -> None:
    make = factories(root, step_between_clips=3, frame_rate=frame_rate)["UCF101"]
    dm = datamodule(make, tmp_path, batch_size=1)
    loader = dm.val_dataloader()
    clips: VideoClips = loader.dataset.video_clips
    expected = []
    for video in range(clips.num_videos()):
        for clip, chosen in zip(clips.clips[video], clips.resampling_idxs[video], strict=True):
            span = torch.arange(int(clip[0]), int(clip[-1]) + 1)
            expected.append(span[chosen - chosen[0] if isinstance(chosen, torch.Tensor) else chosen].tolist())
    assert expected and [numbers(batch[0][0]) for batch in loader] == expected
    dm.close()


def test_thwc_comes_as_frames(root: Path, tmp_path: Path) -> None:
    make = factories(root, output_format="THWC")["HMDB51"]
    clips, _, _ = batches(make, tmp_path)[0]
    assert clips.shape == (2, 5, 48, 64, 3) and numbers(clips[0].permute(0, 3, 1, 2)) == [0, 1, 2, 3, 4]


def test_in_workers_and_with_a_shuffled_order(root: Path, tmp_path: Path) -> None:
    make = factories(root, step_between_clips=5, transform=FLOAT)["Kinetics"]
    dm = datamodule(make, tmp_path, stage="train", num_workers=2, layout="CTHW")
    dm.prepare_data()
    for clips, _, labels in dm.train_dataloader():
        assert clips.shape == (2, 3, 5, 24, 32) and len(labels) == 2
    dm.close()


def test_a_file_that_is_no_video_is_left_out_and_said(root: Path, tmp_path: Path, caplog: Any) -> None:
    bad = tmp_path / "bad.avi"
    bad.write_bytes(b"no video")
    good = str(next((root / "flat" / "a").glob("*.avi")))
    with caplog.at_level(logging.WARNING), capture_video(IndexCache(tmp_path / "index.sqlite3")):
        with pytest.warns(UserWarning, match="There aren't enough frames"):
            clips = VideoClips([good, str(bad)], 5, 5)
        assert [len(one) for one in clips.clips] == [build_index(good).num_frames // 5, 0]
        with pytest.raises(IndexError, match="out of range"):
            clips.get_clip(clips.num_clips())
    assert any("bad.avi has no clips: not a video" in message for message in caplog.messages)


def test_outside_of_the_scope_nothing_is_replaced() -> None:
    before = VideoClips.get_clip
    with capture_video(IndexCache()):
        assert VideoClips.get_clip is not before
    assert VideoClips.get_clip is before
