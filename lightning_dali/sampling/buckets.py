"""Batches of samples of similar length. Runs in the rank process."""

from __future__ import annotations

import functools
import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from lightning_dali.sampling.cut import Cut, Shard
from lightning_dali.sampling.plans import BatchPlan
from lightning_dali.seeding import epoch_seed

logger = logging.getLogger(__name__)

_WIDTH = 0.1
"""The shortest of a bucket is at most this share shorter than its longest, so half of it is wasted on average."""
_LEAST_BATCHES = 2
"""A bucket has so many batches where it can: one would have the same members in every epoch."""


class Bucket(NamedTuple):
    """Places `[start, stop)` among the samples sorted by length, longest first, and how they are cut."""

    start: int
    stop: int
    sizes: tuple[int, ...]
    """Samples of each batch; they sum to the places."""


@dataclass(frozen=True)
class DurationPlan(BatchPlan):
    """Length buckets: batches whose samples are about as long, so that little of them is padding.

    Each epoch, samples are shuffled within their bucket and the batches among each other; step `s` gives batch
    `s * world_size + r` to rank `r`. The number and sizes of batches are the same in all epochs. Positions count batches.

    Args:
        durations: of each sample of the dataset, in seconds; 0 where it is not known.
        batch_size: most samples in a batch.
        max_seconds: most seconds in a batch, padding included: its size times its longest. A sample that is longer than
            this is a batch of its own, and a warning says so. None: no limit.
        shard: the rank.
        seed: of the permutations; the same on all ranks.
        shuffle: False takes the buckets as they are, longest first: a batch that does not fit fails at once.
        drop_last: leave out the batches, fewer than there are ranks, that do not fill a step: others in every epoch.
            False halves batches until all ranks have as many.
    """

    durations: Sequence[float]
    batch_size: int
    max_seconds: float | None = field(default=None, kw_only=True)
    shard: Shard = field(kw_only=True)
    seed: int = field(kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=True, kw_only=True)
    num_samples: int = field(init=False)
    position_unit: ClassVar[str] = "batches"

    def __post_init__(self) -> None:
        seconds = array("d", self.durations)
        object.__setattr__(self, "durations", seconds)
        object.__setattr__(self, "num_samples", len(seconds))
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds is {self.max_seconds}: it counts the seconds of a batch, so more than 0.")
        if seconds and not (min(seconds) >= 0 and max(seconds) < float("inf")):
            raise ValueError("durations must be finite and 0 or more, in seconds.")
        super().__post_init__()
        self._announce()

    def _announce(self) -> None:
        if self.shard.rank:
            return
        if self.max_seconds is not None:
            longer = sum(seconds > self.max_seconds for seconds in self.durations)
            if longer:
                logger.warning(
                    "%d sample(s) are longer than max_seconds=%g, up to %.1f s: each is a batch of its own. Raise it, or "
                    "leave them out of the dataset.",
                    *(longer, self.max_seconds, max(self.durations)),
                )
        logger.info(
            "%d batches of up to %d samples in %d length buckets; %.1f %% of them is padding.",
            *(len(self._bounds) - 1, max(map(max, (b.sizes for b in self._buckets))), len(self._buckets)),
            100 * self.padding_waste,
        )

    @property
    def shuffled(self) -> bool:
        """As asked; the order is never the dataset's."""
        return self.shuffle

    @property
    def order(self) -> str:
        """What decides which batches there are."""
        ranks = "" if self.drop_last else f" for {self.shard.world_size} rank(s)"
        limit = "" if self.max_seconds is None else f" and {self.max_seconds:g} s"
        return f"length buckets, batches of {self.batch_size}{limit}{ranks}"

    @property
    def padding_waste(self) -> float:
        """The share of padding in the batches of the first epoch."""
        pick = self._order(0)
        batches = [[self.durations[index] for index in pick(range(at, at + 1))] for at in range(len(self._bounds) - 1)]
        padded = sum(max(batch) * len(batch) for batch in batches)
        return 1 - sum(map(sum, batches)) / padded if padded else 0.0

    @functools.cached_property
    def _sorted(self) -> np.ndarray:
        return np.argsort(-np.asarray(self.durations), kind="stable")

    @functools.cached_property
    def _buckets(self) -> list[Bucket]:
        lengths = np.asarray(self.durations)[self._sorted].tolist()
        buckets = _cut_buckets(lengths, self.batch_size, self.max_seconds)
        return buckets if self.drop_last else _filled(buckets, self.shard.world_size)

    @functools.cached_property
    def _bounds(self) -> list[int]:
        """Places where batches begin, and the end."""
        sizes = [size for bucket in self._buckets for size in bucket.sizes]
        return [0, *np.cumsum(sizes).tolist()]

    @functools.cached_property
    def _cut(self) -> Cut:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}: it must be 1 or more (it counts one rank's samples).")
        return Cut(len(self._bounds) - 1, 1, self.shard, self.drop_last, unit=self.position_unit)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        members, bounds = self._sorted, self._bounds
        batches = np.arange(len(bounds) - 1)
        if self.shuffle:
            # PCG64 by name: default_rng may change its generator with numpy's version.
            generator = np.random.Generator(np.random.PCG64(epoch_seed(self.seed, epoch)))
            members = np.concatenate([generator.permutation(members[b.start : b.stop]) for b in self._buckets])
            batches = generator.permutation(batches)

        def pick(places: range) -> tuple[int, ...]:
            chosen = [members[bounds[batch] : bounds[batch + 1]] for batch in batches[places.start : places.stop]]
            return tuple(np.concatenate(chosen).tolist())

        return pick


def _cut_buckets(lengths: Sequence[float], batch_size: int, max_seconds: float | None) -> list[Bucket]:
    """Cuts samples, sorted from the longest, into buckets of full batches (but for the last one)."""
    negative = [-length for length in lengths]
    buckets: list[Bucket] = []
    start = 0
    while start < len(lengths):
        longest = lengths[start]
        size = batch_size
        if max_seconds is not None and longest > 0:
            size = max(1, int(min(batch_size, max_seconds / longest)))
        similar = bisect_right(negative, -longest * (1 - _WIDTH), start) - start
        batches = max(-(-similar // size), _LEAST_BATCHES if size > 1 else 1)
        if 0 < len(lengths) - start - batches * size < size:
            batches += 1  # too few for a bucket of their own
        stop = min(len(lengths), start + batches * size)
        full, rest = divmod(stop - start, size)
        buckets.append(Bucket(start, stop, (size,) * full + ((rest,) if rest else ())))
        start = stop
    return buckets


def _filled(buckets: list[Bucket], multiple: int) -> list[Bucket]:
    """Halves the largest batches until their number is a multiple of the ranks, as far as there are any to halve."""
    sizes = [list(bucket.sizes) for bucket in buckets]
    while sum(map(len, sizes)) % multiple:
        largest = max(range(len(sizes)), key=lambda number: max(sizes[number]))
        size = max(sizes[largest])
        if size < 2:
            break
        at = sizes[largest].index(size)
        sizes[largest][at : at + 1] = [size - size // 2, size // 2]
    return [bucket._replace(sizes=tuple(cut)) for bucket, cut in zip(buckets, sizes, strict=True)]
