"""`ImageDataModule` against torchvision on PIL, sample for sample; what it refuses, and what it promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from lightning_dali import ImageDataModule
from lightning_dali.seeding import sample_seed, seeded
from lightning_dali.testing import IndexedImages, make_photos
from tests.pairs import all_ids, each_once, images

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FINISH = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
TRANSFORMS = {
    "ImageNet-train": v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *FINISH]),
    "ImageNet-eval": v2.Compose([v2.Resize(128), v2.CenterCrop(112), *FINISH]),
    "ImageNet-eval bicubic": v2.Compose([v2.Resize(128, InterpolationMode.BICUBIC), v2.CenterCrop(112), *FINISH]),
    "jitter, affine, erase": v2.Compose(
        [
            v2.RandomResizedCrop(96),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomAffine(20, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=5, interpolation=InterpolationMode.BILINEAR),
            *FINISH,
            v2.RandomErasing(1.0),
        ]
    ),
    "v1 classes": v1.Compose(
        [
            v1.RandomResizedCrop(96),
            v1.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v1.RandomRotation(15),
            v1.ToTensor(),
            v1.Normalize(MEAN, STD),
            v1.RandomErasing(1.0),
        ]
    ),
    "small image in a large frame": v2.Compose([v2.RandomCrop(120, pad_if_needed=True, fill=9), v2.Resize(97), *FINISH]),
}  # fmt: skip


def difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """In levels of 255."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return (found - expected).abs() * torch.tensor(STD)[:, None, None] * 255


@pytest.fixture(scope="module", params=["jpeg", "png"])
def photos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 12, format=request.param)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_batches_are_what_torchvision_would_have_made(name: str, photos: list[Path]) -> None:
    dataset = IndexedImages(photos, TRANSFORMS[name])
    dm = ImageDataModule(train_dataset=dataset, batch_size=6, num_workers=0, device="cpu", seed=11)
    loader = dm.train_dataloader()
    for epoch in range(2):
        seen = 0
        for pictures, labels in loader:
            for picture, index in zip(pictures, labels.tolist(), strict=True):
                with seeded(sample_seed(11, epoch, index), restore=True):
                    expected, _ = dataset[index]
                off = difference(picture, expected.as_subclass(torch.Tensor))
                assert off.mean() < 0.5, f"sample {index} in epoch {epoch}"
                seen += 1
        assert seen == 12
    dm.close()


def test_workers_make_the_same_batches_as_the_process_itself(photos: list[Path]) -> None:
    passes = []
    for workers in (0, 2):
        dataset = IndexedImages(photos, TRANSFORMS["jitter, affine, erase"])
        dm = ImageDataModule(train_dataset=dataset, batch_size=4, num_workers=workers, device="cpu", seed=1)
        passes.append([batch for _ in range(2) for batch in dm.train_dataloader()])
        dm.close()
    for (ours, labels), (theirs, others) in zip(*passes, strict=True):
        assert torch.equal(labels, others) and torch.equal(ours, theirs)


NOISE_AND_RAMP = [("noise", "png", 16), ("ramp", "png", 16), ("noise", "jpeg", 16), ("ramp", "jpeg", 16)]


