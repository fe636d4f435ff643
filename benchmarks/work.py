"""The work that is measured, the same for this library and its peers: datasets and transforms as a user would write them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Any

import soundfile
import torch
from contest import Batches, Contender
from rates import endless
from torch import nn
from torch.utils.data import Dataset
from torchaudio import transforms as T
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_dali.audio import CMVN, Log

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZE = 224
RECIPES = ("imagenet", "randaugment")

KINDS = ("h264_320x256", "h264_340x256", "h264_640x360", "h264_1280x720", "h264_1920x1080", "hevc_1920x1080")
FRAMES, STRIDE, STARTS, RATE = 16, 4, 150, 30
"""A clip: 16 frames, every fourth one, that begin at one of the first 150; frames a second of the files."""
CLIPS = 960
"""Samples of the dataset of videos: its files again and again, so that an epoch is no shorter than a measurement."""
LONG_EPOCH = 500
"""Batches of an epoch of images or speech, for the same reason; ImageNet has 5,000."""

SAMPLE_RATE, N_FFT, WIN_LENGTH, HOP_LENGTH, N_MELS = 16_000, 512, 400, 160, 80
"""Of log-mels: NeMo's usual front end."""


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


# -- images ----------------------------------------------------------------------------------------------------------


def recipe(name: str, dtype: torch.dtype = torch.float32) -> v2.Compose:
    """The transforms of a named recipe."""
    strong = name == "randaugment"
    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            *([v2.RandAugment()] if strong else []),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(dtype, scale=True),
            v2.Normalize(MEAN, STD),
            *([v2.RandomErasing(0.25)] if strong else []),
        ]
    )


def images_in(folder: str | Path) -> Path:
    """The folder of classes."""
    return Path(folder, "images")


def image_folder(folder: str | Path, batch_size: int, *, num_batches: int = LONG_EPOCH, **options: Any) -> ImageFolder:
    """An `ImageFolder` with epochs of `num_batches`: its files again and again, as many as that takes."""
    dataset = ImageFolder(str(images_in(folder)), **options)
    wanted = num_batches * batch_size
    dataset.samples = (dataset.samples * (1 + wanted // len(dataset.samples)))[:wanted]
    dataset.imgs, dataset.targets = dataset.samples, [target for _, target in dataset.samples]
    return dataset


# -- video -----------------------------------------------------------------------------------------------------------


def videos_in(folder: str | Path, kind: str) -> list[str]:
    """The files of a kind."""
    return sorted(glob(f"{folder}/videos/{kind}_*.mp4"))


def clip_start(index: int) -> int:
    """The frame at which a peer's clip begins: a different one for each sample, without a random generator."""
    return (13 * index) % STARTS


class Videos(Dataset[tuple[str, int]]):
    """Paths; what becomes of them is the datamodule's."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return CLIPS

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.paths[index % len(self.paths)], index


# -- speech ----------------------------------------------------------------------------------------------------------


def speech_in(folder: str | Path) -> list[str]:
    """The files."""
    return sorted(glob(f"{folder}/speech/*.flac"))


def features() -> nn.Sequential:
    """What an ASR model is fed in training."""
    return nn.Sequential(
        T.MelSpectrogram(SAMPLE_RATE, n_fft=N_FFT, win_length=WIN_LENGTH, hop_length=HOP_LENGTH, n_mels=N_MELS),
        Log(),
        CMVN(),
        T.SpecAugment(n_time_masks=2, time_mask_param=70, n_freq_masks=2, freq_mask_param=27, p=0.2),
    )


class Utterances(Dataset[tuple[Any, int]]):
    """FLAC files, read with soundfile, and the transform; with `num_samples` again and again."""

    def __init__(self, folder: str | Path, num_samples: int | None = None) -> None:
        self.paths = speech_in(folder)
        self.num_samples = len(self.paths) if num_samples is None else num_samples
        self.transform = features()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        wave, _ = soundfile.read(self.paths[index % len(self.paths)], dtype="float32")
        return self.transform(torch.from_numpy(wave)), index


# -- this library ----------------------------------------------------------------------------------------------------


def ours(name: str, dm: Any, *, slices: int = 2, **more: Any) -> Contender:
    """A datamodule's training loader as a contender."""

    def batches() -> Batches:
        try:
            yield from endless(dm.train_dataloader())
        finally:
            dm.close()

    return Contender(name, batches, dm.batch_size, slices=slices, **more)
