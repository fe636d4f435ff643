"""What is said when something is wrong: bad samples by name, and arguments that are one of a few words.

Used in every process: a worker finds a bad sample, the rank raises or lists it (`BadSamples`), so all of it can be pickled.
Imports nothing but the standard library.
"""

from __future__ import annotations

import difflib
import json
import logging
import operator
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

logger = logging.getLogger(__name__)

SHOWN = 5
"""Bad samples that a summary spells out."""


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


class BadSamples:
    """The bad samples that one rank has met: each is listed, logged and written down once an epoch.

    Args:
        limit: How many different samples may be bad; None: any number.
        file: Where to add a line of JSON for each; None: nowhere. Ranks above 0 put ``.rank1`` and so on before the ending.
    """

    def __init__(self, *, limit: int | None = None, file: str | os.PathLike[str] | None = None) -> None:
        self.limit, self.file = limit, None if file is None else os.fspath(file)
        self.met: list[BadSample] = []
        self._seen: set[tuple[str, int, int]] = set()
        self._different: dict[tuple[str, int], BadSample] = {}
        self._reported = 0

    def note(self, sample: BadSample, dataset: str) -> None:
        """Takes a sample of the dataset with that name ("train", "val/0", ...).

        Raises:
            RuntimeError: There are more than `limit`.
        """
        key = (dataset, sample.epoch, sample.dataset_index)
        if key in self._seen:  # a sampler drew it twice, or the pass was begun again
            return
        self._seen.add(key)
        self.met.append(sample)
        self._different.setdefault((dataset, sample.dataset_index), sample)
        logger.warning(
            "bad sample: dataset index %d of %s, path %s, rank %d, epoch %d: %s",
            sample.dataset_index, dataset, sample.path, sample.rank, sample.epoch, sample.reason,
        )  # fmt: skip
        self._write(sample, dataset)
        if self.limit is not None and len(self._different) > self.limit:
            raise RuntimeError(
                f"{len(self._different)} different bad samples on rank {sample.rank}, more than max_bad_samples={self.limit}; "
                f"the last one: {sample}. See datamodule.bad_samples for all of them; repair the dataset or raise the limit."
            )

    def _write(self, sample: BadSample, dataset: str) -> None:
        if self.file is None:
            return
        path = Path(self.file)
        if sample.rank:
            path = path.with_name(f"{path.stem}.rank{sample.rank}{path.suffix}")
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps({"dataset": dataset, **asdict(sample)}) + "\n")

    def report(self) -> str | None:
        """Logs what was met since the last report, if anything was; returns the words."""
        new, self._reported = self.met[self._reported :], len(self.met)
        if not new:
            return None
        first = list({(sample.path, sample.dataset_index): sample for sample in new}.values())
        shown = "; ".join(
            f"index {sample.dataset_index}{f' ({sample.path})' if sample.path else ''}: {sample.reason}"
            for sample in first[:SHOWN]
        )
        words = (
            f"{len(first)} bad sample(s) on rank {new[0].rank} were replaced or dropped, {len(new)} time(s) in all: {shown}"
            f"{f'; and {len(first) - SHOWN} more' if len(first) > SHOWN else ''}. datamodule.bad_samples lists them."
        )
        logger.warning(words)
        return words


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
