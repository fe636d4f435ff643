"""What comes out of a `VideoDataModule` for every way in: samplers, clips a video, structures, layouts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms import v2 as transforms

from lightning_dali import ClipSampler, VideoDataModule
from lightning_dali.datamodules.clips import PerClip
from lightning_dali.media import build_index
from tests.media.video_files import make_video
from tests.video.clips import Videos, batches, datamodule, eager, numbers

FRAMES = (20, 24, 9)
"""Frames of each file."""
HALF = v2.Compose([v2.Resize((32, 40)), v2.ToDtype(torch.float32, scale=True)])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("videos")
    return [
        make_video(folder / f"{n}.mp4", "h264", num_frames=count, gop=6, b_frames=2) for n, count in enumerate(FRAMES)
    ]


def rows(batched: list[Any]) -> list[list[int]]:
    """The frame numbers of every clip, in order."""
    return [numbers(clip) for batch in batched for clip in batch[0]]


SAMPLERS = {
    "start": ClipSampler(4, stride=2, mode="start"),
    "center": ClipSampler(4, stride=2, mode="center"),
    "uniform": ClipSampler(4, stride=2, mode="uniform", num_clips=3),
    "random": ClipSampler(4, stride=2, num_clips=2),
    "all": ClipSampler(4, stride=2, mode="all"),
    "all, whole clips": ClipSampler(4, stride=2, mode="all", pad="none"),
    "fps": ClipSampler(4, fps=5, mode="start"),
    "frames": ClipSampler(frames=[0, 7, 3, 19], pad="reflect_101"),
    "seconds": ClipSampler(seconds=[0.5, 0.0]),
    "black": ClipSampler(frames=[8, 9, 10, 30], pad="constant"),
    "bounds": ClipSampler(3, mode="start", start_seconds=0.4, end_seconds=0.7),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_gives_its_frames_in_the_order_of_the_videos(
    name: str, files: list[Path], tmp_path: Path
) -> None:
    sampler = SAMPLERS[name]
    found = batches(Videos(files), tmp_path, eval_clip=sampler, with_times=True)
    seen = 0
    clips = [(n, clip) for n, path in enumerate(files) for clip in range(sampler.count(build_index(path)))]
    for batch in found:
        field, labels = batch
        for row in range(len(labels)):
            video, clip = clips[seen]
            assert (int(labels[row]), int(field["video_index"][row]), int(field["clip_index"][row])) == (
                video,
                video,
                clip,
            )
            index = build_index(files[video])
            if not sampler.is_random:
                wanted = sampler.sample(index, clip=clip)
                shown = [
                    n if frame >= 0 else 0 for n, frame in zip(numbers(field["video"][row]), wanted.frames, strict=True)
                ]
                assert shown == [max(frame, 0) for frame in wanted.frames.tolist()]
                assert field["mask"][row].tolist() == wanted.mask.tolist()
                times = torch.from_numpy(wanted.pts_seconds)
                assert torch.equal(field["pts_seconds"][row].nan_to_num(-1), times.nan_to_num(-1))
            else:
                assert torch.equal(field["video"][row], eager(str(files[video]), sampler, None, seen, clip=clip))
            seen += 1
    assert seen == len(clips)


def test_training_draws_anew_each_epoch_and_evaluation_does_not(files: list[Path], tmp_path: Path) -> None:
    sampler = ClipSampler(3, stride=2)
    dm = datamodule(Videos(files[:2]), tmp_path, stage="train", clip=sampler, shuffle=False)
    passes = [rows(list(dm.train_dataloader())) for _ in range(3)]
    assert len({str(one) for one in passes}) > 1
    assert all(clip[0] + 4 == clip[2] for one in passes for clip in one)
    dm.close()
    dm = datamodule(Videos(files), tmp_path, clip=sampler)
    passes = [rows(list(dm.val_dataloader())) for _ in range(2)]
    assert passes[0] == passes[1] == [[7, 9, 11], [9, 11, 13], [2, 4, 6]]  # from the centre
    dm.close()


def test_random_clips_with_the_same_draws_for_any_number_of_workers(files: list[Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"stage": "train", "clip": ClipSampler(4, stride=2), "train_transform": HALF}
    here = batches(Videos(files * 2), tmp_path, **options)
    there = batches(Videos(files * 2), tmp_path, num_workers=2, **options)
    for (a, labels), (b, others) in zip(here, there, strict=True):
        assert torch.equal(a, b) and torch.equal(labels, others)
        for clip, index in zip(a, labels.tolist(), strict=True):
            expected = eager(str((files * 2)[index]), options["clip"], HALF, index)
            assert (clip - expected).abs().mean() < 1 / 255


def test_cthw(files: list[Path], tmp_path: Path) -> None:
    sampler = ClipSampler(4, mode="start")
    plain, turned = (batches(Videos(files), tmp_path, clip=sampler, layout=layout) for layout in ("TCHW", "CTHW"))
    for (a, _), (b, _) in zip(plain, turned, strict=True):
        assert b.shape[1:3] == (3, 4) and b.is_contiguous() and torch.equal(a, b.transpose(1, 2))


STRUCTURES: dict[str, Any] = {
    "path and label": (lambda path, n: (path, n), lambda batch: batch[0]),
    "a Path": (lambda path, n: (Path(path), n), lambda batch: batch[0]),
    "bytes": (lambda path, n: (Path(path).read_bytes(), n), lambda batch: batch[0]),
    "dict": (lambda path, n: {"text": "a", "video": path, "id": n}, lambda batch: batch["video"]),
    "path alone": (lambda path, n: path, lambda batch: batch),
    "frames": (
        lambda path, n: [tv_tensors.Video(eager(path, ClipSampler(4, mode="start"), None, 0)), n],
        lambda b: b[0],
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_samples_of_every_structure(name: str, files: list[Path], tmp_path: Path) -> None:
    make, field = STRUCTURES[name]
    sampler = ClipSampler(4, mode="start")
    found = batches(Videos(files, make), tmp_path, clip=sampler, eval_transform=HALF)
    clips = [clip for batch in found for clip in field(batch)]
    assert len(clips) == len(files)
    for clip, path in zip(clips, files, strict=True):
        off = (clip - eager(str(path), sampler, HALF, 0)).abs() * 255
        assert off.mean() < 0.8, off.mean()
    if name == "dict":
        assert found[0]["text"] == ["a", "a"] and found[0]["id"].tolist() == [0, 1]


class Doubled(torch.nn.Module):
    """A user's module that needs pixels."""

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        return video.float().flip(0) * 2


