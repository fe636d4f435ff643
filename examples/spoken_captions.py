"""The same tiny CLIP with spoken captions: image and sound of a sample both go through DALI.

    python examples/spoken_captions.py

Draws the pairs of multimodal.py, and speaks each caption in a made-up language whose words are tones. Prints the contrastive loss of
the first and last epoch, and how often a picture of the validation set is nearest to a caption of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import soundfile
import torch
from multimodal import WORDS, Losses, TinyCLIP, draw_pairs, tokenise, transforms
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchaudio.transforms import MelSpectrogram

from lightning_dali import MultiModalDataModule
from lightning_dali.audio import Log, load_audio

RATE = 16_000


def speak(root: Path) -> None:
    """Writes a WAV beside each picture: a tone a word, of a speaker who is now fast, now slow, in a room that is not quiet."""
    chance = np.random.default_rng(0)
    for name, caption in json.loads((root / "captions.json").read_text()).items():
        times = [np.arange(int(RATE * chance.uniform(0.07, 0.1))) / RATE for _ in caption.split()]
        tones = [
            np.sin(2 * np.pi * (300 + 250 * WORDS.index(word)) * time)
            for word, time in zip(caption.split(), times, strict=True)
        ]
        wave = 0.4 * np.concatenate(tones)
        soundfile.write((root / name).with_suffix(".wav"), wave + chance.normal(0, 0.01, wave.size), RATE)


class SpokenPairs(Dataset[dict[str, Any]]):
    """Pictures and what is said about them, as one would write them without DALI."""

    def __init__(self, root: Path, *, train: bool) -> None:
        self.root, self.image = root, transforms(train=train)
        self.audio = nn.Sequential(MelSpectrogram(RATE, n_fft=512, hop_length=160, n_mels=32), Log())
        self.pairs = sorted(json.loads((root / "captions.json").read_text()).items())

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, caption = self.pairs[index]
        image = Image.open(self.root / name).convert("RGB")
        wave, _ = load_audio((self.root / name).with_suffix(".wav"))
        return {"image": self.image(image), "speech": self.audio(wave), "tokens": tokenise(caption)}


class SpokenCLIP(TinyCLIP):
    """The text tower is replaced by one that listens."""

    def __init__(self, width: int = 48) -> None:
        super().__init__(width)
        self.ears = nn.Sequential(
            nn.BatchNorm1d(32), nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(10), nn.Flatten(),
            nn.Linear(640, width),
        )  # fmt: skip

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        logits, same = self.compare(batch)
        target = same / same.sum(1, keepdim=True)
        loss = (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(logits))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits, same = self.compare(batch)
        right = same.gather(1, logits.argmax(1, keepdim=True)).mean()
        self.log("accuracy", right, batch_size=len(logits))
        self.log("chance", same.mean(), batch_size=len(logits))

    def compare(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """How near each picture is to each spoken caption of the batch, and which of them fit: `(B, B)`."""
        # slow and fast speakers alike: 50 frames of everybody
        spoken = [nn.functional.interpolate(one, size=50) for one in batch["speech"].unpad()]
        heard = nn.functional.normalize(self.ears(torch.cat(spoken)), dim=-1)
        logits = self.scale.exp() * self.embed_images(batch["image"]) @ heard.T
        return logits, (batch["tokens"][:, None] == batch["tokens"][None]).all(-1).float()


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny CLIP on pairs of a picture and what is said about it.")
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
            speak(root)
        dm = MultiModalDataModule(
            kinds=["image", "audio"],
            train_dataset=SpokenPairs(roots[0], train=True),
            val_dataset=SpokenPairs(roots[1], train=False),
            batch_size=64,
            num_workers=options.num_workers,
        )
        losses = Losses()
        trainer = L.Trainer(
            max_epochs=options.epochs, logger=False, enable_checkpointing=False, callbacks=[losses], log_every_n_steps=1
        )
        trainer.fit(SpokenCLIP(), dm)
        dm.close()

    found = trainer.callback_metrics
    print(f"contrastive loss   {losses.values[0]:.3f} -> {losses.values[-1]:.3f}")
    print(f"nearest caption    {float(found['accuracy']):.3f} right (chance {float(found['chance']):.3f})")


if __name__ == "__main__":
    main()
