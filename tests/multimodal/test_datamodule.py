"""Media of several kinds in one sample, against PIL, torchvision, PyAV, soundfile and torchaudio. About 25 s."""

# Over 300 lines: the cases share their media, and each is compared with another library.

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image
import pytest
import torch
import torchaudio
from torch.utils.data import IterableDataset, get_worker_info
from torchaudio import functional as F
from torchvision.transforms import v2

from lightning_dali import ClipSampler, MultiModalDataModule, VideoDataModule, environment
from lightning_dali.audio import load_audio
from tests.multimodal.samples import (
    CLIP,
    CROPPED,
    END,
    MASKED,
    PTS,
    RATE,
    TRANSFORMS,
    Dataset,
    Files,
    batches,
    datamodule,
    film,
    near,
    picture,
    plain,
    rows,
    sound,
)
from tests.video.clips import numbers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


# -- what comes out --------------------------------------------------------------------------------------------------


def test_image_and_text(files: Files, tmp_path: Path) -> None:
    def pair(index: int) -> dict[str, Any]:
        tokens = torch.arange(index, index + 4)
        return {"image": picture(files.photos[index]), "tokens": tokens, "caption": f"photo {index}"}

    found = rows(batches(Dataset(pair), tmp_path, kinds=["image"]))
    for index, row in enumerate(found):
        expected = plain(pair, index)
        near(row["image"], expected["image"], 0.02)
        assert torch.equal(row["tokens"], expected["tokens"]) and row["caption"] == expected["caption"]


class Spoken(NamedTuple):
    image: Any
    speech: Any
    rate: int
    label: int


@pytest.mark.parametrize("num_workers", [0, 2])
def test_image_and_spoken_caption_that_the_dataset_transforms(num_workers: int, files: Files, tmp_path: Path) -> None:
    def make(index: int) -> Spoken:
        wave, rate = load_audio(str(files.sounds[index]))
        image = PIL.Image.open(files.photos[index]).convert("RGB")
        return Spoken(CROPPED(image), MASKED(wave), rate, 5000 + index)

    dm = datamodule(Dataset(make), tmp_path, kinds=["audio", "image"], num_workers=num_workers)
    loader = dm.val_dataloader()
    batched = list(loader)
    assert loader.trace().notes == []
    dm.close()
    assert type(batched[0]) is Spoken and batched[0].rate.tolist() == [16_000] * 2
    for index, row in enumerate(rows([batch._asdict() for batch in batched])):
        expected = plain(make, index)
        near(row["image"], expected.image, 0.02)
        torch.testing.assert_close(row["speech"], expected.speech, atol=2e-3, rtol=1e-3)
        assert row["label"] == 5000 + index


FORMS: dict[str, Any] = {
    "paths": lambda path: str(path),
    "bytes": lambda path: Path(path).read_bytes(),
}


@pytest.mark.parametrize(("form", "num_workers"), [("paths", 2), ("bytes", 0)])
def test_three_kinds_in_a_dict_with_a_transform_each(form: str, num_workers: int, files: Files, tmp_path: Path) -> None:
    def make(index: int) -> dict[str, Any]:
        # the order in a sample is none of draws: those are of the video, then of the image, then of the audio
        media = {"speech": files.sounds[index], "photo": files.photos[index], "film": files.videos[index]}
        return {
            **{name: FORMS[form](path) for name, path in media.items()},
            "note": "a.txt",
            "tokens": torch.ones(3) * index,
        }

    def expected(index: int) -> Any:
        clip = film(files.videos[index])[0]
        return clip, picture(files.photos[index]), sound(files.sounds[index])

    found = batches(
        Dataset(make), tmp_path, kinds=["image", "video", "audio"], num_workers=num_workers, clip=CLIP, eval_clip=CLIP,
        train_transform={}, eval_transform=TRANSFORMS,
    )  # fmt: skip
    for index, row in enumerate(rows(found)):
        clip, image, mel = plain(expected, index)
        near(row["film"], clip, 1 / 255)
        near(row["photo"], image, 0.02)
        torch.testing.assert_close(row["speech"], mel, atol=2e-3, rtol=1e-3)
        assert row["note"] == "a.txt" and torch.equal(row["tokens"], torch.ones(3) * index)


