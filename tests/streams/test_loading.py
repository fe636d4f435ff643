"""Iterated datasets through loaders and trainers: right pictures for their labels, each once, whatever happened before."""

# Over 300 lines: passes, epochs, lengths and ends of one loader.

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchvision.transforms import v2

from lightning_dali import (
    BadSampleError,
    ClipSampler,
    DALIDataModule,
    ImageDataModule,
    SpeechDataModule,
    VideoDataModule,
)
from lightning_dali.cli.bench import bench
from lightning_dali.cli.preview import preview
from lightning_dali.cli.scan import scan
from lightning_dali.testing import make_images, make_videos, make_wavs, recover_wav_ids
from lightning_dali.workers import WorkerError
from tests.custom import pipelines
from tests.ddp.spy import Spy, trainer, warnings_of_lightning
from tests.ddp.spy import ids as seen
from tests.faults.files import damaged_png, png_with_a_wrong_sum
from tests.pairs import TO_FLOAT, all_ids, each_once, ids
from tests.streams.datasets import Pictures, Sized, my_share

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # Lightning 2.6 uses what torch deprecates
N = 22


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_images(tmp_path_factory.mktemp("images"), N)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def datamodule(dataset: Any = None, **options: Any) -> ImageDataModule:
        settings = {"batch_size": 4, "num_workers": 0, "num_threads": 1, "seed": 7, "device": "cpu", **options}
        made.append(ImageDataModule(train_dataset=dataset, **settings))
        return made[-1]

    yield datamodule
    for one in made:
        one.close()


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, True), (2, True), (3, False)])
def test_epochs_and_passes_that_end_early(workers: int, persistent: bool, paths: list[Path], make: Any) -> None:
    dm = make(
        Pictures(paths, TO_FLOAT, shuffle=True), num_workers=workers, persistent_workers=persistent, drop_last=False
    )
    loader, orders, pids = dm.train_dataloader(), [], set()
    for leave in (2, None, 0, 5, None, 1):
        order: list[int] = []
        for number, batch in enumerate(loader):
            if number == leave:
                break
            order += ids(batch)
        pids |= set(loader.worker_pids)
        if leave is None:
            each_once(order, N)
            orders.append(order)
    assert orders[0] != orders[1], "set_epoch reaches the dataset"
    assert not loader.fetcher._cursors, "an iteration in this process ends with its pass"
    assert len(pids) == (workers if persistent else 0), "workers stay"
    with pytest.raises(TypeError, match="stream without a length"):
        len(loader)
    assert "a stream" in repr(loader) and "a stream" in str(dm.explain()) and "train: a stream" in str(dm)


@pytest.mark.parametrize("workers", [0, 3])
def test_length_and_drop_last(workers: int, paths: list[Path], make: Any, caplog: pytest.LogCaptureFixture) -> None:
    dm = make(Sized(paths, TO_FLOAT), num_workers=workers, with_index=True)
    assert len(dm.train_dataloader()) == 5
    batches = list(dm.train_dataloader())
    assert [len(batch[1]) for batch in batches] == [4] * 5
    assert all(batch[2].tolist() == ids(batch) for batch in batches)
    dm = make(val_dataset=Sized(paths, TO_FLOAT), num_workers=workers)
    assert len(dm.val_dataloader()) == 6
    each_once(all_ids(dm.val_dataloader()), N)
    assert not caplog.messages


def test_nothing_but_large_rests(tmp_path: Path, make: Any) -> None:
    """They come in shared memory, and go out in tasks that wait until their worker is at rest."""
    files = make_images(tmp_path, 45, format="jpeg", size=256)
    dm = make(Pictures(files, v2.Compose([v2.CenterCrop(8), TO_FLOAT])), num_workers=3, batch_size=16, drop_last=False)
    for _ in range(2):
        assert [len(batch[1]) for batch in dm.train_dataloader()] == [16, 16, 13]
        each_once(all_ids(dm.train_dataloader()), 45)


def test_two_passes_at_once(paths: list[Path], make: Any) -> None:
    for workers in (0, 2):
        loader = make(Pictures(paths, TO_FLOAT, shuffle=True), num_workers=workers, drop_last=False).train_dataloader()
        left, right = [], []
        for one, other in zip(loader, loader, strict=True):
            left += ids(one)
            right += ids(other)
        each_once(left, N)
        each_once(right, N)
        assert left != right, "each is an epoch"


def test_peeking_leaves_no_trace(paths: list[Path], make: Any) -> None:
    dm, other = (make(Pictures(paths, TO_FLOAT, shuffle=True), drop_last=False) for _ in range(2))
    first = ids(dm.peek())
    dm.explain()
    assert (order := all_ids(dm.train_dataloader())) == all_ids(other.train_dataloader()) and order[:4] == first


