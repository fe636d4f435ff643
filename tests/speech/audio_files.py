"""Small audio files and made-up copies of torchaudio's datasets, whose samples say which they are by their pitch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch.utils.data import Dataset
from torchaudio import datasets as D

from lightning_dali import Padded


def tone(number: int, *, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """`(S, C)`: a sine of `200 + 20 * number` Hz."""
    time = np.arange(round(seconds * rate)) / rate
    wave = 0.5 * np.sin(2 * np.pi * (200 + 20 * number) * time)
    return np.repeat(wave[:, None], channels, 1).astype(np.float32)


def write(path: Path, number: int = 0, *, rate: int = 16_000, seconds: float = 0.5, **options: Any) -> Path:
    """Writes a tone; the suffix says the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = options.pop("channels", 1)
    soundfile.write(path, tone(number, seconds=seconds, rate=rate, channels=channels), rate, **options)
    return path


def samples(path: Path | str) -> tuple[torch.Tensor, int]:
    """`(C, S)` and the rate, by soundfile alone."""
    wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(wave.T.copy()), rate


class Files(Dataset[Any]):
    """Loads files as `load` does: (waveform, rate, index), or what `then` makes of the waveform."""

    def __init__(self, paths: list[Any], load: Any, then: Any = None) -> None:
        self.paths, self.load, self.then = paths, load, then

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        waveform, rate = self.load(self.paths[index])
        return (waveform if self.then is None else self.then(waveform)), rate, index


def torchaudio_datasets(root: Path) -> dict[str, tuple[Any, list[Path]]]:
    """Every dataset with its files in the order of its samples."""
    made: dict[str, tuple[Any, list[Path]]] = {}

    def text(path: Path, words: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)

    paths = [write(root / f"waves_yesno/{n}_0_1_0_1_0_1_0.wav", n, rate=8000) for n in range(2)]
    made["YESNO"] = D.YESNO(root), paths
    base = root / "SpeechCommands/speech_commands_v0.02"
    paths = [write(base / f"{word}/{n:08x}_nohash_0.wav", n) for n, word in enumerate(["no", "yes"])]
    made["SPEECHCOMMANDS"] = D.SPEECHCOMMANDS(root), paths
    base = root / "LibriSpeech/dev-clean/84/121123"
    paths = [write(base / f"84-121123-{n:04d}.flac", n, seconds=0.4 + n / 10) for n in range(3)]
    text(base / "84-121123.trans.txt", "".join(f"84-121123-{n:04d} WORD {n}\n" for n in range(3)))
    made["LIBRISPEECH"] = D.LIBRISPEECH(root, url="dev-clean"), paths
    base = root / "LibriTTS/dev-clean/84/121123"
    paths = [write(base / f"84_121123_000000_00000{n}.wav", n, rate=24_000) for n in range(2)]
    for path in paths:
        text(path.with_suffix(".original.txt"), "Word.")
        text(path.with_suffix(".normalized.txt"), "word")
    made["LIBRITTS"] = D.LIBRITTS(root, url="dev-clean"), paths
    base = root / "LJSpeech-1.1"
    paths = [write(base / f"wavs/LJ001-000{n}.wav", n, rate=22_050) for n in range(2)]
    text(base / "metadata.csv", "".join(f"LJ001-000{n}|Word {n}|word {n}\n" for n in range(2)))
    made["LJSPEECH"] = D.LJSPEECH(root), paths
    base = root / "ARCTIC/cmu_us_aew_arctic"
    paths = [write(base / f"wav/arctic_a000{n}.wav", n) for n in range(2)]
    text(base / "etc/txt.done.data", "".join(f'( arctic_a000{n} "Word {n}." )\n' for n in range(2)))
    made["CMUARCTIC"] = D.CMUARCTIC(root, url="aew"), paths
    paths = [
        write(root / f"genres/{kind}/{kind}.00000.wav", n, rate=22_050) for n, kind in enumerate(["blues", "rock"])
    ]
    made["GTZAN"] = D.GTZAN(root), paths
    base = root / "VCTK-Corpus-0.92"
    paths = [write(base / f"wav48_silence_trimmed/p225/p225_00{n}_mic2.flac", n, rate=48_000) for n in range(2)]
    for n in range(2):
        text(base / f"txt/p225/p225_00{n}.txt", "Word.")
    made["VCTK_092"] = D.VCTK_092(root), paths
    return made


def rows(batched: list[Any], field: Any = 0) -> list[torch.Tensor]:
    """The rows of a field, without padding; what is padding must be zero."""
    found: list[torch.Tensor] = []
    for batch in batched:
        padded = batch if field is None else batch[field]
        assert isinstance(padded, Padded)
        assert not padded.data.masked_fill(
            padded.mask().view(len(padded.lengths), *(1,) * (padded.data.dim() - 2), -1), 0
        ).any()
        found += padded.unpad()
    return found


def normalised(wave: torch.Tensor) -> torch.Tensor:
    return wave / wave.abs().max()
