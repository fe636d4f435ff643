"""Object detection: boxes move with the images, drawn once by torchvision, decoded and augmented by DALI.

    pip install -e . && python examples/detection.py

Fits torchvision's own Faster R-CNN (no weights are downloaded) to made-up shapes and writes `detection.png`: a batch as the
model gets it, with its boxes drawn on it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.io import write_png
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, make_grid

from lightning_dali import ImageDataModule

SHAPES = ("rectangle", "ellipse")


def draw_shapes(folder: Path, count: int) -> list[list[tuple[int, list[int]]]]:
    """Writes `count` JPEGs of 192 x 160 pixels and returns the (label, [x1, y1, x2, y2]) of their shapes."""
    rng = np.random.default_rng(0)
    truth = []
    for number in range(count):
        image = Image.fromarray(rng.integers(60, 110, (10, 12, 3), dtype=np.uint8)).resize((192, 160))
        pen, shapes = ImageDraw.Draw(image), []
        for _ in range(rng.integers(1, 4)):
            kind, (width, height) = int(rng.integers(2)), rng.integers(24, 60, 2)
            left, top = int(rng.integers(0, 192 - width)), int(rng.integers(0, 160 - height))
            box = [left, top, left + int(width), top + int(height)]
            getattr(pen, SHAPES[kind])(box, fill=tuple(int(c) for c in rng.integers(140, 255, 3)))
            shapes.append((kind + 1, box))
        image.save(folder / f"{number:04d}.jpg", quality=92)
        truth.append(shapes)
    return truth


def transforms() -> v2.Compose:
    """What a torchvision user would write: boxes go through it with their image."""
    return v2.Compose(
        [
            v2.RandomPhotometricDistort(),
            v2.RandomIoUCrop(min_scale=0.6),
            v2.RandomHorizontalFlip(),
            v2.Resize((160, 192)),
            v2.SanitizeBoundingBoxes(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


class Shapes(Dataset):
    """What a torchvision user would write; nothing in it knows of DALI."""

    def __init__(self, folder: Path, truth: list[list[tuple[int, list[int]]]], transforms: v2.Transform) -> None:
        self.folder, self.truth, self.transforms = folder, truth, transforms

    def __len__(self) -> int:
        return len(self.truth)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        image = Image.open(self.folder / f"{index:04d}.jpg").convert("RGB")
        boxes = tv_tensors.BoundingBoxes(
            [box for _, box in self.truth[index]], format="XYXY", canvas_size=(image.height, image.width)
        )
        labels = torch.tensor([label for label, _ in self.truth[index]])
        return self.transforms(image, {"boxes": boxes, "labels": labels})


class Detector(L.LightningModule):
    """torchvision's Faster R-CNN, from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=3, min_size=120, max_size=144, trainable_backbone_layers=6
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, targets = batch
        loss = sum(self.net(list(images), list(targets)).values())
        self.log("loss", loss, prog_bar=True, batch_size=len(images))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def detection_collate(batch: list[Any]) -> tuple[Any, ...]:
    """The collate of every detection tutorial."""
    return tuple(zip(*batch, strict=True))


def picture(batch: Any, path: str) -> None:
    """Draws a batch's boxes on its images."""
    drawn = []
    for image, target in zip(*batch, strict=True):
        pixels = v2.functional.to_dtype(image.cpu(), torch.uint8, scale=True)
        names = [SHAPES[label - 1] for label in target["labels"].tolist()]
        drawn.append(draw_bounding_boxes(pixels, target["boxes"].cpu(), labels=names, colors="yellow", width=2))
    canvas = [torch.nn.functional.pad(one, (0, 192 - one.shape[2], 0, 160 - one.shape[1])) for one in drawn]
    write_png(make_grid(canvas, nrow=2), path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faster R-CNN on made-up shapes, through DALI.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--picture", default="detection.png")
    options = parser.parse_args()
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        truth = draw_shapes(Path(folder), 160)
        dm = ImageDataModule(
            train_dataset=Shapes(Path(folder), truth, transforms()),
            collate_fn=detection_collate,
            batch_size=4,
        )
        picture(dm.peek(), options.picture)
        model = Detector()
        trainer = L.Trainer(max_steps=options.steps, logger=False, enable_checkpointing=False, log_every_n_steps=5)
        trainer.fit(model, dm)
        dm.close()
    first, last = np.mean(model.losses[:10]), np.mean(model.losses[-10:])
    print(
        f"loss: {first:.3f} in the first ten steps, {last:.3f} in the last ten; a batch is drawn in {options.picture}"
    )
    if not last < first:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
