"""Hand an ordinary ImageFolder and torchvision transforms to DALI, under a Lightning Trainer.

    pip install -e '.[examples]' && python examples/image_classification.py

Trains a small network on scikit-learn's handwritten digits, written out as JPEG class folders: nothing is downloaded. Uses
the GPU if there is one. Prints the validation accuracy, and images a second beside torchvision's own DataLoader on the
same files with the same number of processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_dali import ImageDataModule

SIZE = 48
"""Side of the images the network sees, in pixels."""


def write_digits(root: Path) -> None:
    """Writes 1,797 digits as JPEGs of 160 x 160 pixels into root/{train,val}/<digit>/, every fifth for validation."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = root / ("val" if number % 5 == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).resize((160, 160), Image.Resampling.BICUBIC)
        image.convert("RGB").save(folder / f"{number:04d}.jpg", quality=92)


def transforms(*, train: bool, strong: bool = False) -> v2.Compose:
    """What a torchvision user would write; nothing here knows of DALI."""
    decide = (
        [v2.RandomResizedCrop(SIZE, scale=(0.7, 1.0), ratio=(0.9, 1.1)), v2.ColorJitter(brightness=0.3, contrast=0.3)]
        if train
        else [v2.Resize(SIZE), v2.CenterCrop(SIZE)]
    )
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    if train and strong:
        decide = [decide[0], v2.RandAugment(num_ops=1, magnitude=5)]
        finish = [*finish, v2.RandomErasing(0.25)]
    return v2.Compose([*decide, *finish])


class Classifier(L.LightningModule):
    """Three convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(64 * 9, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def images_per_second(loader, *, passes: int = 3) -> float:
    """Counts images over `passes` passes, after one that is not counted."""
    for _ in loader:
        pass
    start, seen = time.perf_counter(), 0
    for _ in range(passes):
        for images, _labels in loader:
            seen += len(images)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seen / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits from an unmodified ImageFolder, through DALI.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=None)
    parser.add_argument("--strong", action="store_true", help="RandAugment, RandomErasing and MixUp")
    options = parser.parse_args()
    # Lightning's advice to use many workers for its own DataLoader does not apply here.
    L.seed_everything(1)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_digits(root)
        train = ImageFolder(root / "train", transform=transforms(train=True, strong=options.strong))
        val = ImageFolder(root / "val", transform=transforms(train=False))

        dm = ImageDataModule(
            train_dataset=train,
            val_dataset=val,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            batch_transform=v2.MixUp(alpha=0.2, num_classes=10) if options.strong else None,
        )
        print(dm.explain("train"))
        trainer = L.Trainer(max_epochs=options.epochs, logger=False, enable_checkpointing=False, log_every_n_steps=5)
        trainer.fit(Classifier(), dm)
        accuracy = float(trainer.callback_metrics["accuracy"])

        loader = dm.train_dataloader()
        ours = images_per_second(loader)
        processes = loader.num_workers
        dm.close()
        plain = DataLoader(
            train,
            options.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=processes,
            persistent_workers=processes > 0,
        )
        theirs = images_per_second(plain)

    print(f"validation accuracy                    {accuracy:.3f}")
    print(f"lightning-dali, {processes} worker(s)            {ours:8.0f} images/s")
    print(f"torchvision DataLoader, {processes} worker(s)    {theirs:8.0f} images/s   (on {os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
