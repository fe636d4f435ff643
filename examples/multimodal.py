"""Train a tiny CLIP on image-text pairs: the image goes through DALI, the caption stays an ordinary tensor beside it.

    python examples/multimodal.py

Draws its own pairs (coloured shapes and a sentence about each), so nothing is downloaded. Prints the contrastive loss of
the first and last epoch, and how often the right caption is the nearest of all 48 that there can be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_dali import ImageDataModule

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
WORDS = ["<pad>", "a", "on", *COLOURS, *SHAPES]
CAPTIONS = [f"a {one} {shape} on {two}" for one, shape, two in itertools.product(COLOURS, SHAPES, COLOURS)]
SIZE = 32
"""Side of the images the network sees, in pixels."""


def tokenise(text: str) -> torch.Tensor:
    """The words' numbers: int64 `(5,)`."""
    return torch.tensor([WORDS.index(word) for word in text.split()])


def draw_pairs(root: Path, n: int, seed: int = 0) -> None:
    """Writes `n` JPEGs of random size and one captions.json."""
    chance, captions = random.Random(seed), {}
    for number in range(n):
        caption = chance.choice(CAPTIONS)
        _, colour, shape, _, ground = caption.split()
        side = chance.randrange(72, 120)
        # the same colour twice would be invisible: shade the ground
        image = Image.new("RGB", (side, side), tuple(value * 3 // 5 for value in COLOURS[ground]))
        pen, size = ImageDraw.Draw(image), chance.randrange(side // 3, side // 2)
        left, top = chance.randrange(side - size), chance.randrange(side - size)
        box = (left, top, left + size, top + size)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], fill=COLOURS[colour])
        captions[f"{number:05d}.jpg"] = caption
        image.save(root / f"{number:05d}.jpg", quality=92)
    (root / "captions.json").write_text(json.dumps(captions))


def transforms(*, train: bool) -> v2.Compose:
    """What a torchvision user would write."""
    decide = [v2.Resize(40), v2.RandomCrop(SIZE), v2.RandomHorizontalFlip()] if train else [v2.Resize((SIZE, SIZE))]
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    return v2.Compose([*decide, *finish])


class Pairs(Dataset[dict[str, Any]]):
    """Image-text pairs as one would write them without DALI."""

    def __init__(self, root: Path, transform: Any) -> None:
        self.root, self.transform = root, transform
        self.pairs = sorted(json.loads((root / "captions.json").read_text()).items())

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, caption = self.pairs[index]
        image = Image.open(self.root / name).convert("RGB")
        return {"image": self.transform(image), "tokens": tokenise(caption), "caption": caption}


class TinyCLIP(L.LightningModule):
    """Two small towers and the symmetric contrastive loss of Radford et al., 2021."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, width),
        )  # fmt: skip
        self.words = nn.Embedding(len(WORDS), width)
        self.positions = nn.Parameter(torch.ones(5, width))
        self.text = nn.Sequential(nn.ReLU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def embed_text(self, tokens: torch.Tensor) -> torch.Tensor:
        """Unit vectors `(B, width)` of captions `(B, 5)`."""
        return nn.functional.normalize(self.text((self.words(tokens) * self.positions).sum(1)), dim=-1)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Unit vectors `(B, width)` of images `(B, 3, H, W)`."""
        return nn.functional.normalize(self.image(images), dim=-1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        texts, images = self.embed_text(batch["tokens"]), self.embed_images(batch["image"])
        logits = self.scale.exp() * images @ texts.T
        # a caption that occurs twice in a batch is right for both images
        same = (batch["tokens"][:, None] == batch["tokens"][None]).all(-1).float()
        target = same / same.sum(1, keepdim=True)
        loss = (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(images))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        captions = torch.stack([tokenise(caption) for caption in CAPTIONS]).to(self.device)
        nearest = (self.embed_images(batch["image"]) @ self.embed_text(captions).T).argmax(1).tolist()
        right = [CAPTIONS[number] == caption for number, caption in zip(nearest, batch["caption"], strict=True)]
        self.log("accuracy", sum(right) / len(right), batch_size=len(right))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


class Losses(L.Callback):
    """Keeps each epoch's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny CLIP on image-text pairs, the images through DALI.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--num-workers", type=int, default=None)
    options = parser.parse_args()
    # Lightning's advice to use many workers for its own DataLoader does not apply here.
    L.seed_everything(1)

    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / "train", Path(folder) / "val"]
        for seed, (root, n) in enumerate(zip(roots, (options.pairs, options.pairs // 6), strict=True)):
            root.mkdir()
            draw_pairs(root, n, seed)
        dm = ImageDataModule(
            train_dataset=Pairs(roots[0], transforms(train=True)),
            val_dataset=Pairs(roots[1], transforms(train=False)),
            batch_size=64,
            num_workers=options.num_workers,
        )  # fmt: skip
        losses = Losses()
        trainer = L.Trainer(
            max_epochs=options.epochs, logger=False, enable_checkpointing=False, callbacks=[losses], log_every_n_steps=1
        )
        trainer.fit(TinyCLIP(), dm)
        dm.close()

    print(f"contrastive loss   {losses.values[0]:.3f} -> {losses.values[-1]:.3f}")
    print(
        f"nearest caption    {float(trainer.callback_metrics['accuracy']):.3f} right (chance {1 / len(CAPTIONS):.3f})"
    )


if __name__ == "__main__":
    main()
