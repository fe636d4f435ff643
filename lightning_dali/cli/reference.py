"""What the dataset gives without this library: the same sample under the same draws, decoded by PIL, run by torchvision.

Runs in the rank; the dataset that it makes also in plain workers.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from lightning_dali.fetch import Fetcher
from lightning_dali.seeding import sample_seed, seeded
from lightning_dali.structure import map_leaves

__all__ = ["PlainDataset", "PlainStream", "plain_sample"]

_SUFFIXES = frozenset(Image.registered_extensions())


def plain_sample(fetcher: Fetcher, epoch: int, index: int) -> Any:
    """One sample, as torchvision alone would have made it."""
    with seeded(sample_seed(fetcher.seed, epoch, index), restore=True):
        return _transformed(fetcher.dataset[index], fetcher.transform)


def _transformed(sample: Any, transform: Any) -> Any:
    if transform is None:
        return sample
    done = False

    def visit(leaf: Any) -> Any:
        nonlocal done
        image = None if done else _opened(leaf)
        if image is None:
            return leaf
        done = True
        return transform(image)

    return map_leaves(visit, sample)


def _opened(leaf: Any) -> Any:
    """A leaf that is an image in some form, decoded; else None."""
    if isinstance(leaf, Image.Image):
        return leaf
    if isinstance(leaf, (bytes, bytearray)):
        return Image.open(io.BytesIO(leaf)).convert("RGB")
    if isinstance(leaf, (str, os.PathLike)) and os.path.splitext(os.fspath(leaf))[1].lower() in _SUFFIXES:
        return Image.open(leaf).convert("RGB")
    if isinstance(leaf, np.ndarray) and leaf.dtype == np.uint8:
        return Image.fromarray(leaf)
    return leaf if isinstance(leaf, torch.Tensor) and leaf.dim() == 3 else None


@dataclass
class PlainDataset:
    """For `torch.utils.data.DataLoader`: the user's dataset and field transform, nothing else."""

    dataset: Any
    transform: Any = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _transformed(self.dataset[index], self.transform)


@dataclass
class PlainStream(IterableDataset[Any]):
    """The same for a dataset that is iterated."""

    dataset: Any
    transform: Any = None

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset:
            yield _transformed(sample, self.transform)