def test_stereo_pair_with_one_draw_and_a_number(files: Files, tmp_path: Path) -> None:
    crop = v2.Compose(
        [v2.RandomCrop(40), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    )

    def pair(index: int) -> Any:
        left, right = (PIL.Image.open(files.photos[n % 6]).convert("RGB") for n in (index, index + 2))
        return {"views": crop(left, right), "disparity": index / 4}

    for index, row in enumerate(rows(batches(Dataset(pair), tmp_path, kinds=["image"], num_workers=0))):
        left, right = plain(pair, index)["views"]
        near(row["views"][0], left, 0.004)
        near(row["views"][1], right, 0.004)
        assert float(row["disparity"]) == index / 4


# -- a video and its own sound ---------------------------------------------------------------------------------------


def check_in_time(video: torch.Tensor, times: torch.Tensor, wave: torch.Tensor) -> list[int]:
    """A clip of the click track: each frame's click is heard when the frame begins, and nothing else is; its frames."""
    shown = numbers(video)
    begin, end = PTS[shown[0]], [*PTS, END][shown[-1] + 1]
    assert times.tolist() == pytest.approx([PTS[number] / 1000 for number in shown])
    first, last = (round(Fraction(time, 1000) * RATE) for time in (begin, end))
    assert wave.shape == (2, last - first)
    heard = {int(at): float(wave[0, at]) for at in wave[0].nonzero()}
    expected = {
        round(Fraction(time, 1000) * RATE) - first: 0.5 + number / 64
        for number, time in enumerate(PTS)
        if begin <= time < end
    }
    assert heard == pytest.approx(expected, abs=1e-4) and torch.equal(wave[0], -wave[1])
    return shown


@pytest.mark.parametrize(("stage", "num_workers"), [("train", 2), ("val", 0)])
def test_each_clip_comes_with_the_sound_of_just_its_time(
    stage: str, num_workers: int, files: Files, tmp_path: Path
) -> None:
    drawn = set()
    sampler = ClipSampler(3, stride=2) if stage == "train" else ClipSampler(3, stride=2, mode="uniform", num_clips=3)
    batched = batches(
        Dataset(lambda index: (str(files.videos[index]), index)), tmp_path, stage=stage, num_workers=num_workers,
        kinds=["video"], with_audio=True, with_times=True, clip=sampler, shuffle=stage == "train",
    )  # fmt: skip
    for row in rows(batched):
        field = row[0]
        drawn.add(tuple(check_in_time(field["video"], field["pts_seconds"], field["audio"])))
        assert int(field["video_index"]) == int(row[1])
    assert drawn == {(0, 2, 4), (3, 5, 7), (7, 9, 11)} if stage == "val" else len(drawn) > 1


def test_the_sound_is_resampled_and_transformed(files: Files, tmp_path: Path) -> None:
    sampler = ClipSampler(4, mode="start")
    found = batches(
        Dataset(lambda index: {"file": files.videos[index].read_bytes()}), tmp_path, kinds=["video", "audio"],
        with_audio=True, clip=sampler, sample_rate=16_000, eval_transform={"audio": lambda wave: MASKED(wave.mean(0))},
    )  # fmt: skip

    def expected(index: int) -> torch.Tensor:
        wave, _ = load_audio(str(files.videos[index]), duration_seconds=PTS[4] / 1000)
        made: torch.Tensor = MASKED(F.resample(wave, RATE, 16_000).mean(0))
        return made

    for index, row in enumerate(rows(found)):
        assert numbers(row["file"]["video"]) == [0, 1, 2, 3]
        torch.testing.assert_close(row["file"]["audio"], plain(expected, index), atol=2e-3, rtol=1e-3)


def test_torchvisions_datasets_get_it_in_the_place_they_have_for_it(files: Files, tmp_path: Path) -> None:
    from torchvision.datasets import Kinetics

    for index, path in enumerate(files.videos[:4]):
        folder = tmp_path / "train" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).symlink_to(path)
    made = batches(
        lambda: Kinetics(str(tmp_path), 4, step_between_clips=4, extensions=("mov",)), tmp_path, kinds=["video"],
        with_audio=True, with_times=True,
    )  # fmt: skip
    assert set(made[0][0]) == {"video", "pts_seconds", "mask", "video_index", "clip_index"}  # no sound here
    shown = [check_in_time(row[0]["video"], row[0]["pts_seconds"], row[1]) for row in rows(made)]
    assert shown == [[*range(at, at + 4)] for _ in range(4) for at in (0, 4, 8)]


