"""Datamodules, models and datasets that tests name by path; a module, so that configs and workers can import them."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_dali import ImageDataModule
from lightning_dali.testing import IndexedImages, make_images, make_photos

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]


def photos(folder: str = "", n: int = 8, batch_size: int = 4, num_workers: int = 0) -> ImageDataModule:
    transform = v2.Compose(
        [v2.RandomResizedCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    )
    images = IndexedImages(make_photos(folder, n, sizes=((60, 80), (80, 60))), transform)
    return ImageDataModule(train_dataset=images, batch_size=batch_size, num_workers=num_workers, device="cpu")


class TwoViews(IndexedImages):
    """Two draws of one file, as for contrastive learning."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], super().__getitem__(index)[0]


def two_views(folder: str) -> ImageDataModule:
    crop = v2.Compose([v2.RandomResizedCrop(32), v2.ToImage()])
    images = TwoViews(make_photos(folder, 4, sizes=((60, 80),)), crop)
    return ImageDataModule(train_dataset=images, batch_size=4, num_workers=0, device="cpu")


def nothing() -> int:
    return 3


@dataclass
class Detection:
    """One box around a bright square, its mask and a label, in torchvision's form."""

    paths: list[Path]
    transforms: Any

    classes = ("square", "other")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB")
        width, height = image.size
        mask = torch.zeros(1, height, width, dtype=torch.bool)
        mask[:, 10:30, 8:24] = True
        target = {
            "boxes": tv_tensors.BoundingBoxes([[8, 10, 16, 20]], format="XYWH", canvas_size=(height, width)),
            "masks": tv_tensors.Mask(mask),
            "labels": torch.tensor([1]),
        }
        return self.transforms(image, target)


def detection(folder: Path, n: int = 4) -> ImageDataModule:
    flip = v2.Compose([v2.RandomHorizontalFlip(p=1.0), v2.ToImage()])
    dataset = Detection(make_images(folder, n, size=48), flip)
    return ImageDataModule(train_dataset=dataset, batch_size=n, num_workers=0, shuffle=False, device="cpu")


class Fatal(IndexedImages):
    """Sample 5 ends its process, as a decoder's crash does."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            os._exit(7)
        return super().__getitem__(index)


class Slow(L.LightningModule):
    """A step of so many seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, torch.nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        loss = self.layer(batch[0].float().mean((2, 3))).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)
