"""Files of every kind, the datasets that people would write over them, and what they give without this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import soundfile
import torch
from torch import nn
from torchaudio import transforms as T
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_dali import ClipSampler, MultiModalDataModule, Padded
from lightning_dali.audio import Log
from lightning_dali.media import build_index, decode_frames
from lightning_dali.seeding import sample_seed, seeded
from lightning_dali.testing import make_photos
from tests.multimodal.talkies import clicks, make_talkie
from tests.speech.audio_files import write

SEED = 11
CLIP = ClipSampler(3, stride=2)
CROPPED = v2.Compose(
    [
        v2.RandomResizedCrop(32),
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ]
)
MASKED = nn.Sequential(T.MelSpectrogram(16_000, n_fft=256, n_mels=16), Log(), T.FrequencyMasking(6), T.TimeMasking(8))
SMALL = v2.Compose([v2.RandomResizedCrop((24, 32)), v2.ToDtype(torch.float32, scale=True)])
TRANSFORMS = {"image": CROPPED, "video": SMALL, "audio": MASKED}
RATE, PTS = 48_000, (0, 40, 90, 120, 200, 250, 270, 330, 400, 420, 480, 560)
"""Of the videos: Hz, and when each frame begins, in milliseconds: an uneven rate."""
END = 560 + 40
"""When the last frame ends."""


class Files:
    """Photos, sounds and videos, `n` of each, whose contents say which they are."""

    def __init__(self, folder: Path, n: int = 6) -> None:
        self.photos = make_photos(folder / "photos", n, sizes=((60, 80), (90, 70)))
        self.sounds = [
            write(folder / f"sounds/{i}.{('wav', 'flac')[i % 2]}", i, seconds=0.4 + i / 20) for i in range(n)
        ]
        self.videos = []
        for i in range(n):
            begin = [Fraction(time, 1000) for time in PTS]
            wave = clicks(begin, rate=RATE, seconds=END / 1000)
            (folder / "videos").mkdir(exist_ok=True)
            self.videos.append(make_talkie(folder / f"videos/{i}.mov", wave, pts=PTS))


class Dataset:
    """Sample `i` is `make(i)`."""

    def __init__(self, make: Callable[[int], Any], n: int = 6) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def datamodule(dataset: Any, folder: Path, *, stage: str = "val", **options: Any) -> MultiModalDataModule:
    """On the CPU and in this process, unless told otherwise."""
    options = {"batch_size": 2, "seed": SEED, "num_workers": 0, "num_threads": 1, "device": "cpu", **options}
    if "video" in options["kinds"]:
        options["index_cache"] = str(folder / "index.sqlite3")
    return MultiModalDataModule(**{f"{stage}_dataset": dataset}, **options)


def batches(dataset: Any, folder: Path, *, stage: str = "val", **options: Any) -> list[Any]:
    """All batches of one pass."""
    dm = datamodule(dataset, folder, stage=stage, **options)
    try:
        return list(getattr(dm, f"{stage}_dataloader")())
    finally:
        dm.close()


def rows(batched: Sequence[Any]) -> list[dict[Any, Any]]:
    """Batches of dicts or tuples as samples: a dict each, audio without its padding."""
    return [row for batch in batched for row in _rows(batch)]


def _rows(batch: Any) -> Iterator[dict[Any, Any]]:
    fields = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    columns = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            columns[name] = list(_rows(value))
        elif isinstance(value, Padded):
            columns[name] = value.unpad()
        else:
            columns[name] = list(zip(*value, strict=True)) if isinstance(value, tuple) else value
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def plain(make: Callable[[int], Any], index: int, *, epoch: int = 0) -> Any:
    """A sample as it is without this library, under its own seed."""
    with seeded(sample_seed(SEED, epoch, index), restore=True):
        return make(index)


def picture(path: Path, transform: Any = CROPPED) -> torch.Tensor:
    """By PIL and torchvision."""
    made: torch.Tensor = transform(PIL.Image.open(path).convert("RGB"))
    return made


def sound(path: Path, transform: Any = MASKED) -> torch.Tensor:
    """By soundfile and torchaudio."""
    wave = torch.from_numpy(soundfile.read(path, dtype="float32", always_2d=True)[0].T.copy())
    made: torch.Tensor = wave if transform is None else transform(wave)
    return made


def film(path: Path, transform: Any = SMALL, sampler: ClipSampler = CLIP) -> tuple[torch.Tensor, list[int]]:
    """By PyAV and torchvision; and which frames."""
    index = build_index(path)
    clip = sampler.sample(index)
    pixels = tv_tensors.Video(torch.from_numpy(decode_frames(str(path), index, clip.frames)).permute(0, 3, 1, 2))
    return transform(pixels) if transform is not None else pixels, clip.frames.tolist()


def near(ours: torch.Tensor, theirs: torch.Tensor, mean: float) -> None:
    """Of one shape and dtype, and no more than `mean` apart on average."""
    theirs = theirs.as_subclass(torch.Tensor)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    apart = float(np.abs(ours.double().numpy() - theirs.double().numpy()).mean())
    assert apart <= mean, apart
