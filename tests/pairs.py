"""Solid pictures whose colour is their label, and what must be true of every batch of them."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torchvision.transforms import v2

from lightning_dali import ImageDataModule
from lightning_dali.testing import IndexedImages, make_images, recover_ids

TO_FLOAT = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def images(folder: Path, n: int, *, format: str = "png", size: int = 16, transform: Any = TO_FLOAT) -> IndexedImages:
    """`n` pictures on disk, labelled by their index."""
    return IndexedImages(make_images(folder, n, format=format, size=size), transform)


def module(folder: Path, n: int, **options: Any) -> ImageDataModule:
    """A datamodule that trains on `images(folder, n)`, on the CPU."""
    return ImageDataModule(train_dataset=images(folder, n), **{"device": "cpu", "batch_size": 4, **options})


def ids(batch: Any, **scale: Any) -> list[int]:
    """The ids of a batch (image, label), after checking that each picture has its own label."""
    pictures, labels = batch[0], batch[1].tolist()
    found = recover_ids(pictures, **scale)
    assert found == labels, f"wrong pictures for their labels: {found} for {labels}"
    return found


def all_ids(batches: Iterable[Any], **scale: Any) -> list[int]:
    """The ids of a pass, in order."""
    return [one for batch in batches for one in ids(batch, **scale)]


def each_once(found: list[int], n: int) -> None:
    """Fails unless the ids are those of a full pass."""
    assert Counter(found) == Counter(range(n))
