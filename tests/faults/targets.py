"""Datamodules for the fault table."""

from pathlib import Path
from typing import Any

from lightning_dali import ImageDataModule
from tests.pairs import images


def pictures(folder: str, **options: Any) -> ImageDataModule:
    """96 pictures to train on and as many to validate with, four a batch."""
    dataset = images(Path(folder), 96)
    return ImageDataModule(train_dataset=dataset, val_dataset=dataset, **{"batch_size": 4, **options})
