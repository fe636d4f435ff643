"""Who gets which sample: plans that cut an epoch into batches, for every rank and from any point of it.

Runs in the rank process. Plans are values: rank and world size are arguments, all ranks can be built in one process,
and the same arguments give the same batches. A *position* is the number of global samples consumed in an epoch: it
means the same for another number of ranks, of workers or another batch size, so a run may resume with those changed.

What each rank gets, in places of the epoch's order, with 2 ranks (`*`: repeated, and flagged in `BatchTask.repeated`):

========================================  =======  =======  =======
plan                                      step     rank 0   rank 1
========================================  =======  =======  =======
TrainPlan(10, 2), drop_last (8 9 unused)  0        0 1      2 3
..                                        1        4 5      6 7
TrainPlan(10, 2, drop_last=False)         2        8        9
TrainPlan(9, 2, drop_last=False)          2        8        8*
EvalPlan(10, 4)                           0        0 1 2    3 4 5
..                                        1        6 7      8 9
EvalPlan(3, 1)                            1        2        2*
BatchSamplerPlan, batches a b c           0        a        b
.. drop_last=False                        1        c        c*
========================================  =======  =======  =======
"""

# Over 300 lines, half of them docstrings: the four plans differ in little more than their documented contract.

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from lightning_dali.seeding import epoch_seed, seeded