# -- what is whose ---------------------------------------------------------------------------------------------------


def test_a_dataset_that_insists_on_real_images_still_loads_its_audio_on_the_device(
    files: Files, tmp_path: Path
) -> None:
    def make(index: int) -> Any:
        wave, _ = torchaudio.load(files.sounds[index])  # captured: torchcodec is not needed
        image = PIL.Image.open(files.photos[index])
        if type(image).__module__.split(".")[0] != "PIL":
            raise TypeError("no PIL image")
        return CROPPED(image.convert("RGB")), MASKED(wave)

    dm = datamodule(Dataset(make), tmp_path, kinds=["image", "audio"])
    found, told = list(dm.val_dataloader()), dm.explain("val")
    dm.close()
    for index, row in enumerate(rows(found)):
        expected = plain(lambda n: (picture(files.photos[n]), sound(files.sounds[n])), index)
        near(row[0], expected[0], 0.02)
        torch.testing.assert_close(row[1], expected[1], atol=2e-3, rtol=1e-3)
    assert any("no PIL image" in why for _, why in told.materialised)
    assert not any(name == "1" for name, _ in told.materialised)


def test_waveforms_beside_images_and_other_numbers(files: Files, tmp_path: Path) -> None:
    """Samples whose audio is decoded already: it is the largest float array, and no picture."""

    def make(index: int) -> Any:
        picked = torch.rand(3)
        image = v2.functional.to_dtype(
            v2.functional.to_image(picture(files.photos[index], lambda one: one)), scale=True
        )
        return {
            "embedding": picked,
            "image": image[:, :50, :60].as_subclass(torch.Tensor),
            "wave": sound(files.sounds[index], None),
        }

    found = batches(Dataset(make), tmp_path, kinds=["image", "audio"], eval_transform={"audio": MASKED})
    for index, row in enumerate(rows(found)):
        expected = plain(lambda n: (make(n), MASKED(sound(files.sounds[n], None))), index)
        assert torch.equal(row["embedding"], expected[0]["embedding"])
        near(row["image"], expected[0]["image"], 0.0)
        torch.testing.assert_close(row["wave"], expected[1], atol=2e-3, rtol=1e-3)


# -- the engine's guarantees -----------------------------------------------------------------------------------------


def mixed(files: Files, bad: dict[int, str] | None = None, folder: Path | None = None) -> Dataset:
    """Three kinds in a sample; of some samples one medium is broken."""

    def make(index: int) -> dict[str, Any]:
        media = {"film": files.videos[index], "photo": files.photos[index], "speech": files.sounds[index]}
        kind = (bad or {}).get(index)
        if kind is not None:
            assert folder is not None
            media[kind] = folder / media[kind].name
            media[kind].write_bytes(b"" if kind != "film" else files.videos[0].read_bytes().replace(b"sowt", b"xxxx"))
        return {**{name: str(path) for name, path in media.items()}, "index": index}

    return Dataset(make)


CLIP_AT_START = ClipSampler(3, stride=2, mode="start")
OPTIONS: dict[str, Any] = {"kinds": ["image", "video", "audio"], "clip": CLIP, "with_audio": True}
BAD = {1: "photo", 2: "speech", 3: "film"}