@pytest.mark.parametrize("layout", ["TCHW", "CTHW"])
def test_what_needs_pixels_gets_them(layout: str, files: list[Path], tmp_path: Path) -> None:
    sampler = ClipSampler(4, mode="start")
    transform = v2.Compose([v2.Resize((32, 40)), Doubled()])
    dm = datamodule(Videos(files), tmp_path, clip=sampler, eval_transform=transform, layout=layout)
    loader = dm.val_dataloader()
    clips = [clip for batch in loader for clip in batch[0]]
    for clip, path in zip(clips, files, strict=True):
        clip = clip if layout == "TCHW" else clip.transpose(0, 1)
        assert torch.equal(clip, eager(str(path), sampler, transform, 0))
    assert any("Doubled" in note for _, note in loader.trace().notes)
    dm.close()


def test_some_clips_may_need_pixels_and_others_not(files: list[Path], tmp_path: Path) -> None:
    sampler = ClipSampler(4, mode="start")
    transform = v2.Compose([HALF, v2.RandomApply([v2.Lambda(lambda video: video.clamp(0.2, 0.8))], p=0.5)])
    found = batches(Videos(files * 3), tmp_path, clip=sampler, eval_transform=transform, batch_size=9)
    for index, clip in enumerate(found[0][0]):
        assert (clip - eager(str((files * 3)[index]), sampler, transform, index)).abs().mean() * 255 < 0.8


def test_idioms_are_recorded(files: list[Path], tmp_path: Path) -> None:
    sampler = ClipSampler(4, mode="start")
    for transform in (
        transforms.Lambda(lambda video: video.float() / 255),
        transforms.Lambda(lambda video: video / 255),
        transforms.ToDtype({tv_tensors.Video: torch.float32, "others": None}, scale=True),
    ):
        dm = datamodule(Videos(files), tmp_path, clip=sampler, eval_transform=transform)
        loader = dm.val_dataloader()
        (first, *_), _ = next(iter(loader))
        torch.testing.assert_close(first, eager(str(files[0]), sampler, v2.ToDtype(torch.float32, scale=True), 0))
        assert loader.trace().notes == []
        dm.close()


