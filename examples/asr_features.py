"""From a folder of recordings to batches of log-mel features for speech recognition, with a picture of them.

    pip install -e '.[examples]' && python examples/asr_features.py [FOLDER] [--picture features.png]

FOLDER holds WAV, FLAC, OGG or MP3 of any rate, such as LibriVox chapters cut into utterances; without one a few are made up.
Batches are made by duration, so that little of them is padding.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import nn
from torchaudio import transforms as T

from lightning_dali import Padded, SpeechDataModule, SpeechManifest
from lightning_dali.audio import CMVN, Downmix, Log

RATE = 16_000
"""Hz; recordings of other rates are resampled."""
SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3"}


def make_recordings(folder: Path, count: int = 60) -> None:
    """Writes voices of gliding pitch with pauses, 1 - 8 s, at several rates."""
    for number in range(count):
        random = np.random.default_rng(number)
        rate = int(random.choice([16_000, 22_050, 44_100]))
        time_ = np.arange(int(rate * random.uniform(1, 8))) / rate
        pitch = np.cumsum(140 + 40 * np.sin(2 * np.pi * random.uniform(0.3, 0.8) * time_)) / rate
        voice = sum(np.sin(2 * np.pi * harmonic * pitch) / harmonic for harmonic in range(1, 20))
        syllables = np.clip(np.sin(2 * np.pi * random.uniform(2, 4) * time_) + 0.3, 0, 1)
        soundfile.write(folder / f"{number:03d}.wav", 0.2 * voice * syllables, rate)


def features(*, train: bool) -> nn.Sequential:
    """80 log-mels of 25 ms every 10 ms, normalised per feature, with SpecAugment in training."""
    mel = T.MelSpectrogram(RATE, n_fft=512, win_length=400, hop_length=160, n_mels=80)
    augment = [T.SpecAugment(2, 70, 2, 27, p=0.2)] if train else []
    return nn.Sequential(Downmix(), T.Preemphasis(), mel, Log(), CMVN(), *augment)


def draw(padded: Padded, picture: Path) -> None:
    """Draws up to six spectrograms of a batch, padding left white."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = padded.unpad()[:6]
    figure, axes = pyplot.subplots(len(rows), 1, figsize=(9, 1.6 * len(rows)), sharex=True, squeeze=False)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        axis.imshow(row[0].cpu(), origin="lower", aspect="auto", extent=(0, row.shape[-1] / 100, 0, 80))
        axis.set_ylabel("mel bin")
        axis.set_xlim(0, padded.data.shape[-1] / 100)
    axes[-1, 0].set_xlabel("seconds")
    figure.savefig(picture, dpi=100, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--picture", type=Path, default=Path("features.png"))
    parser.add_argument("--max-seconds", type=float, default=60)
    parser.add_argument("--num-workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.folder is None:
            make_recordings(folder)
        entries: list[dict[str, Any]] = [
            {"path": str(path), "text": path.stem}
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        dm = SpeechDataModule(
            train_dataset=SpeechManifest(entries, transform=features(train=True)),
            sample_rate=RATE,
            max_seconds=options.max_seconds,
            drop_last=False,
            num_workers=options.num_workers,
            length_cache=str(Path(temporary) / "lengths.sqlite3"),
        )
        start, frames, wasted, batches, first = time.perf_counter(), 0, 0, 0, None
        for mels, _, texts in dm.train_dataloader():
            first = first or mels
            frames += int(mels.lengths.sum())
            wasted += mels.data.shape[0] * mels.data.shape[-1] - int(mels.lengths.sum())
            batches += 1
            print(f"{len(texts):4d} utterances, {tuple(mels.data.shape)}, on {mels.device}")
        seconds = time.perf_counter() - start
        dm.close()
    assert first is not None
    draw(Padded(first.data.to(torch.float32), first.lengths), options.picture)
    print(f"{len(entries)} recordings, {batches} batches, {frames / 100:.0f} s of speech in {seconds:.1f} s")
    print(f"padding: {100 * wasted / (frames + wasted):.1f} %; spectrograms in {options.picture}")


if __name__ == "__main__":
    main()
