"""Datasets that are iterated instead of indexed: `IterableDataset`s that shard themselves.

Everything else is the engine's: plans make tasks (`sampling.streams`), workers turn them into requests (`StreamFetcher`), a pass
gets them from a source (`StreamSource`). `Turns` stands between: it makes the tasks as it becomes known whose stream has ended.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from lightning_dali.streams.answers import Skipped, StreamEnd, Told
from lightning_dali.streams.cursor import this_share
from lightning_dali.streams.fetcher import StreamFetcher
from lightning_dali.streams.peers import gather_lengths
from lightning_dali.streams.source import StreamSource
from lightning_dali.streams.state import set_epoch, told_state
from lightning_dali.streams.turns import Turns

__all__ = [
    "Skipped",
    "StreamEnd",
    "StreamFetcher",
    "StreamSource",
    "Told",
    "Turns",
    "gather_lengths",
    "is_stream",
    "length_of",
    "set_epoch",
    "this_share",
    "told_state",
]


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterated: an `IterableDataset`, or what has `__iter__` and no `__getitem__`."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def length_of(dataset: Any, *, batch_size: int, num_workers: int) -> int | None:
    """Samples of this rank's share, None where the dataset does not say.

    Datasets that need to know (litdata's) are told first how many samples make a batch and how many workers there are.
    """
    tell_batch, tell_workers = getattr(dataset, "set_batch_size", None), getattr(dataset, "set_num_workers", None)
    if callable(tell_batch) and callable(tell_workers):
        tell_batch(batch_size)
        tell_workers(max(1, num_workers))
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # has no `__len__`, or one that says so, as Lightning reads it too
        return None