@pytest.mark.parametrize(("content", "format", "most"), NOISE_AND_RAMP)
@pytest.mark.parametrize("interpolation", [InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
def test_case_20_odd_sizes(
    content: str, format: str, most: int, interpolation: InterpolationMode, tmp_path: Path
) -> None:
    """DALI#422, #400, #2789, #4257, #5260, #2966, #5721."""
    random = np.random.default_rng(0)
    ramp = np.add.outer(np.linspace(0, 120, 301), np.linspace(0, 130, 453))[..., None] * [1.0, 0.8, 0.6]
    pixels = random.integers(0, 256, (301, 453, 3)) if content == "noise" else ramp
    options = {"quality": 90, "subsampling": "4:2:0"} if format == "jpeg" else {}
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"0.{format}", **options)
    for crop in (True, False):
        steps = [v2.Resize(128, interpolation), *([v2.CenterCrop(112)] if crop else []), *FINISH]
        dataset = IndexedImages([tmp_path / f"0.{format}"], v2.Compose(steps))
        dm = ImageDataModule(val_dataset=dataset, batch_size=1, num_workers=0, device="cpu")
        ((pictures, _),) = dm.val_dataloader()
        assert pictures.shape == ((1, 3, 112, 112) if crop else (1, 3, 128, 192))  # DALI alone gives 193
        off = difference(pictures[0], dataset[0][0].as_subclass(torch.Tensor))
        assert off.mean() < 0.5 and off.max() < most
        dm.close()


# -- refusals --------------------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    options: dict[str, Any]
    kind: type[Exception]
    words: str


REFUSALS = [
    Refusal({"batch_size": 0}, ValueError, "batch_size is 0: it must be 1 or more; it counts the samples of one rank"),
    Refusal({"batch_size": 2.5}, TypeError, r"batch_size is 2\.5 \(float\): expected an int"),
    Refusal({"batch_size": True}, TypeError, "batch_size is True"),
    Refusal({"num_workers": -1}, ValueError, "num_workers is -1: it must be 0 or more"),
    Refusal({"num_threads": 0}, ValueError, "num_threads is 0: it must be 1 or more"),
    Refusal({"prefetch": 0}, ValueError, "prefetch is 0: it must be 1 or more"),
    Refusal({"seed": "x"}, TypeError, "seed is 'x'.*or None, which takes seed_everything's"),
    Refusal({"max_bad_samples": -1}, ValueError, "max_bad_samples is -1: it must be 0 or more"),
    Refusal({"on_bad_sample": "skip"}, ValueError, "on_bad_sample.*'skip'.*allowed.*'raise', 'replace', 'drop'"),
    Refusal({"release_memory": "always"}, ValueError, "release_memory.*'always'.*allowed.*'never', 'stage', 'epoch'"),
    Refusal({"ragged": "pad"}, ValueError, "ragged.*'pad'.*allowed.*'error', 'list'"),
    Refusal({"shuffle": 1}, TypeError, "shuffle is 1: allowed are True and False"),
    Refusal({"multiprocessing_context": "thread"}, ValueError, "multiprocessing_context is 'thread': allowed are fork"),
    Refusal({"hw_decoder_load": 2}, ValueError, "hw_decoder_load is 2: it is a share, from 0 to 1, or None"),
    Refusal({"train_dataset": [IndexedImages([])]}, TypeError, "train_dataset is a list.*ConcatDataset"),
    Refusal({"train_dataset": iter([1])}, TypeError, "which can be gone through only once: pass an IterableDataset"),
    Refusal({"val_dataset": {"a": 3}}, TypeError, "val_dataset.*expected a dataset with __getitem__ and __len__"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: ",".join(map(str, one.options.items())))
def test_what_is_wrong_is_refused_at_construction(refusal: Refusal) -> None:
    with pytest.raises(refusal.kind, match=f"(?s){refusal.words}"):
        ImageDataModule(**refusal.options)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    dm = ImageDataModule(train_dataset=images(tmp_path, 2), device="tpu")
    with pytest.raises((ValueError, RuntimeError), match="tpu"):
        dm.setup("fit")


# -- samples that are not what was said ------------------------------------------------------------------------------


class Words(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return "a caption", index


class Nothing(Words):
    def __getitem__(self, index: int) -> Any:
        return None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "kind", "words"),
    [(Words(), TypeError, "no image to transform: expected a path.*got str, int"), (Nothing(), ValueError, "None")],
)
def test_a_sample_without_an_image_is_named(dataset: Any, kind: type[Exception], words: str, workers: int) -> None:
    dm = ImageDataModule(
        train_dataset=dataset,
        train_transform=v2.Compose(FINISH),
        batch_size=4,
        shuffle=False,
        num_workers=workers,
        device="cpu",
    )
    with pytest.raises(kind, match=words) as caught:
        list(dm.train_dataloader())
    assert any("dataset index 0" in note for note in getattr(caught.value, "__notes__", ["dataset index 0"]))
    dm.close()


# -- promises --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [str, Path, lambda path: Path(path).read_bytes(), Image.open, lambda p: np.asarray(Image.open(p))]
)
def test_datasets_without_a_transform_give_paths_bytes_arrays_or_pictures(
    make: Callable[[Any], Any], tmp_path: Path
) -> None:
    files = images(tmp_path, 8).paths

    class Plain(Dataset):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> Any:
            return make(files[index]), index

    transform = v2.Compose([v2.Resize(16), *FINISH])
    dm = ImageDataModule(train_dataset=Plain(), train_transform=transform, batch_size=4, num_workers=1, device="cpu")
    each_once(all_ids(dm.train_dataloader(), mean=MEAN, std=STD), 8)
    dm.close()


def test_peeking_leaves_no_trace(tmp_path: Path) -> None:
    orders = []
    for peek in (True, False):
        dm = ImageDataModule(train_dataset=images(tmp_path / str(peek), 16), batch_size=4, num_workers=1, device="cpu")
        found = []
        for _ in range(2):
            if peek:
                first = dm.peek()
            order = all_ids(dm.train_dataloader())
            if peek:
                assert first[1].tolist() != [] and set(first[1].tolist()) <= set(range(16))
            found.append(order)
        orders.append(found)
        dm.close()
    assert orders[0] == orders[1]


def test_a_datamodule_starts_nothing_before_it_is_used(tmp_path: Path) -> None:
    dm = ImageDataModule(
        train_dataset=images(tmp_path, 8), val_dataset=images(tmp_path, 8), num_workers=2, device="cpu"
    )
    dm.setup("fit")
    repr(dm)
    str(dm)
    assert dm.train_dataloader().worker_pids == [] and dm.val_dataloader().worker_pids == []
    dm.close()