__all__ = ["BatchPlan", "BatchSamplerPlan", "BatchTask", "EvalPlan", "SamplerPlan", "Shard", "TrainPlan"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Which of how many ranks a plan is for."""

    rank: int = 0
    """Global rank, in [0, world_size)."""
    world_size: int = 1
    """Number of ranks over all nodes."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"Shard(rank={self.rank}, world_size={self.world_size}): world_size must be 1 or more and rank in "
                "[0, world_size). Check what the launcher set (RANK, WORLD_SIZE, SLURM_PROCID, SLURM_NTASKS)."
            )


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One batch of one rank: what a worker needs to know to fetch it."""

    epoch: int
    """Epoch, for `sample_seed`."""
    step: int
    """Global step within the epoch, for `batch_seed`; a resumed epoch goes on counting where it stopped."""
    indices: tuple[int, ...]
    """Dataset indices, in batch order."""
    repeated: tuple[bool, ...] = ()
    """For each index: whether it is there only to fill a slot, another rank having it too. Empty: none is."""

    def __post_init__(self) -> None:
        if self.repeated and len(self.repeated) != len(self.indices):
            raise ValueError(f"{len(self.indices)} indices but {len(self.repeated)} flags: give one each, or none.")


@dataclass(frozen=True)
class _Cut:
    """How the places of an epoch's order fall to steps and ranks: arithmetic only."""

    size: int
    """Places in the order."""
    batch_size: int
    """Most places a rank gets in a step."""
    shard: Shard
    """The rank."""
    drop_last: bool = False
    """Leave out what does not fill a global step; not where that would leave nothing."""
    even: bool = False
    """Spread the rest over all steps instead of leaving it to the last."""
    already_sharded: bool = False
    """The order is this rank's own, and each rank has one as long. Otherwise all share one."""
    unit: str = "samples"
    """What a place holds."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}: it must be 1 or more (it counts one rank's samples).")
        if self.size < 1:
            raise ValueError(
                f"Nothing to iterate over: the dataset (or its sampler) has {self.size} {self.unit}. Check its path "
                "and filters, or pass None for a stage that has no data."
            )

    @property
    def sharers(self) -> int:
        """Number of ranks that share this order."""
        return 1 if self.already_sharded else self.shard.world_size

    @property
    def copies(self) -> int:
        """Number of orders, and so of positions for each place in one."""
        return self.shard.world_size if self.already_sharded else 1

    @property
    def step_size(self) -> int:
        """Places a full step takes of this order."""
        return self.sharers * self.batch_size

    @property
    def drops(self) -> bool:
        return self.drop_last and self.size >= self.step_size

    def left(self, start: int) -> int:
        """Places of the order that are left at position `start`."""
        if self.already_sharded and start > self.size * self.copies:
            return 0  # orders padded for another number of ranks may have been longer
        if not 0 <= start <= self.size * self.copies:
            raise ValueError(
                f"Cannot start at position {start}: an epoch has {self.size * self.copies} {self.unit}. If the dataset "
                "or its sampler changed since the checkpoint was written, resume from an epoch's end."
            )
        return self.size - start // self.copies

    def num_steps(self, left: int) -> int:
        full, rest = divmod(left, self.step_size)
        return full + (rest > 0 and not self.drops)

    def edge(self, step: int, left: int) -> int:
        """Where global step `step` begins, when the first begins at 0 and `left` places are to be cut."""
        if not self.even:
            return min(step * self.step_size, left)
        return _part(left, self.num_steps(left) * self.sharers, step * self.sharers)

    def share(self, begin: int, end: int) -> tuple[range, bool]:
        """This rank's places of a step's [begin, end), and whether another rank has them too."""
        rank = self.shard.rank if self.sharers > 1 else 0
        first, last = (begin + _part(end - begin, self.sharers, r) for r in (rank, rank + 1))
        if first < last:
            return range(first, last), False
        again = begin + rank % (end - begin)
        return range(again, again + 1), True

    def announce(self) -> None:
        """Log what of an epoch is left out or repeated."""
        steps, ranks = self.num_steps(self.size), self.shard.world_size
        sizes = f"{self.size * self.copies} {self.unit}, {ranks} rank(s) with {self.batch_size} a step each"
        if self.drops:
            if rest := self.size % self.step_size * self.copies:
                logger.info("%s: %d step(s), %d %s left out each epoch.", sizes, steps, rest, self.unit)
            return
        if self.drop_last:
            logger.warning(
                "%s: not one full step of %d, so drop_last=True would leave nothing. An epoch is one smaller step with "
                "all of them instead. Use a smaller batch_size or fewer ranks.",
                *(sizes, self.step_size * self.copies),
            )
        surplus = self.sharers - (self.size - self.edge(steps - 1, self.size))
        if surplus > 0:
            logger.warning(
                "%s: in the last of %d step(s) %d rank(s) have none of their own and repeat another's, so that all "
                "ranks take the same steps. What is repeated is flagged in BatchTask.repeated.",
                *(sizes, steps, surplus),
            )


def _part(size: int, parts: int, index: int) -> int:
    """Where part `index` begins when [0, size) is cut into parts that differ by at most one, larger ones first."""
    small, larger = divmod(size, parts)
    return index * small + min(index, larger)


class BatchPlan(ABC):
    """Which samples this rank takes at each step of an epoch; all ranks take the same number of steps."""

    num_samples: int
    """Length of the dataset that the indices point into."""
    batch_size: int
    """Most samples of this rank in a step; of a batch sampler, only what it was said to be."""
    shard: Shard
    position_unit: ClassVar[str] = "samples"
    """What positions count. A position is only good for a plan of the same unit."""

    def __post_init__(self) -> None:
        cut = self._cut  # made on every rank, for its checks
        if self.shard.rank == 0:
            cut.announce()

    @property
    @abstractmethod
    def _cut(self) -> _Cut:
        """The arithmetic of this plan."""

    @property
    def epoch_size(self) -> int:
        """The position at which every sample of an epoch is consumed: `num_samples`, or what a user's sampler gives."""
        return self._cut.size * self._cut.copies

    def __len__(self) -> int:
        """Number of batches on this rank in a full epoch."""
        return self.num_steps()

    def num_steps(self, *, start: int = 0) -> int:
        """Number of batches on this rank from position `start` on; 0 if the epoch is over there."""
        return self._cut.num_steps(self._cut.left(start))

    def position(self, steps: int, *, start: int = 0) -> int:
        """The position after `steps` batches from `start`, at most that of the epoch's last batch."""
        if steps < 0:
            raise ValueError(f"steps is {steps}: it counts batches from position {start} on, so 0 or more.")
        cut, left = self._cut, self._cut.left(start)
        done = cut.edge(min(steps, cut.num_steps(left)), left)
        return start if not done else (cut.size - left + done) * cut.copies

    def batches(self, epoch: int, *, start: int = 0) -> Iterator[BatchTask]:
        """The batches of this rank in `epoch`, in order, from position `start` on.

        The order is made in this call, not while iterating, so that a sampler draws in the caller's thread.

        Raises:
            ValueError: `start` is outside the epoch, or a user's sampler broke its word.
        """
        pick = self._order(epoch)
        return self._tasks(epoch, pick, self._cut, self._cut.left(start))

    def _tasks(self, epoch: int, pick: Callable[[range], tuple[int, ...]], cut: _Cut, left: int) -> Iterator[BatchTask]:
        steps, before = cut.num_steps(left), cut.size - left
        skipped = cut.num_steps(cut.size) - steps
        for step in range(steps):
            places, again = cut.share(before + cut.edge(step, left), before + cut.edge(step + 1, left))
            indices = pick(places)
            yield BatchTask(epoch, skipped + step, indices, (True,) * len(indices) if again else ())

    @abstractmethod
    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        """Make the epoch's order: a function from places in it to dataset indices."""


