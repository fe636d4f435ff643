"""What `ImageDataModule` can deliver: lists for mixed sizes, channels last, uint8, and batches mixed on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_dali.datamodules import ImageDataModule
from lightning_dali.seeding import batch_seed, seeded
from lightning_dali.testing import IndexedImages, make_photos

FLOAT = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 8, sizes=((61, 83), (83, 61), (70, 96), (64, 64)))


def _batches(stage: str = "train", **options: Any) -> Iterator[Any]:
    data = ImageDataModule(batch_size=4, num_workers=0, device="cpu", seed=5, **options)
    try:
        yield from getattr(data, f"{stage}_dataloader")()
    finally:
        data.close()


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transform",
    [
        v2.ToImage(),
        v2.Compose([v2.RandomShortestSize([40, 50]), *FLOAT]),
        v2.Lambda(lambda image: v2.functional.to_image(image) // 1),
    ],
)
def test_ragged_list_gives_every_image_its_size(paths: list[Path], transform: Any) -> None:
    batches = list(_batches(train_dataset=IndexedImages(paths, transform), ragged="list"))
    for images, index in batches:
        assert isinstance(images, list) and len(images) == 4 and len({image.shape for image in images}) > 1
        for image, i in zip(images, index.tolist(), strict=True):
            width, height = Image.open(paths[i]).size
            assert abs(image.shape[2] / image.shape[1] - width / height) < 0.05


def test_mixed_sizes_are_an_error_that_says_what_to_add(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"field '0' has different sizes.*v2\.RandomResizedCrop.*ragged='list'"):
        next(_batches(train_dataset=IndexedImages(paths, v2.ToImage())))


def test_one_size_is_a_tensor_under_ragged_too(paths: list[Path]) -> None:
    images, _ = next(_batches(train_dataset=IndexedImages(paths, v2.Resize((32, 32))), ragged="list"))
    assert images.shape == (4, 3, 32, 32)


# -- memory format and dtype -------------------------------------------------------------------------------------------

RECIPES = {
    "in the graph": v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *FLOAT, v2.Normalize([0.5] * 3, [0.5] * 3)]),
    "uint8": v2.Compose([v2.RandomResizedCrop(32), v2.ToImage()]),
    "with a tail": v2.Compose([v2.RandomResizedCrop(32), v2.ColorJitter(0.3), *FLOAT, v2.RandomErasing(p=1.0)]),
    "in the worker": v2.Compose([v2.RandomResizedCrop(32), v2.AugMix(), *FLOAT]),
    "sometimes in the worker": v2.Compose([v2.RandomResizedCrop(32), v2.RandomApply([v2.Lambda(lambda image: v2.functional.to_image(image) + 0)]), *FLOAT]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_channels_last_changes_only_the_memory_format(paths: list[Path], name: str) -> None:
    dataset = IndexedImages(paths, RECIPES[name])
    for (first, _), (last, _) in zip(
        _batches(train_dataset=dataset), _batches(train_dataset=dataset, channels_last=True), strict=True
    ):
        assert first.shape == last.shape == (4, 3, 32, 32) and torch.equal(first, last)
        assert first.is_contiguous()
        assert last.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_is_checked() -> None:
    with pytest.raises(TypeError, match="channels_last is 'yes'"):
        ImageDataModule(channels_last="yes")


def test_uint8_from_end_to_end(paths: list[Path]) -> None:
    transform = v2.Compose([v2.CenterCrop(48), v2.RandomHorizontalFlip(), v2.RandomInvert(), v2.ToImage()])
    for images, _ in _batches(train_dataset=IndexedImages(paths, transform)):
        assert images.dtype == torch.uint8 and images.shape == (4, 3, 48, 48) and images.float().mean() > 10


# -- batch transforms --------------------------------------------------------------------------------------------------

MIXES = {
    "MixUp": v2.MixUp(num_classes=8),
    "CutMix": v2.CutMix(num_classes=8),
    "RandomChoice": v2.RandomChoice([v2.MixUp(num_classes=8), v2.CutMix(num_classes=8)]),
}
SMALL = v2.Compose([v2.Resize((24, 24)), *FLOAT])


@pytest.mark.parametrize("name", MIXES)
def test_mixing_is_torchvisions_and_seeded(paths: list[Path], name: str) -> None:
    dataset = IndexedImages(paths, SMALL)
    plain = list(_batches(train_dataset=dataset))
    mixed, again = (list(_batches(train_dataset=dataset, batch_transform=MIXES[name])) for _ in range(2))
    for step, ((images, labels), (wanted, index)) in enumerate(zip(mixed, plain, strict=True)):
        with seeded(batch_seed(5, 0, step), restore=True):
            wanted, soft = MIXES[name](wanted, index)
        torch.testing.assert_close(images, wanted)
        torch.testing.assert_close(labels, soft)
        assert labels.shape == (4, 8) and (labels > 0).sum() > 4
    assert all(torch.equal(a[0], b[0]) for a, b in zip(mixed, again, strict=True))


def test_mixing_keeps_the_users_random_state(paths: list[Path]) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    list(_batches(train_dataset=IndexedImages(paths, SMALL), batch_transform=MIXES["MixUp"]))
    assert torch.equal(torch.rand(3), wanted)


def test_evaluation_is_not_mixed(paths: list[Path]) -> None:
    dataset = IndexedImages(paths, SMALL)
    for _, labels in _batches("val", val_dataset=dataset, batch_transform=MIXES["MixUp"]):
        assert labels.dtype == torch.int64 and labels.shape == (4,)


def test_mixing_leaves_the_index_alone(paths: list[Path]) -> None:
    images, soft, index = next(
        _batches(train_dataset=IndexedImages(paths, SMALL), batch_transform=MIXES["MixUp"], with_index=True)
    )
    assert images.shape == (4, 3, 24, 24) and soft.shape == (4, 8)
    assert index.dtype == torch.int64 and index.shape == (4,)
    assert torch.equal(soft.gather(1, index[:, None]) > 0, torch.ones(4, 1, dtype=torch.bool))


def test_mixing_takes_dicts(paths: list[Path]) -> None:
    class Named(IndexedImages):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return {"image": image, "labels": label}

    batch = next(_batches(train_dataset=Named(paths, SMALL), batch_transform=MIXES["CutMix"]))
    assert batch["image"].shape == (4, 3, 24, 24) and batch["labels"].shape == (4, 8)
