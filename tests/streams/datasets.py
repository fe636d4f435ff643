"""Iterated datasets that shard themselves, at the top of a module, so that every kind of worker can have them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info


def my_share() -> tuple[int, int]:
    """(number, of): which of all processes this one is, as users write it."""
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank * workers + worker, ranks * workers


class Pictures(IterableDataset[Any]):
    """`(transform(image), number)`, dealt in turn, in another order each epoch.

    Args:
        paths: Picture `i` says that it is number `i`.
        transform: Of an opened image.
        shuffle: Whether the order is drawn from the epoch.
    """

    def __init__(self, paths: Sequence[Path | str], transform: Any, *, shuffle: bool = False) -> None:
        self.paths, self.transform, self.shuffle, self.epoch = paths, transform, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.paths)))
        if self.shuffle:
            random.Random(self.epoch).shuffle(order)
        number, of = my_share()
        for index in order[number::of]:
            yield self.transform(PIL.Image.open(self.paths[index])), index


class Sized(Pictures):
    """The same, with the length of this rank's share."""

    def __len__(self) -> int:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        rank = torch.distributed.get_rank() if ranks > 1 else 0
        return len(range(rank, len(self.paths), ranks))


class Placed(Sized):
    """The same, and it knows its own place. Says what it opened."""

    place = 0
    opened = 0

    def __iter__(self) -> Iterator[Any]:
        for at, sample in enumerate(self._all()):
            self.place = at + 1
            yield sample
        self.place = 0

    def _all(self) -> Iterator[Any]:
        order = list(range(len(self.paths)))
        random.Random(self.epoch).shuffle(order)
        number, of = my_share()
        start, self.place = self.place, 0
        for index in order[number::of][start:]:
            self.opened += 1
            yield self.transform(PIL.Image.open(self.paths[index])), index

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
