"""What a user may give as the dataset of a stage. Runs in the rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from lightning_dali.streams import is_stream

Datasets = Any
"""A dataset, a zero-argument factory of one; for evaluation also a list or dict of them."""


def members(given: Datasets) -> list[Any]:
    """The datasets or factories of a stage."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]


def is_factory(item: Any) -> bool:
    """Whether it is a function that makes a dataset."""
    return callable(item) and not hasattr(item, "__getitem__") and not hasattr(item, "__iter__")


def check_dataset(stage: str, given: Datasets) -> None:
    """Refuses what is no dataset, with advice."""
    if stage == "train" and isinstance(given, (Mapping, list, tuple)) and not isinstance(given, Dataset):
        raise TypeError(
            f"train_dataset is a {type(given).__name__}: it must be one dataset (or a zero-argument function that makes it). "
            "Join several with torch.utils.data.ConcatDataset."
        )
    for item in members(given):
        if isinstance(item, Iterator) and not isinstance(item, Dataset):  # a Dataset may be its own iterator: litdata's
            raise TypeError(
                f"{stage}_dataset is {item!r}, which can be gone through only once: pass an IterableDataset whose __iter__ makes "
                "a new iterator."
            )
        indexed = hasattr(item, "__getitem__") and hasattr(item, "__len__")
        if not (indexed or is_factory(item) or is_stream(item)):
            raise TypeError(
                f"{stage}_dataset is {item!r}: expected a dataset with __getitem__ and __len__, an IterableDataset, or a "
                "zero-argument function that makes one."
            )


def describe(given: Datasets) -> str:
    """How many samples a stage has, without making or reading anything."""
    if given is None:
        return "none"
    sizes = [
        "made at setup" if is_factory(item) else "a stream" if is_stream(item) else f"{len(item)} samples"
        for item in members(given)
    ]
    names = list(given) if isinstance(given, Mapping) else [""] * len(sizes)
    return ", ".join(f"{name} {size}".strip() for name, size in zip(names, sizes, strict=True))
