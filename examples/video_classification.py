"""Learn in which direction a shape moves, from video files, with DALI under a Lightning Trainer.

    pip install -e '.[examples]' && python examples/video_classification.py

Nothing is downloaded: videos of a square that moves over a noisy picture are encoded with PyAV. One frame does not tell
the direction, so the network must look at several. Uses the GPU if there is one (and NVDEC on it); takes about a minute on
two cores. Prints the accuracy on videos that were not trained on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import lightning as L
import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2

from lightning_dali import ClipSampler, VideoDataModule

DIRECTIONS = {"left": (0, -2), "right": (0, 2), "up": (-2, 0), "down": (2, 0)}
"""Pixels a frame, down and to the right."""
HEIGHT, WIDTH, FRAMES = 64, 80, 24


def write_video(path: Path, direction: str, random: np.random.Generator) -> None:
    """Writes a square that moves from a random place in a direction; what leaves the picture comes back in."""
    down, right = DIRECTIONS[direction]
    top, left, side = random.integers(HEIGHT), random.integers(WIDTH), random.integers(14, 24)
    ground = random.integers(0, 120, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    colour = random.integers(160, 256, 3, dtype=np.uint8)
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(
            "libx264", rate=12, options={"preset": "ultrafast", "x264-params": "log-level=none"}
        )
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for k in range(FRAMES):
            picture = ground.copy()
            rows, columns = (top + down * k + np.arange(side)) % HEIGHT, (left + right * k + np.arange(side)) % WIDTH
            picture[np.ix_(rows, columns)] = colour
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        out.mux(stream.encode())


class Videos:
    """A dataset of `(path, label)`; nothing here knows of DALI."""

    def __init__(self, folder: Path, count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.samples: list[tuple[str, int]] = []
        folder.mkdir(parents=True)
        for n in range(count):
            label = n % len(DIRECTIONS)
            path = folder / f"{n:04d}.mp4"
            write_video(path, list(DIRECTIONS)[label], random)
            self.samples.append((str(path), label))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.samples[index]


def transform(*, train: bool) -> v2.Compose:
    """What a torchvision user would write. No flips: they would turn left into right."""
    augment: Sequence[nn.Module] = (
        [v2.RandomCrop((56, 72)), v2.ColorJitter(0.3, 0.3)] if train else [v2.CenterCrop((56, 72))]
    )
    return v2.Compose([*augment, v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4] * 3, [0.25] * 3)])


class Directions(L.LightningModule):
    """A small 3D convolutional network on clips `(B, C, T, H, W)`."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((3, 16, (1, 2, 2)), (16, 32, (1, 2, 2)), (32, 64, (2, 2, 2))):
            layers += [nn.Conv3d(inputs, outputs, 3, stride, padding=1), nn.BatchNorm3d(outputs), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, len(DIRECTIONS))

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """`(B, 4)`."""
        return self.head(self.body(clips).mean((2, 3, 4)))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        clips, labels = batch
        return nn.functional.cross_entropy(self(clips), labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        clips, labels = batch
        self.log("accuracy", (self(clips).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-workers", type=int, help="the cores decide by default")
    options = parser.parse_args()
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        dm = VideoDataModule(
            train_dataset=Videos(Path(folder) / "train", options.videos, seed=0),
            val_dataset=Videos(Path(folder) / "val", options.videos // 4, seed=1),
            train_transform=transform(train=True),
            eval_transform=transform(train=False),
            clip=ClipSampler(6, stride=2),
            layout="CTHW",
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            index_cache=str(Path(folder) / "index.sqlite3"),
        )
        trainer = L.Trainer(max_epochs=options.epochs, logger=False, enable_checkpointing=False)
        trainer.fit(Directions(), dm)
        dm.close()
    print(f"validation accuracy {float(trainer.callback_metrics['accuracy']):.3f}")


if __name__ == "__main__":
    main()
