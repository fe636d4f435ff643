"""What is said when something is wrong: bad samples by name, and arguments that are one of a few words.

Used in every process: a worker finds a bad sample, the rank raises or lists it, so all of it can be pickled.
Imports nothing but the standard library.
"""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class OnBadSample(str, Enum):
    """What to do about a sample that cannot be used. Its members are the plain words too: `RAISE == "raise"`."""

    RAISE = "raise"
    """Stop with one `BadSampleError`."""
    REPLACE = "replace"
    """A deterministic other sample of the same batch takes its place; the batch keeps its size."""
    DROP = "drop"
    """The batch is shorter by it."""


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be used, and why."""

    dataset_index: int
    """Its index in the dataset."""
    path: str | None
    """Its file, where there is one."""
    rank: int
    """The rank that found it."""
    epoch: int
    """The epoch in which it was found, from 0."""
    reason: str
    """What is wrong with it, in words."""

    def __post_init__(self) -> None:
        for name in ("dataset_index", "rank", "epoch"):  # NumPy's and torch's integers become plain ones
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if self.path is not None:
            object.__setattr__(self, "path", os.fsdecode(self.path))

    def __str__(self) -> str:
        file = "" if self.path is None else f" ({self.path})"
        return f"sample {self.dataset_index}{file} on rank {self.rank} in epoch {self.epoch}: {self.reason}"


class BadSampleError(RuntimeError):
    """A sample that cannot be used, under `on_bad_sample="raise"`.

    Args:
        sample: Which sample it is and what is wrong; kept as `.sample`. It survives pickling, so that the error that a
            worker raises is the error that the rank sees.
    """

    def __init__(self, sample: BadSample) -> None:
        self.sample = sample
        super().__init__(
            f"{sample}. Repair or remove it, or pass on_bad_sample='replace' (another sample of the batch takes its "
            "place) or on_bad_sample='drop' (a shorter batch); datamodule.bad_samples then lists what was met."
        )

    def __reduce__(self) -> tuple[type[BadSampleError], tuple[BadSample]]:
        return type(self), (self.sample,)


def check_choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """The word that `value` stands for, if it is allowed.

    Enum members count by their value or by their name in lower case, since that is what configuration libraries make of
    a word. The result is always a plain `str`.

    Args:
        name: The argument's name, for the message.
        value: What the caller passed.
        allowed: The words, or an enum of them such as `OnBadSample`.

    Raises:
        ValueError: It is none of them; the message shows the value, the words and which one was probably meant.
    """
    words = [word.value if isinstance(word, Enum) else word for word in allowed]
    candidates = (value.value, value.name.lower()) if isinstance(value, Enum) else (value,)
    for candidate in candidates:
        if isinstance(candidate, str) and candidate in words:
            return candidate
    got = value if not isinstance(value, Enum) else value.name
    close = difflib.get_close_matches(str(got).lower(), words, n=1) or words[:1]
    listed = ", ".join(repr(word) for word in words)
    raise ValueError(f"{name}: got {got!r}; allowed: {listed}; do: pass one of them, for instance {name}={close[0]!r}")
