"""Learn spoken words from WAV files with torchaudio's transforms on DALI, under a Lightning Trainer.

    pip install -e '.[examples]' && python examples/speech_commands.py

Nothing is downloaded: the words are spoken by `espeak-ng` in several voices where it is installed, else they are sung by a
small formant synthesiser. They are laid out as torchaudio's SPEECHCOMMANDS, which is read unmodified. Uses the GPU if there
is one; takes about a minute on two cores. Prints the accuracy on speakers that were not trained on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import soundfile
import torch
from torch import nn
from torchaudio import transforms as T
from torchaudio.datasets import SPEECHCOMMANDS

from lightning_dali import Padded, SpeechDataModule
from lightning_dali.audio import CMVN, Log, RandomNoise

RATE = 16_000
"""Hz."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
FORMANTS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}
"""First and second formant in Hz: Peterson and Barney, "Control methods used in a study of the vowels", 1952."""
VOWELS = ("eo", "ua", "uu", "ie", "oa", "ai", "ii", "ee", "ei", "aa")
"""What the synthesiser sings for each word."""


def sing(vowels: str, random: np.random.Generator) -> np.ndarray:
    """Two vowels with a glottal pitch, in the voice of a random speaker: `(S,)`."""
    pitch, scale = random.uniform(90, 220), random.uniform(0.9, 1.12)
    pieces, phase = [], 0.0
    for vowel in vowels:
        time = np.arange(int(random.uniform(0.18, 0.3) * RATE)) / RATE
        wave = np.zeros_like(time)
        for harmonic in range(1, int(3500 / pitch)):
            frequency = harmonic * pitch
            peaks = [np.exp(-(((frequency - formant * scale) / 110) ** 2)) for formant in FORMANTS[vowel]]
            wave += (0.02 / harmonic + peaks[0] + 0.6 * peaks[1]) * np.sin(
                2 * np.pi * frequency * time + harmonic * phase
            )
        phase += 2 * np.pi * pitch * len(time) / RATE
        pieces.append(wave * np.hanning(len(wave)) ** 0.3)
    return np.concatenate(pieces)


def speak(word: str, random: np.random.Generator) -> np.ndarray:
    """The word by espeak-ng in a random voice: `(S,)`."""
    voice = random.choice(["en-us", "en-gb", "en-gb-scotland", "en-029"]) + random.choice(["+m1", "+m3", "+f2", "+f4"])
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        pitch, speed = str(random.integers(30, 70)), str(random.integers(130, 190))
        subprocess.run(["espeak-ng", "-v", voice, "-p", pitch, "-s", speed, "-w", file.name, word], check=True)
        wave, rate = soundfile.read(file.name)
    return np.interp(np.arange(0, len(wave), rate / RATE), np.arange(len(wave)), wave)


def write_words(root: Path, speakers: int) -> None:
    """Writes every word by every speaker in the layout of SPEECHCOMMANDS; every fifth speaker is for validation."""
    base = root / "SpeechCommands" / "speech_commands_v0.02"
    spoken = shutil.which("espeak-ng") is not None
    validation = []
    for speaker in range(speakers):
        random = np.random.default_rng(speaker)
        for word, vowels in zip(WORDS, VOWELS, strict=True):
            wave = speak(word, random) if spoken else sing(vowels, random)
            wave = random.uniform(0.2, 0.8) * wave / np.abs(wave).max() + 0.005 * random.standard_normal(len(wave))
            path = base / word / f"{speaker:08x}_nohash_0.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, wave, RATE)
            if speaker % 5 == 0:
                validation.append(f"{word}/{path.name}\n")
    (base / "validation_list.txt").write_text("".join(validation))
    (base / "testing_list.txt").write_text("")


def features(*, train: bool) -> nn.Sequential:
    """What a torchaudio user would write; nothing here knows of DALI."""
    mel = T.MelSpectrogram(RATE, n_fft=512, win_length=400, hop_length=160, n_mels=40)
    augment = [T.TimeMasking(8), T.FrequencyMasking(5)] if train else []
    return nn.Sequential(*([RandomNoise((10, 30))] if train else []), mel, Log(), CMVN(), *augment)


class Words(L.LightningModule):
    """A small convolutional network over time, averaged over each row's own frames."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((40, 64), (64, 64), (64, 96)):
            layers += [
                nn.Conv1d(inputs, outputs, 5, padding=2),
                nn.BatchNorm1d(outputs),
                nn.ReLU(),
                nn.MaxPool1d(2, ceil_mode=True),
            ]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(96, len(WORDS))

    def forward(self, mels: Padded) -> torch.Tensor:
        """`(B, len(WORDS))`."""
        hidden = self.body(mels.data.squeeze(1))
        frames = Padded(hidden, (mels.lengths + 7) // 8)
        mask = frames.mask().unsqueeze(1)
        return self.head((hidden * mask).sum(-1) / mask.sum(-1))

    def step(
        self, batch: tuple[Padded, torch.Tensor, list[str], list[str], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and accuracy; a sample of SPEECHCOMMANDS is (waveform, rate, label, speaker, number)."""
        mels, _, labels, _, _ = batch
        target = torch.tensor([WORDS.index(label) for label in labels], device=self.device)
        logits = self(mels)
        return nn.functional.cross_entropy(logits, target), (logits.argmax(1) == target).float().mean()

    def training_step(self, batch, _):
        return self.step(batch)[0]

    def validation_step(self, batch, _):
        self.log("accuracy", self.step(batch)[1], batch_size=len(batch[2]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 4e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speakers", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-workers", type=int, default=1)
    options = parser.parse_args()
    L.seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        write_words(Path(folder), options.speakers)
        dm = SpeechDataModule(
            train_dataset=SPEECHCOMMANDS(folder, subset="training"),
            val_dataset=SPEECHCOMMANDS(folder, subset="validation"),
            train_transform=features(train=True),
            eval_transform=features(train=False),
            batch_size=options.batch_size,
            num_workers=options.num_workers,
        )
        trainer = L.Trainer(max_epochs=options.epochs, logger=False, enable_checkpointing=False)
        trainer.fit(Words(), dm)
        dm.close()
    print(f"validation accuracy {float(trainer.callback_metrics['accuracy']):.3f}")


if __name__ == "__main__":
    main()