def test_the_commands(paths: list[Path], make: Any) -> None:
    dm = make(Sized(paths, TO_FLOAT), num_workers=1)
    (loader,) = dm.stage_loaders("train")
    assert preview(loader, count=4, compare=True).notes == [
        "compare: a stream cannot be asked for the same sample again."
    ]
    with pytest.raises(
        ValueError, match=r"the train dataset is a stream \(Sized\): scan asks for samples by their index"
    ):
        scan(loader, num_workers=1)
    made = bench(loader, seconds=0.05)
    assert made.loader.samples_per_second > 0 and made.plain is not None and made.plain.samples_per_second > 0


def notes_of(error: BaseException) -> list[str]:
    """What was noted on it; Python 3.10 has no notes."""
    return getattr(error, "__notes__", ["for sample"])


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_files_that_dali_cannot_decode(
    workers: int, tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_images(tmp_path, 16)
    png_with_a_wrong_sum(files[5])  # PIL decodes it
    damaged_png(files[9])
    damaged_png(files[10])
    dm = make(Pictures(files, v2.Compose([v2.ToImage(), v2.CenterCrop(16)])), num_workers=workers, on_bad_sample="drop")
    with caplog.at_level(logging.DEBUG, logger="lightning_dali.server"):
        for _ in range(2):
            found = [label for _, labels in dm.train_dataloader() for label in labels.tolist()]
            each_once([*found, 9, 10], 16)
    assert "rebuilding after" in caplog.text
    assert {one.dataset_index for one in dm.bad_samples} == {9, 10}
    dm = make(Pictures(files, v2.Compose([v2.ToImage(), v2.CenterCrop(16)])), num_workers=workers)
    with pytest.raises(BadSampleError, match=r"sample (9|10) .*\.png. on rank 0"):
        list(dm.train_dataloader())


class Breaks(Pictures):
    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            if number == 5:
                raise ConnectionError("the bucket is gone")
            yield sample


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_iterator_is_raised_after_what_came_before(workers: int, paths: list[Path], make: Any) -> None:
    dm = make(Breaks(paths, TO_FLOAT), num_workers=workers, on_bad_sample="drop")
    loader, found = iter(dm.train_dataloader()), []
    with pytest.raises(ConnectionError, match="the bucket is gone") as caught:
        found.extend(map(ids, loader))
    assert len(found) == max(1, workers) and any("for sample" in note for note in notes_of(caught.value))
    dm.close()


class Dies(Pictures):
    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            if number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def test_a_worker_that_is_killed_is_told_and_replaced(paths: list[Path], make: Any) -> None:
    dm = make(Dies(paths, TO_FLOAT), num_workers=1)
    loader = dm.train_dataloader()
    for _ in range(2):
        with pytest.raises(
            WorkerError, match=r"worker 0 .* died with signal SIGKILL .* while iterating over the dataset"
        ):
            list(loader)


class Same(Pictures):
    def __iter__(self) -> Iterator[Any]:
        for index, path in enumerate(self.paths):
            yield self.transform(PIL.Image.open(path)), index


def test_a_dataset_that_does_not_shard_itself_is_refused(paths: list[Path], make: Any) -> None:
    with pytest.raises(ValueError, match=r"train: workers 0 and 1 of rank 0 got the same first samples"):
        list(make(Same(paths, v2.Compose([v2.RandomCrop(40), TO_FLOAT])), num_workers=2).train_dataloader())
    each_once(all_ids(make(Same(paths, TO_FLOAT), num_workers=1, drop_last=False).train_dataloader()), N)


def test_what_a_stream_has_no_place_for_is_refused(paths: list[Path], make: Any) -> None:
    with pytest.raises(ValueError, match="train_dataset is a stream .Pictures., which has its own order"):
        make(Pictures(paths, TO_FLOAT), sampler=[1, 2]).train_dataloader()
    speech = SpeechDataModule(train_dataset=Pictures(paths, TO_FLOAT), max_seconds=3.0, device="cpu")
    with pytest.raises(ValueError, match="no sorting by length"):
        speech.train_dataloader()
    with pytest.raises(ValueError, match=r"the train stream is empty on rank 0"):
        make(Sized([], TO_FLOAT)).train_dataloader()


# -- under a trainer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Pictures, Sized])
def test_a_fit_with_validation(kind: Any, paths: list[Path], make: Any, tmp_path: Path) -> None:
    spy = Spy()
    dm = make(kind(paths, TO_FLOAT, shuffle=True), val_dataset=kind(paths[:9], TO_FLOAT), num_workers=2)
    with warnings_of_lightning() as told:
        trainer(tmp_path, max_epochs=2).fit(spy, datamodule=dm)
    for epoch in (0, 1):
        assert len(set(seen(spy.rows(epoch=epoch)))) == 20
        assert sorted(seen(spy.rows("val", epoch))) == list(range(9)), "each once, at the end of each epoch"
    assert seen(spy.rows(epoch=0)) != seen(spy.rows(epoch=1))
    assert not [text for text in told if "__len__` defined" not in text]


def test_overfitting_and_limits(paths: list[Path], make: Any, tmp_path: Path) -> None:
    spy = Spy()
    trainer(tmp_path, max_epochs=2, overfit_batches=2).fit(
        spy, datamodule=make(Pictures(paths, TO_FLOAT, shuffle=True))
    )
    assert seen(spy.rows(epoch=0)) == seen(spy.rows(epoch=1)) and len(seen(spy.rows(epoch=0))) == 8
    spy = Spy()
    dm = make(Pictures(paths, TO_FLOAT, shuffle=True), num_workers=2)
    trainer(tmp_path, max_epochs=2, limit_train_batches=3).fit(spy, datamodule=dm)
    assert [len(seen(spy.rows(epoch=epoch))) for epoch in (0, 1)] == [12, 12]
    dm = make(predict_dataset=Pictures(paths, TO_FLOAT))
    assert [index for batch in trainer(tmp_path).predict(Spy(), datamodule=dm) or () for index in batch] == list(
        range(N)
    )


# -- the other datamodules ---------------------------------------------------------------------------------------------


class Shared(IterableDataset[Any]):
    """Items, dealt in turn."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        number, of = my_share()
        yield from self.items[number::of]


class Called(Shared):
    """The same through a proxy."""

    def __init__(self, items: list[Any], proxy: Any) -> None:
        super().__init__(items)
        self.proxy = proxy

    def __iter__(self) -> Iterator[Any]:
        for path, number in super().__iter__():
            yield self.proxy(path.read_bytes()), number


def test_a_pipeline_of_the_users_own(paths: list[Path]) -> None:
    items = list(zip(paths, range(N), strict=True))
    for workers in (0, 2):
        dm = DALIDataModule(
            train_dataset=lambda proxy: Called(items, proxy), train_pipeline=pipelines.decode, batch_size=4,
            num_workers=workers, num_threads=1, drop_last=False, device="cpu",
        )  # fmt: skip
        each_once(all_ids((image / 255, label) for image, label in dm.train_dataloader()), N)
        dm.close()


def test_speech(tmp_path: Path) -> None:
    files = make_wavs(tmp_path, 9)
    for item in (str, Path.read_bytes):
        dm = SpeechDataModule(
            val_dataset=Shared([(item(path), number) for number, path in enumerate(files)]), batch_size=2, num_workers=2,
            num_threads=1, device="cpu", eval_transform=torch.nn.Identity(),
        )  # fmt: skip
        found = []
        for waves, labels in dm.val_dataloader():
            assert recover_wav_ids(waves.data) == labels.tolist()
            found += labels.tolist()
        each_once(found, 9)
        dm.close()


def test_videos(tmp_path: Path) -> None:
    files = make_videos(tmp_path, 5, num_frames=8)
    items = [(str(path), number) for number, path in enumerate(files)]
    resize = v2.Compose([v2.Resize((32, 32)), v2.ToDtype(torch.float32, scale=True)])
    for mode, clips in (("uniform", 2), ("all", 1)):
        dm = VideoDataModule(
            val_dataset=Shared(items), eval_transform=resize, batch_size=2, num_workers=2, num_threads=1, device="cpu",
            eval_clip=ClipSampler(2, stride=1, mode=mode, num_clips=clips), with_times=True,
            index_cache=str(tmp_path / "index"),
        )  # fmt: skip
        met: Counter[Any] = Counter()
        for clip, label in dm.val_dataloader():
            assert clip["video"].shape[1:] == (2, 3, 32, 32)
            assert clip["video_index"].tolist() == label.tolist(), (
                "dealt in turn, so the number is the place in the whole"
            )
            red = 255 * clip["video"][:, 0, 0, 0, 0]
            assert torch.allclose(red, 40 + 16.0 * label, atol=6), "the right video for its label"
            met.update(zip(label.tolist(), clip["clip_index"].tolist(), strict=True))
        assert met == Counter((number, clip) for number in range(5) for clip in range(4 if mode == "all" else 2))
        dm.close()


def test_the_worker_info_that_datasets_ask_for(make: Any) -> None:
    class Asks(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None and isinstance(info.dataset, Asks)
            yield info.id, info.num_workers

    dm = make(Asks(), num_workers=3, batch_size=1)
    assert sorted((number.item(), of.item()) for number, of in dm.train_dataloader()) == [(0, 3), (1, 3), (2, 3)]