@dataclass(frozen=True)
class TrainPlan(BatchPlan):
    """One permutation of the dataset an epoch; each global step takes the next `world_size * batch_size` of it.

    Args:
        num_samples: length of the dataset.
        batch_size: samples of a rank in a step.
        shard: the rank.
        seed: of the permutations; the same on all ranks.
        shuffle: False takes the dataset's own order.
        drop_last: leave out what does not fill a step on every rank. False cuts the rest evenly among the ranks.
            A dataset too small for one full step is treated as with False, and a warning says so.
    """

    num_samples: int
    batch_size: int
    shard: Shard = field(kw_only=True)
    seed: int = field(kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    drop_last: bool = field(default=True, kw_only=True)

    @property
    def _cut(self) -> _Cut:
        return _Cut(self.num_samples, self.batch_size, self.shard, self.drop_last)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        if not self.shuffle:
            return tuple
        # PCG64 by name: default_rng may change its generator with numpy's version.
        generator = np.random.Generator(np.random.PCG64(epoch_seed(self.seed, epoch)))
        return _picker(array("q", generator.permutation(self.num_samples).astype(np.int64).tobytes()))


@dataclass(frozen=True)
class EvalPlan(BatchPlan):
    """Every sample exactly once, in dataset order over (step, rank), the same number of steps on every rank.

    With one rank, batches are full but for the last. With more, batch sizes differ by at most one.

    Args:
        num_samples: length of the dataset.
        batch_size: most samples of a rank in a step.
        shard: the rank.
    """

    num_samples: int
    batch_size: int
    shard: Shard = field(kw_only=True)

    @property
    def _cut(self) -> _Cut:
        return _Cut(self.num_samples, self.batch_size, self.shard, even=self.shard.world_size > 1)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        return tuple


@dataclass(frozen=True)
class SamplerPlan(BatchPlan):
    """A user's sampler, its order dealt to the ranks as `TrainPlan` deals its permutation.

    All ranks see the same order: the sampler draws under a seed made from `(seed, epoch)`, also if it holds a torch
    generator. What else it draws from (a `random.Random`, a numpy generator) it must seed itself, in `set_epoch`.

    Args:
        sampler: yields dataset indices, afresh each time; `len()` is what it yields. Its `set_epoch`, and that of a
            sampler it wraps, is called.
        num_samples: length of the dataset; an index outside is an error.
        batch_size: most samples of a rank in a step.
        shard: the rank.
        seed: of the sampler's draws; the same on all ranks.
        drop_last: as in `TrainPlan`. False for evaluation.
        already_sharded: the sampler yields this rank's own samples (`DistributedSampler`), as many on every rank.
            Resumed on another number of ranks, none is lost and up to `world_size - 1` come again.

    Raises:
        TypeError: the sampler has no length, or yields something else than integers.
        ValueError: it yields another number of indices than its length.
        IndexError: it yields an index outside the dataset.
    """

    sampler: Iterable[int]
    num_samples: int
    batch_size: int
    shard: Shard = field(kw_only=True)
    seed: int = field(kw_only=True)
    drop_last: bool = field(kw_only=True)
    already_sharded: bool = field(kw_only=True)

    @property
    def _cut(self) -> _Cut:
        size = _length(self.sampler)
        return _Cut(size, self.batch_size, self.shard, self.drop_last, already_sharded=self.already_sharded)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        return _picker(_indices(_draw(self.sampler, epoch, self.seed), self.num_samples, self.sampler))


@dataclass(frozen=True)
class BatchSamplerPlan(BatchPlan):
    """A user's batch sampler, its batches dealt to the ranks in turn: batch `b` to rank `b % world_size`.

    Positions count batches, as only the batch sampler knows how many samples one holds. Where the last round has fewer
    batches than ranks, `drop_last=True` leaves it out and `drop_last=False` repeats batches of it, flagged.

    Args:
        batch_sampler: yields sequences of dataset indices, afresh each time; `len()` is what it yields.
        num_samples: length of the dataset; an index outside is an error.
        shard: the rank.
        seed: of the batch sampler's draws; the same on all ranks.
        drop_last: leave out a last round that is not full; False for evaluation.
        already_sharded: it yields this rank's own batches, as many on every rank.
        batch_size: what most batches hold, if known: for who prepares buffers. Batches may be larger.

    Raises:
        TypeError, ValueError, IndexError: as `SamplerPlan` does; also for an empty batch.
    """

    batch_sampler: Iterable[Sequence[int]]
    num_samples: int
    shard: Shard = field(kw_only=True)
    seed: int = field(kw_only=True)
    drop_last: bool = field(kw_only=True)
    already_sharded: bool = field(kw_only=True)
    batch_size: int = field(default=1, kw_only=True)
    position_unit: ClassVar[str] = "batches"

    @property
    def _cut(self) -> _Cut:
        size, unit = _length(self.batch_sampler), self.position_unit
        return _Cut(size, 1, self.shard, self.drop_last, already_sharded=self.already_sharded, unit=unit)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        sampler = self.batch_sampler
        batches = [_indices(batch, self.num_samples, sampler) for batch in _draw(sampler, epoch, self.seed)]
        if not all(batches):
            raise ValueError(
                f"{_name(sampler)} gave an empty batch in epoch {epoch}: leave it out, and out of its length."
            )
        return lambda places: tuple(chain.from_iterable(batches[places.start : places.stop]))


def _picker(order: Sequence[int]) -> Callable[[range], tuple[int, ...]]:
    return lambda places: tuple(order[places.start : places.stop])


def _name(sampler: object) -> str:
    return type(sampler).__name__


def _length(sampler: Iterable[object]) -> int:
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise TypeError(
            f"{_name(sampler)} has no length: all ranks must know before an epoch how many steps it has. Give it a "
            "__len__ that returns how many items one iteration yields, or use an IterableDataset that shards itself."
        ) from None


def _indices(items: Iterable[int], num_samples: int, sampler: object) -> Sequence[int]:
    """Check what a sampler yielded, and store it at 8 bytes each."""
    try:
        indices = array("q", map(operator.index, items))
    except TypeError as error:
        raise TypeError(
            f"{_name(sampler)} must yield dataset indices: integers, or, from a batch sampler, lists of them ({error})."
        ) from None
    for index in indices and (min(indices), max(indices)):
        if not 0 <= index < num_samples:
            raise IndexError(
                f"{_name(sampler)} gave index {index}: the dataset has {num_samples} samples, 0 to {num_samples - 1}."
            )
    return indices


def _draw(sampler: Iterable[T], epoch: int, seed: int) -> list[T]:
    """One epoch of a user's sampler, from a seed; the process's random states and the sampler's own stay as they were.

    At most `len()` items and one are taken, so that a sampler without end does not hang.
    """
    members: list[Any] = [sampler]
    while (inner := getattr(members[-1], "sampler", None)) is not None and not any(inner is m for m in members):
        members.append(inner)
    for member in members:
        if callable(getattr(member, "set_epoch", None)):
            member.set_epoch(epoch)
    generators = [g for m in members if isinstance(g := getattr(m, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    number = epoch_seed(seed, epoch)
    try:
        with seeded(number, restore=True):
            for generator in generators:
                generator.manual_seed(number)
            size = _length(sampler)
            items = list(islice(sampler, size + 1))
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
    if len(items) != size:
        given = f"{len(items)}" if len(items) < size else "more"
        raise ValueError(
            f"{_name(sampler)} has length {size} but gave {given} in epoch {epoch}. Ranks count on the length to take "
            "the same steps: make __len__ and __iter__ agree."
        )
    return items
