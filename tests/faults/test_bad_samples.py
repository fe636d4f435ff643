"""Bad samples: found, named, replaced or dropped, listed once an epoch; all others are as if nothing had happened."""

# Over 300 lines: everything here breaks the same photos and compares with the same unbroken run.

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_dali import BadSampleError, ImageDataModule
from lightning_dali.testing import IndexedImages, make_photos
from tests.faults.files import BAD, FINE, Fault, damaged_png, noise, png_with_a_wrong_sum
from tests.nursery import Nursery

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]

N = 48
BATCH = 4
CROP = v2.Compose(
    [v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
)
PLACES = dict(zip([*BAD, *FINE], range(5, N, 3), strict=False))
"""Where each fault sits; two in one batch at times, and far apart at others."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder, N, sizes=((61, 83), (83, 61)))
    return folder


@pytest.fixture
def paths(photos: Path, tmp_path: Path) -> list[Path]:
    """A copy of the photos that may be broken."""
    shutil.copytree(photos, tmp_path / "photos")
    return sorted((tmp_path / "photos").iterdir())


@pytest.fixture
def make() -> Iterator[Callable[..., ImageDataModule]]:
    """`make(dataset, **options)`: a datamodule for training, closed at the end."""
    made = []

    def datamodule(dataset: Any, **options: Any) -> ImageDataModule:
        plain = {"batch_size": BATCH, "num_workers": 0, "shuffle": False, "device": "cpu", "seed": 3}
        made.append(ImageDataModule(train_dataset=dataset, **{**plain, **options}))
        return made[-1]

    yield datamodule
    for one in made:
        one.close()


def epoch_of(dm: ImageDataModule) -> list[tuple[torch.Tensor, list[int], list[int]]]:
    """Batches of one pass: pictures, labels, dataset indices."""
    return [(images, labels.tolist(), rows.tolist()) for images, labels, rows in dm.train_dataloader()]


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", BAD, ids=lambda fault: fault.__name__)
def test_a_bad_file_is_named(fault: Fault, paths: list[Path], make: Any) -> None:
    fault(paths[9])
    dm = make(IndexedImages(paths[:12], CROP))
    loader = iter(dm.train_dataloader())
    next(loader), next(loader)
    with pytest.raises(
        BadSampleError, match=r"sample 9 \(.*00009\.jpg\) on rank 0 in epoch 0: .*on_bad_sample='drop'"
    ) as e:
        next(loader)
    sample = e.value.sample
    assert (sample.dataset_index, sample.path, sample.rank, sample.epoch) == (9, str(paths[9]), 0, 0)
    assert sample.reason and BAD[fault] in sample.reason


@pytest.mark.parametrize(("policy", "workers"), [("replace", 0), ("replace", 2), ("drop", 2)])
def test_all_others_are_as_if_nothing_had_happened(
    policy: str, workers: int, paths: list[Path], photos: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Cases 6 and 7: DALI#211, #306, #309, #2172, #2667, #3913; torch#1137."""
    clean = make(IndexedImages(sorted(photos.iterdir()), CROP), with_index=True)
    for fault, place in PLACES.items():
        fault(paths[place])
    bad = sorted(PLACES[fault] for fault in BAD)
    fine = {PLACES[fault] for fault in FINE}
    dm = make(IndexedImages(paths, CROP), with_index=True, on_bad_sample=policy, num_workers=workers)
    for epoch in range(2):
        caplog.clear()
        batches, expected = epoch_of(dm), epoch_of(clean)
        assert len(batches) == len(expected)
        for (images, labels, rows), (whole, _, indices) in zip(batches, expected, strict=True):
            good = [index for index in indices if index not in bad]
            assert labels == rows, "a picture has another one's label"
            assert set(rows) == set(good)
            assert rows == good if policy == "drop" else len(rows) == BATCH
            for image, row in zip(images, rows, strict=True):
                if row not in fine:
                    assert torch.equal(image, whole[indices.index(row)]), f"sample {row} is not what it was"
        met = [one for one in dm.bad_samples if one.epoch == epoch]
        assert sorted(one.dataset_index for one in met) == bad
        assert all(one.path == str(paths[one.dataset_index]) for one in met)
        lines = [record.getMessage() for record in caplog.records if "bad sample" in record.getMessage()]
        assert Counter(int(line.split("dataset index ")[1].split()[0]) for line in lines) == Counter(bad)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_dali_refuses_and_pil_decodes_is_delivered(
    workers: int, paths: list[Path], make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    png_with_a_wrong_sum(paths[5])
    plain = v2.Compose([v2.ToImage(), v2.CenterCrop(40)])
    dm = make(IndexedImages(paths[:12], plain), with_index=True, num_workers=workers)
    with caplog.at_level(logging.DEBUG, logger="lightning_dali.server"):
        images, labels, _ = epoch_of(dm)[1]
    assert "rebuilding after" in caplog.text, "DALI has learnt to decode it: this test needs another file"
    assert labels == [4, 5, 6, 7] and not dm.bad_samples
    assert torch.equal(images[1], plain(Image.open(paths[5]).convert("RGB")))


def test_a_whole_batch_of_bad_files_is_still_a_step(paths: list[Path], make: Any) -> None:
    for path in paths[4:9]:
        path.write_bytes(b"")
    for policy, rows in (("replace", [9] * 4), ("drop", [9])):
        dm = make(IndexedImages(paths[:12], CROP), with_index=True, on_bad_sample=policy)
        batches = epoch_of(dm)
        assert len(batches) == len(dm.train_dataloader()) == 3
        assert batches[1][2] == rows and batches[1][1] == rows
        assert sorted(one.dataset_index for one in dm.bad_samples) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_who_comes_in_for_a_bad_batch_may_be_bad_too(workers: int, paths: list[Path], make: Any) -> None:
    """No look at their headers shows it, so DALI has to fail on each in turn."""
    for path in paths[4:10]:
        damaged_png(path)
    dm = make(IndexedImages(paths[:12], CROP), with_index=True, on_bad_sample="replace", num_workers=workers)
    assert [rows for _, _, rows in epoch_of(dm)] == [[0, 1, 2, 3], [10] * 4, [11, 11, 10, 11]]
    assert {one.dataset_index for one in dm.bad_samples} == {4, 5, 6, 7, 8, 9}


def test_two_conversions_of_one_file_keep_apart(paths: list[Path], make: Any) -> None:
    """The file is decoded here, once for each."""

    class Both(IndexedImages):
        def __getitem__(self, index: int) -> Any:
            image = Image.open(self.paths[index])
            return v2.functional.to_image(image.convert("RGB")), v2.functional.to_image(image.convert("L")), index

    Image.open(paths[0]).quantize(200).save(paths[0], format="PNG")
    rgb, gray, _ = next(iter(make(Both(paths[:1]), drop_last=False).train_dataloader()))
    expected = Image.open(paths[0])
    assert torch.equal(rgb[0], v2.functional.pil_to_tensor(expected.convert("RGB")))
    assert torch.equal(gray[0], v2.functional.pil_to_tensor(expected.convert("L")))


def test_nothing_but_bad_files_is_an_error(paths: list[Path], make: Any) -> None:
    for path in paths[:8]:
        path.write_bytes(b"")
    with pytest.raises(BadSampleError, match="sample 0"):
        epoch_of(make(IndexedImages(paths[:8], CROP), on_bad_sample="replace"))


def test_partial_images_are_passed_on_only_if_pil_is_told_to(
    paths: list[Path], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise(paths[2])
    paths[2].write_bytes(data[: len(data) // 2])
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    dm = make(IndexedImages(paths[:4], CROP), with_index=True)
    assert epoch_of(dm)[0][2] == [0, 1, 2, 3] and not dm.bad_samples


# -- datasets --------------------------------------------------------------------------------------------------------


class Odd:
    """Arrays beside a dict of other fields; every seventh sample, from 3 on, is odd."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        image = v2.functional.to_image(Image.fromarray(np.full((8, 8, 3), index, np.uint8)))
        side = {"vector": torch.zeros(3), "label": index}
        if index % 7 != 3:
            return image, side
        if self.kind == "raises":
            raise KeyError("no such annotation")
        return {
            "none": None,
            "structure": (image, {"label": index}),
            "length": (image,),
            "dtype": (image, {**side, "vector": torch.zeros(3, dtype=torch.float64)}),
            "ndim": (image, {**side, "vector": torch.zeros(3, 1)}),
            "shape": (image, {**side, "vector": [1, 2]}),
        }[self.kind]


ODD = {
    "raises": (KeyError, "no such annotation"),
    "none": (ValueError, "the dataset returned None"),
    "structure": (ValueError, "'1/vector'"),
    "length": (ValueError, "'1/vector'"),
    "dtype": (ValueError, "float64"),
    "ndim": (ValueError, "2 dimensions"),
    "shape": (ValueError, "'1/vector'"),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_the_dataset_should_not_return(kind: str, make: Any) -> None:
    error, words = ODD[kind]
    with pytest.raises(error) as caught:
        list(make(Odd(kind)).train_dataloader())
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "index 3" in said
    for policy in ("replace", "drop"):
        dm = make(Odd(kind), on_bad_sample=policy)
        for epoch in range(2):
            for images, side in dm.train_dataloader():
                assert (images[:, 0, 0, 0]).tolist() == side["label"].tolist()
                assert not any(label % 7 == 3 for label in side["label"].tolist())
                assert len(images) == BATCH or policy == "drop"
            met = [one for one in dm.bad_samples if one.epoch == epoch]
            assert [one.dataset_index for one in met] == [3, 10, 17]
            assert all(words in one.reason for one in met), met


def test_samples_that_fit_no_majority_are_an_error_whatever_the_policy(make: Any) -> None:
    class Mixed(Odd):
        def __getitem__(self, index: int) -> Any:
            image, side = super().__getitem__(0)
            return image, {**side, "vector": torch.zeros((1,) * (1 + index % 2))}

    with pytest.raises(ValueError, match="number of dimensions differs"):
        list(make(Mixed(""), on_bad_sample="drop").train_dataloader())


# -- limits and reports ----------------------------------------------------------------------------------------------


def test_max_bad_samples_counts_different_ones(paths: list[Path], make: Any) -> None:
    for place in (1, 6, 9):
        paths[place].write_bytes(b"")
    dm = make(IndexedImages(paths[:12], CROP), with_index=True, on_bad_sample="drop", max_bad_samples=3)
    for _ in range(3):
        epoch_of(dm)  # the same three, again and again
    assert len(dm.bad_samples) == 9
    paths[11].write_bytes(b"")
    with pytest.raises(
        RuntimeError, match=r"4 different bad samples on rank 0, more than max_bad_samples=3.*sample 11"
    ):
        epoch_of(dm)


def test_a_sample_that_is_drawn_often_is_listed_once_an_epoch(paths: list[Path], make: Any) -> None:
    paths[1].write_bytes(b"")
    sampler = [0, 1, 2, 1, 1, 3, 1, 2]
    dm = make(IndexedImages(paths[:4], CROP), with_index=True, on_bad_sample="drop", sampler=lambda dataset: sampler)
    dm.peek()
    assert [rows for _, _, rows in epoch_of(dm)] == [[0, 2], [3, 2]]
    assert [one.dataset_index for one in dm.bad_samples] == [1]


class Quiet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_ends_with_a_report_and_a_file(
    paths: list[Path], tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for path in paths[:7]:
        path.write_bytes(b"")
    dataset = IndexedImages(paths[:16], CROP)
    file = tmp_path / "bad.jsonl"
    dm = make(dataset, val_dataset=dataset, on_bad_sample="drop", bad_samples_file=file)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    with caplog.at_level(logging.WARNING):
        L.Trainer(accelerator="cpu", max_epochs=2, **quiet).fit(Quiet(), dm)
    reports = [record.getMessage() for record in caplog.records if "were replaced or dropped" in record.getMessage()]
    assert len(reports) == 1
    assert reports[0].startswith("7 bad sample(s) on rank 0") and "and 2 more" in reports[0]
    assert f"({paths[0]}): empty file" in reports[0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == len(dm.bad_samples) == 2 * 2 * 7
    assert {line["dataset"] for line in lines} == {"train", "val"}
    assert lines[0].keys() == {"dataset", "dataset_index", "path", "rank", "epoch", "reason"}


def test_where_the_file_cannot_be_is_said_at_construction(paths: list[Path], make: Any) -> None:
    dataset = IndexedImages(paths[:4], CROP)
    with pytest.raises(ValueError, match=r"bad_samples_file is '/no/such/bad\.jsonl'.*no folder '/no/such'"):
        make(dataset, bad_samples_file="/no/such/bad.jsonl")
    with pytest.raises(TypeError, match="expected a path"):
        make(dataset, bad_samples_file=True)


# -- ranks -----------------------------------------------------------------------------------------------------------

RANKS = """
import sys
import lightning as L
import torch
from lightning_dali import ImageDataModule
from lightning_dali.testing import IndexedImages
from pathlib import Path
from tests.faults.test_bad_samples import CROP, Quiet

class Metric(Quiet):
    steps = 0
    def training_step(self, batch, batch_idx):
        self.steps += 1
        total = torch.tensor([1.0, float(len(batch[0]))])
        torch.distributed.all_reduce(total)  # a rank with fewer steps would wait for ever
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    paths = sorted(Path(sys.argv[1]).iterdir())[:24]
    dm = ImageDataModule(train_dataset=IndexedImages(paths, CROP), batch_size=4, num_workers=0, shuffle=False,
                         device="cpu", on_bad_sample=sys.argv[2], bad_samples_file="bad.jsonl")
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    module = Metric()
    L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet).fit(module, dm)
    print("steps", module.global_rank, module.steps, sorted(one.dataset_index for one in dm.bad_samples), flush=True)
"""


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["drop"])
def test_ranks_take_the_same_steps(policy: str, paths: list[Path], tmp_path: Path, nursery: Nursery) -> None:
    for place in (4, 5, 6, 7, 9):  # all of rank 1's first batch, and one of rank 0's second
        paths[place].write_bytes(b"")
    script, log = tmp_path / "ranks.py", tmp_path / "log"
    script.write_text(RANKS)
    nursery.ranks(script, str(paths[0].parent), policy, log=log)
    lines = [line for rank in (0, 1) for line in Path(f"{log}.{rank}").read_text().splitlines()]
    told = [line for line in lines if line.startswith("steps")]
    assert told == ["steps 0 6 [9, 9]", "steps 1 6 [4, 4, 5, 5, 6, 6, 7, 7]"]
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "bad.rank1.jsonl").read_text().splitlines()) == 8
