"""Small networks that the configs train: an image, a clip, an utterance to a class. Not part of the package."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


def dtype(name: str) -> torch.dtype:
    """A dtype by its name: YAML has no word for it, and Hydra would call `torch.float32`."""
    return getattr(torch, name)


class Classifier(L.LightningModule):
    """Cross entropy of `(inputs, labels)`; labels may be class numbers or, after MixUp, shares."""

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        right = (self(inputs).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


class ImageClassifier(Classifier):
    """`(B, 3, H, W)` to `(B, num_classes)`."""

    def __init__(self, num_classes: int, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.net = nn.Sequential(_convolutions(), nn.Linear(128, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


class ClipClassifier(ImageClassifier):
    """`(B, T, 3, H, W)` to `(B, num_classes)`: the mean over frames."""

    def forward(self, clips: Tensor) -> Tensor:
        return self.net(clips.flatten(0, 1)).unflatten(0, clips.shape[:2]).mean(1)


class SpeechClassifier(Classifier):
    """`Padded` log-mel features `(B, 1, F, T)` to `(B, num_classes)`: the mean over each row's own frames."""

    def __init__(self, num_classes: int, num_bins: int, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.net = nn.Sequential(nn.Linear(num_bins, 64), nn.ReLU(), nn.Linear(64, num_classes))

    def forward(self, features: Any) -> Tensor:
        frames = features.data.flatten(1, 2).transpose(1, 2)  # (B, T, F)
        mask = features.mask().unsqueeze(-1)
        return (self.net(frames) * mask).sum(1) / mask.sum(1)
