"""Cases from public bug reports, rebuilt on small files, under a real Lightning Trainer on the CPU.

Each test's docstring names the reports. The first thing that is checked is always that pictures have their own labels.
"""

# Over 300 lines: one case after the other, under one model and one trainer.

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from PIL import Image
from torchvision.transforms import v2

from lightning_dali import BadSampleError, ImageDataModule
from lightning_dali.testing import IndexedImages
from tests.pairs import all_ids, each_once, ids, images, module

Script = Callable[..., tuple[int, str, str]]


class Spy(L.LightningModule):
    """Records the ids of every batch by stage and epoch, after checking that they are those of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.lr = 0.01
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": [], "sanity": []}
        self.length: list[int] = []

    def look(self, stage: str, batch: Any) -> None:
        self.seen[stage][-1] += ids(batch)

    def on_train_epoch_start(self) -> None:
        self.seen["train"].append([])
        self.length.append(len(self.trainer.train_dataloader))

    def training_step(self, batch: Any, step: int) -> torch.Tensor:
        self.look("train", batch)
        self.length.append(len(self.trainer.train_dataloader))
        return self.layer(torch.ones(1, 1)).sum()

    def on_validation_epoch_start(self) -> None:
        self.seen["sanity" if self.trainer.sanity_checking else "val"].append([])

    def validation_step(self, batch: Any, step: int) -> None:
        self.look("sanity" if self.trainer.sanity_checking else "val", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    return L.Trainer(accelerator="cpu", **{"enable_checkpointing": False, **quiet, **options})


@pytest.fixture
def closing() -> Iterator[Callable[[ImageDataModule], ImageDataModule]]:
    """`closing(dm)`: closes it at the end of the test."""
    opened: list[ImageDataModule] = []

    def remember(dm: ImageDataModule) -> ImageDataModule:
        opened.append(dm)
        return dm

    yield remember
    for dm in opened:
        dm.close()


# -- 1: refit after a stop in the middle of an epoch ------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("release", ["stage", "never"])
def test_case_1_refit_after_max_steps(persistent: bool, release: str, tmp_path: Path, closing: Any) -> None:
    """DALI#3865, PL#12956, solo#265."""
    options = {"persistent_workers": persistent, "release_memory": release}
    dm = closing(module(tmp_path, 64, num_workers=2, **options))
    spy = Spy()
    trainer(max_steps=5).fit(spy, dm)
    assert [len(epoch) for epoch in spy.seen["train"]] == [20]
    spy = Spy()
    trainer(max_epochs=1).fit(spy, dm)
    each_once(spy.seen["train"][0], 64)


def test_case_1_breaks_between_whole_passes(tmp_path: Path, closing: Any) -> None:
    dm = closing(module(tmp_path, 64, num_workers=2, persistent_workers=False))
    loader = dm.train_dataloader()
    for number, batch in enumerate(loader):
        ids(batch)
        if number == 1:
            break
    for _ in range(3):
        each_once(all_ids(loader), 64)