@pytest.mark.parametrize(("policy", "num_workers"), [("raise", 2), ("replace", 0), ("drop", 2)])
def test_a_bad_medium_of_any_kind_makes_a_bad_sample(
    policy: str, num_workers: int, files: Files, tmp_path: Path
) -> None:
    from lightning_dali import BadSampleError

    dataset = mixed(files, BAD, tmp_path)
    dm = datamodule(
        dataset,
        tmp_path,
        num_workers=num_workers,
        batch_size=3,
        on_bad_sample=policy,
        eval_transform=TRANSFORMS,
        **OPTIONS,
    )
    try:
        if policy == "raise":
            with pytest.raises(BadSampleError, match=r"sample 1 \(.*00001\.jpg\) .*empty file"):
                list(dm.val_dataloader())
            return
        found = [batch["index"].tolist() for batch in dm.val_dataloader()]
        assert [len(batch) for batch in found] == ([3, 3] if policy == "replace" else [1, 2])
        assert {index for batch in found for index in batch} == {0, 4, 5}
        reasons = {one.dataset_index: (Path(one.path or "").name, one.reason) for one in dm.bad_samples}
        assert sorted(reasons) == [1, 2, 3]
        assert [reasons[index][0] for index in (1, 2, 3)] == ["00001.jpg", "2.wav", "3.mov"]
        assert "the video has no sound" in reasons[3][1]
    finally:
        dm.close()