def test_sizes_that_differ(files: list[Path], tmp_path: Path) -> None:
    other = make_video(tmp_path / "other.mp4", "h264", width=80, height=48)
    videos = Videos([files[0], other])
    with pytest.raises(ValueError, match=r"different sizes in one batch: dataset index 0 .* Add a transform"):
        batches(videos, tmp_path, clip=ClipSampler(4))
    ((clips, _),) = batches(videos, tmp_path, clip=ClipSampler(4, mode="start"), ragged="list")
    assert [tuple(clip.shape) for clip in clips] == [(4, 3, 48, 64), (4, 3, 48, 80)]
    assert numbers(clips[1]) == [0, 1, 2, 3]


def test_a_custom_collate_function_sees_stand_ins(files: list[Path], tmp_path: Path) -> None:
    def pairs(samples: list[Any]) -> Any:
        return {"clips": torch.stack([video for video, _ in samples]), "last": samples[-1][0]}

    found = batches(Videos(files), tmp_path, clip=ClipSampler(3, mode="start"), collate_fn=pairs, batch_size=3)
    assert found[0]["clips"].shape == (3, 3, 3, 48, 64)
    assert torch.equal(found[0]["last"], found[0]["clips"][2])


def test_two_videos_in_a_sample(files: list[Path], tmp_path: Path) -> None:
    videos = Videos(files, lambda path, n: {"a": path, "b": str(files[0])})
    found = batches(videos, tmp_path, clip=ClipSampler(3, mode="center"), eval_transform=HALF)
    for batch in found:
        assert batch["a"].shape[1:] == (3, 3, 32, 40) and batch["b"].shape[1:] == (3, 3, 48, 64)
        assert [numbers(clip) for clip in batch["b"]] == [[8, 9, 10]] * len(batch["b"])


def test_a_sample_without_video_is_an_error_that_says_what_is_expected(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no video: expected a path .* got int, str"):
        batches(Videos(files, lambda path, n: (n, "text")), tmp_path, eval_transform=HALF)
    with pytest.raises(TypeError, match=r"mode='all' counts the clips .* sample 0 has no path"):
        batches(Videos(files, lambda path, n: (n, "text")), tmp_path, clip=ClipSampler(2, mode="all"))


def test_a_dataset_that_chooses_its_clips_gives_no_others(files: list[Path], tmp_path: Path) -> None:
    make, _ = STRUCTURES["frames"]
    with pytest.raises(TypeError, match="the dataset chooses its clips itself"):
        batches(Videos(files, make), tmp_path, clip=ClipSampler(2, mode="uniform", num_clips=2))


def test_clips_are_numbered_video_by_video() -> None:
    clips = PerClip(["a", "b", None], [2, 3, 1])
    assert len(clips) == 6 and [clips.locate(n) for n in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert (clips[3].sample, clips[3].video, clips[3].clip) == ("b", 1, 1)
    assert clips[5] is None
    with pytest.raises(IndexError, match="sample 6 of 6"):
        clips[6]


def test_options_are_checked(files: list[Path], tmp_path: Path) -> None:
    for name, value in (("decoder", "gpu"), ("layout", "THWC")):
        with pytest.raises(ValueError, match=rf"{name}: got '{value}'; allowed"):
            VideoDataModule(**{name: value})
    with pytest.raises(TypeError, match=r"clip is 16: expected a ClipSampler"):
        VideoDataModule(clip=16)  # type: ignore[arg-type]
    for decoder in ("nvdec", "dali"):
        with pytest.raises(ValueError, match="the device is the CPU: NVDEC needs a GPU"):
            datamodule(Videos(files), tmp_path, decoder=decoder).setup("validate")


def test_explain_names_what_runs_where(files: list[Path], tmp_path: Path) -> None:
    transform = v2.Compose([v2.RandomResizedCrop(40), v2.ColorJitter(0.4), v2.ToDtype(torch.float32, scale=True)])
    dm = datamodule(Videos(files), tmp_path, stage="train", train_transform=transform, clip=ClipSampler(4))
    told = str(dm.explain())
    assert "worker (PyAV)" in told and "adjust_brightness" in told and "(2, 4, 3, 40, 40)" in told
    dm.close()