def test_case_1_learning_rate_finder_then_fit(tmp_path: Path, closing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the finder writes a checkpoint where it stands
    dm = closing(module(tmp_path / "images", 64, num_workers=2))
    spy = Spy()
    fit = trainer(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    Tuner(fit).lr_find(spy, datamodule=dm, num_training=5, update_attr=False)
    spy.seen["train"].clear()
    fit.fit(spy, dm)
    assert len(spy.seen["train"]) == 1
    each_once(spy.seen["train"][0], 64)


# -- 3: how often each sample is visited ------------------------------------------------------------------------------

GRID = [
    (sanity, limit, interval, reload)
    for sanity in (0, 2, -1)
    for limit in (1.0, 0.5, 3)
    for interval in (1.0, 0.25)
    for reload in (0, 1)
    if not (limit == 3 and interval == 0.25)  # Lightning refuses a quarter of three batches
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[IndexedImages, IndexedImages]:
    folder = tmp_path_factory.mktemp("visits")
    return images(folder / "train", 64), images(folder / "val", 32)


@pytest.mark.parametrize(
    ("sanity", "limit", "interval", "reload", "workers"),
    [(*one, 0) for one in GRID] + [(2, 1.0, 0.25, 1, 2), (-1, 3, 1.0, 0, 2), (2, 0.5, 0.25, 0, 2)],
)
def test_case_3_visits(
    sanity: int, limit: Any, interval: float, reload: int, workers: int, folders: Any, closing: Any
) -> None:
    """PL#12956, PL#3220, DALI#4259, DALI#2856, DALI#4440."""
    train, val = folders
    dm = closing(ImageDataModule(train_dataset=train, val_dataset=val, batch_size=4, num_workers=workers, device="cpu"))
    spy = Spy()
    fit = trainer(
        max_epochs=3,
        num_sanity_val_steps=sanity,
        limit_train_batches=limit,
        val_check_interval=interval,
        reload_dataloaders_every_n_epochs=reload,
    )
    fit.fit(spy, dm)
    steps = {1.0: 16, 0.5: 8, 3: 3}[limit]
    assert fit.global_step == 3 * steps
    assert [len(epoch) for epoch in spy.seen["train"]] == [4 * steps] * 3
    for epoch in spy.seen["train"]:
        assert len(set(epoch)) == len(epoch)
    assert set(spy.length) == {16} and len(dm.train_dataloader()) == 16
    assert spy.seen["val"] == [list(range(32))] * (3 * (4 if interval == 0.25 else 1))
    assert spy.seen["sanity"] == ([list(range({2: 8, -1: 32}[sanity]))] if sanity else [])


# -- 6: one corrupt file ----------------------------------------------------------------------------------------------

CORRUPT = """
import sys, time
from pathlib import Path
from lightning_dali.testing import make_images, IndexedImages
from lightning_dali import ImageDataModule
from tests.pairs import TO_FLOAT
from tests.test_cases import Spy, trainer

if __name__ == "__main__":
    paths = make_images("images", 24, format="jpeg", size=48)
    paths[9].write_bytes(b"this is no picture, but text")
    dm = ImageDataModule(train_dataset=IndexedImages(paths, TO_FLOAT), batch_size=4, num_workers=int(sys.argv[1]), device="cpu")
    print(time.time(), flush=True)
    trainer(max_epochs=1).fit(Spy(), dm)
"""


@pytest.mark.faults
@pytest.mark.parametrize("workers", ["0", "2"])
def test_case_6_a_corrupt_file_raises_and_the_process_ends(workers: str, run_warm: Script) -> None:
    """DALI#211, #306, #309, #3913; torch#1137."""
    import time

    rc, stdout, stderr = run_warm(CORRUPT, 100, args=[workers])
    assert time.time() - float(stdout.split()[0]) < 10 + 5  # 5: the interpreter's own way out, on a busy machine
    assert rc == 1
    last = stderr.strip().splitlines()[-1]
    assert "BadSampleError: sample 9 (images/00009.jpg) on rank 0 in epoch 0:" in last, stderr
    assert "on_bad_sample='replace'" in last


# -- 8: samples that do not fit together ------------------------------------------------------------------------------


class Arrays:
    """Pictures as arrays; what is odd about every fourth sample is up to the test."""

    def __init__(self, odd: Callable[[np.ndarray], Any], transform: Any = None) -> None:
        self.odd, self.transform = odd, transform

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        array = np.full((24, 24, 3), index, np.uint8)
        sample = self.odd(array) if index % 4 == 3 else array
        return sample if self.transform is None else self.transform(Image.fromarray(sample)), index


class SideInputs(Arrays):
    def __getitem__(self, index: int) -> Any:
        boxes = np.zeros((2, 4), np.float32) if index % 4 != 3 else np.zeros(4, np.float32)
        return {"image": TO_TENSOR(Image.fromarray(np.full((24, 24, 3), index, np.uint8))), "boxes": boxes}


TO_TENSOR = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
MIXED = {
    "dtype": (Arrays(lambda a: a.astype(np.float32)), r"field '0': dtype differs.*expected uint8.*found float32"),
    "ndim": (Arrays(lambda a: a[..., 0]), r"field '0': number of dimensions differs.*expected 3.*found 2"),
    "side input": (SideInputs(lambda a: a), r"field 'boxes': number of dimensions differs.*expected 2.*found 1"),
    "channels": (Arrays(lambda a: a[..., 0], TO_TENSOR), r"field '0'.*index 0 gives \(3, 24, 24\), index 3 gives \(1, 24, 24\).*RGB"),
    "size": (Arrays(lambda a: a[:20], TO_TENSOR), r"field '0'.*index 0 gives \(3, 24, 24\), index 3 gives \(3, 20, 24\).*v2\.Resize"),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", MIXED)
def test_case_8_mixed_samples_are_named(kind: str, workers: int, closing: Any) -> None:
    """DALI#3897, DALI#4963, ami-data-companion#140."""
    dataset, words = MIXED[kind]
    dm = closing(ImageDataModule(train_dataset=dataset, batch_size=4, shuffle=False, num_workers=workers, device="cpu"))
    with pytest.raises(ValueError, match=f"(?s){words}") as caught:
        trainer(max_epochs=1).fit(Spy(), dm)
    assert "index 3" in str(caught.value)


# -- 10: the last batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "drop_last", "sizes"), [(10, False, [4, 4, 2]), (10, True, [4, 4]), (3, False, [3]), (3, True, [3])]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_case_10_the_last_batch(
    n: int, drop_last: bool, sizes: list[int], workers: int, tmp_path: Path, closing: Any
) -> None:
    """DALI#1901, DALI#2881, DALI#1301."""
    dataset = images(tmp_path, n)
    dm = closing(
        ImageDataModule(
            train_dataset=dataset,
            val_dataset=dataset,
            batch_size=4,
            shuffle=False,
            drop_last=drop_last,
            num_workers=workers,
            device="cpu",
        )
    )
    loader = dm.train_dataloader()
    batches = [ids(batch) for batch in loader]
    assert [len(batch) for batch in batches] == sizes
    assert len(loader) == len(sizes)
    assert [one for batch in batches for one in batch] == list(range(sum(sizes)))
    assert all_ids(dm.val_dataloader()) == list(range(n))  # evaluation never drops


def test_case_10_an_empty_dataset_is_named_at_setup(tmp_path: Path) -> None:
    dm = module(tmp_path, 0)
    with pytest.raises(ValueError, match=r"(?s)train dataset is empty.*Check its root folder"):
        dm.setup("fit")


# -- 19: seeds --------------------------------------------------------------------------------------------------------

GRADIENT = 256
"""Side of a picture whose red is the column and whose green is the row, so that a crop says where it was."""


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> IndexedImages:
    folder = tmp_path_factory.mktemp("gradients")
    steps = np.arange(GRADIENT, dtype=np.uint8)
    pixels = np.zeros((GRADIENT, GRADIENT, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = steps[None, :], steps[:, None]
    paths = [folder / f"{n}.png" for n in range(24)]
    for path in paths:
        Image.fromarray(pixels).save(path)
    return IndexedImages(paths, v2.Compose([v2.RandomCrop(16), v2.RandomHorizontalFlip(), v2.ToImage()]))


def crops(dataset: IndexedImages, closing: Any, *, epochs: int = 2, **options: Any) -> list[dict[int, tuple[int, ...]]]:
    """For each epoch, each id's corner pixels: column, row, and whether it was flipped."""
    dm = closing(ImageDataModule(train_dataset=dataset, batch_size=4, device="cpu", **options))
    found = []
    for _ in range(epochs):
        epoch: dict[int, tuple[int, ...]] = {}
        for pictures, labels in dm.train_dataloader():
            corners = pictures[:, :2, 0, 0].tolist(), pictures[:, 0, 0, 1].tolist()
            epoch |= {one: (*where, right) for one, where, right in zip(labels.tolist(), *corners, strict=True)}
        found.append(epoch)
    return found


def test_case_19_seeds(gradients: IndexedImages, closing: Any) -> None:
    """DALI#4134, #426, #1774, #729, #5726."""
    first = crops(gradients, closing, seed=1, num_workers=1)
    assert all(len(epoch) == 24 for epoch in first)
    assert crops(gradients, closing, seed=1, num_workers=1) == first
    assert crops(gradients, closing, seed=1, num_workers=3) == first
    assert crops(gradients, closing, seed=1, num_workers=0) == first
    assert crops(gradients, closing, seed=1, num_workers=0, shuffle=False) == first  # a sample's draw is its own
    other = crops(gradients, closing, seed=2, num_workers=0)
    for one in range(24):
        assert first[0][one] != first[1][one], "the same crop in two epochs"
        assert first[0][one] != other[0][one], "the same crop with another seed"
    assert len(set(first[0].values())) == 24, "two samples have the same crop"


def test_case_19_what_the_caller_draws_is_not_touched(gradients: IndexedImages, closing: Any) -> None:
    def draws() -> tuple[float, float, float]:
        import random

        return random.random(), float(np.random.rand()), float(torch.rand(()))

    L.seed_everything(5, verbose=False)
    expected = [draws() for _ in range(8)]
    L.seed_everything(5, verbose=False)
    dm = closing(ImageDataModule(train_dataset=gradients, batch_size=4, num_workers=0, device="cpu", seed=1))
    found = [draws()]
    for _ in dm.train_dataloader():
        found.append(draws())
    assert found == expected[: len(found)]


# -- a bad sample under Lightning, and the next run ------------------------------------------------------------------


@pytest.mark.faults
def test_a_datamodule_can_be_used_again_after_a_failed_fit(tmp_path: Path, closing: Any) -> None:
    dm = closing(module(tmp_path, 16, num_workers=2))
    path = dm.train_dataloader().dataset.paths[5]
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(BadSampleError, match=r"sample 5 .*00005\.png\) on rank 0 in epoch 0: empty file"):
        trainer(max_epochs=1).fit(Spy(), dm)
    path.write_bytes(whole)
    spy = Spy()
    trainer(max_epochs=1).fit(spy, dm)
    each_once(spy.seen["train"][0], 16)