class Stream(IterableDataset[Any]):
    """The same samples as a stream that shards itself."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.dataset[index] for index in range(first, len(self.dataset), step))


def test_streams_too(files: Files, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "num_workers": 2, "eval_transform": TRANSFORMS, "eval_clip": CLIP_AT_START}
    found = rows(batches(Stream(mixed(files)), tmp_path, **options))
    assert sorted(int(row["index"]) for row in found) == [*range(6)]
    for row in found:
        assert row["film"]["video"].shape == (3, 3, 24, 32) and row["photo"].shape == (3, 32, 32)
        torch.testing.assert_close(row["speech"], sound(files.sounds[int(row["index"])], None), atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_inside_an_epoch(num_workers: int, files: Files, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "stage": "train", "train_transform": TRANSFORMS}
    whole = datamodule(mixed(files), tmp_path, **options)
    expected = list(whole.train_dataloader())
    first = datamodule(mixed(files), tmp_path, num_workers=num_workers, **options)
    one = iter(first.train_dataloader())
    next(one)
    state = first.train_dataloader().state_dict()
    one.close()
    again = datamodule(mixed(files), tmp_path, num_workers=num_workers, **options)
    loader = again.train_dataloader()
    loader.load_state_dict(state)
    rest = list(loader)
    for dm in (whole, first, again):
        dm.close()
    assert len(rest) == len(expected) - 1
    for ours, theirs in zip(rows(rest), rows(expected[1:]), strict=True):
        assert int(ours["index"]) == int(theirs["index"])
        for name in ("photo", "speech"):
            assert torch.equal(ours[name], theirs[name])
        for name in ("video", "audio"):
            assert torch.equal(ours["film"][name], theirs["film"][name])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_release_frees_every_graph_and_leaves_batches_alone(num_workers: int, files: Files, tmp_path: Path) -> None:
    dm = datamodule(mixed(files), tmp_path, num_workers=num_workers, eval_transform=TRANSFORMS, **OPTIONS)
    loader = dm.val_dataloader()
    loader.set_epoch(0)
    first = list(loader)
    assert loader.server.built
    kept = [row["speech"].clone() for row in rows(first)]
    dm.release()
    assert not loader.server.built
    assert all(torch.equal(row["speech"], before) for row, before in zip(rows(first), kept, strict=True))
    again = list(loader)
    dm.close()
    for ours, theirs in zip(rows(again), rows(first), strict=True):
        assert torch.equal(ours["photo"], theirs["photo"]) and torch.equal(
            ours["film"]["video"], theirs["film"]["video"]
        )


def test_explain_and_preview_show_every_field(files: Files, tmp_path: Path) -> None:
    from lightning_dali.cli.preview import preview

    dm = datamodule(mixed(files), tmp_path, eval_transform=TRANSFORMS, **OPTIONS)
    told = dm.explain("val")
    sheet = preview(dm.stage_loaders("val")[0], count=2)
    dm.close()
    assert told.problem is None
    names = ", ".join(plan.field for plan in told.fields)
    assert all(name in names for name in ("film/video", "film/audio", "photo", "speech")), names
    steps = {step.name for plan in told.fields for graph in plan.graphs for step in graph}
    assert {"decode", "to torch.float32 and normalize", "decode audio", "MelSpectrogram"} <= steps
    shapes = {output.field: output.shape for output in told.outputs}
    assert shapes["photo"] == (2, 3, 32, 32) and shapes["film/video"] == (2, 3, 3, 24, 32)
    assert {"film/audio/data", "film/audio/lengths", "speech/data", "index"} <= set(shapes)
    assert sheet.image.width > 0 and not sheet.notes


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a word": ({"kinds": "image"}, TypeError, r"kinds is 'image': expected a list with one or more of 'video', 'image', 'audio'"),
    "nothing": ({"kinds": []}, TypeError, r"kinds is \[\]: expected a list"),
    "unknown": ({"kinds": ["picture"]}, ValueError, r"kinds: got 'picture'; allowed: 'video', 'image', 'audio'"),
    "one transform": ({"kinds": ["image"], "train_transform": CROPPED}, TypeError, r"(?s)train_transform is Compose.*from a kind to its"),
    "of no kind": ({"kinds": ["image"], "eval_transform": {"audio": MASKED}}, ValueError, r"eval_transform has the key 'audio': allowed are the kinds of this datamodule, \['image'\]"),
    "no transform": ({"kinds": ["image"], "eval_transform": {"image": [1]}}, TypeError, r"eval_transform\['image'\] is a list, which cannot be called"),
    "clip": ({"kinds": ["image"], "clip": CLIP}, ValueError, r"clip is ClipSampler.* which is for video, but kinds is \['image'\]: add 'video' to kinds, or drop clip"),
    "sound": ({"kinds": ["image"], "with_audio": True}, ValueError, r"with_audio is True, which is for video"),
    "rate": ({"kinds": ["video"], "sample_rate": 16_000}, ValueError, r"sample_rate is 16000, which is for audio"),
    "layout in memory": ({"kinds": ["audio"], "channels_last": True}, ValueError, r"channels_last is True, which is for image"),
    "no rate": ({"kinds": ["audio"], "sample_rate": 0}, ValueError, r"sample_rate is 0: it must be more than 0"),
    "no sampler": ({"kinds": ["video"], "clip": 16}, TypeError, r"clip is 16: expected a ClipSampler"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({"kinds": ["image", "audio"]}, 12),
        ({"kinds": ["video"], "decoder": "dali"}, 12),
        ({"kinds": ["video"], "decoder": "cpu"}, 4),
        ({"kinds": ["image"]}, 4),
    ],
)
def test_threads_are_as_many_as_the_neediest_medium_has(
    options: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 16)
    assert MultiModalDataModule(**options)._default_num_threads(0) == threads
    if options["kinds"] == ["video"]:
        assert VideoDataModule(decoder=options["decoder"])._default_num_threads(0) == threads


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        MultiModalDataModule(**options)


def test_a_sample_without_one_of_its_kinds_says_so(files: Files, tmp_path: Path) -> None:
    dataset = Dataset(lambda index: (str(files.photos[index]), index))
    dm = datamodule(dataset, tmp_path, kinds=["image", "audio"], eval_transform={"image": CROPPED})
    with pytest.raises(TypeError, match=r"the sample has no audio: expected a waveform tensor .*, got ProxyImage, int"):
        list(dm.val_dataloader())
    dm.close()
