"""Plans around a user's own sampler or batch sampler. Runs in the rank process."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar

import torch

from lightning_dali.sampling.cut import Cut, Shard
from lightning_dali.sampling.plans import BatchPlan, picker
from lightning_dali.seeding import epoch_seed, seeded

T = TypeVar("T")


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
    def order(self) -> str:
        """The sampler's name."""
        return _name(self.sampler)

    @property
    def _cut(self) -> Cut:
        size = _length(self.sampler)
        return Cut(size, self.batch_size, self.shard, self.drop_last, already_sharded=self.already_sharded)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        return picker(_indices(_draw(self.sampler, epoch, self.seed), self.num_samples, self.sampler))


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
    def order(self) -> str:
        """The batch sampler's name."""
        return _name(self.batch_sampler)

    @property
    def _cut(self) -> Cut:
        size, unit = _length(self.batch_sampler), self.position_unit
        return Cut(size, 1, self.shard, self.drop_last, already_sharded=self.already_sharded, unit=unit)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        sampler = self.batch_sampler
        batches = [_indices(batch, self.num_samples, sampler) for batch in _draw(sampler, epoch, self.seed)]
        if not all(batches):
            raise ValueError(
                f"{_name(sampler)} gave an empty batch in epoch {epoch}: leave it out, and out of its length."
            )
        return lambda places: tuple(chain.from_iterable(batches[places.start : places.stop]))


def _name(sampler: object) -> str:
    return type(sampler).__name__


def _length(sampler: Iterable[object]) -> int:
    try:
        return len(sampler)  # type: ignore[arg-type]  # whether it has one is the question
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
    members = _members(sampler)
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


def user_plan(
    dataset: Any,
    *,
    sampler: Any = None,
    batch_sampler: Any = None,
    batch_size: int,
    shard: Shard,
    seed: int,
    drop_last: bool,
    deal: bool = True,
) -> BatchPlan:
    """The plan that honours a user's sampler or batch sampler.

    Args:
        dataset: what the indices point into; `len()` of it.
        sampler: yields dataset indices; or a function of the dataset that makes such a sampler.
        batch_sampler: yields lists of dataset indices, or a function of the dataset; instead of `sampler`.
        batch_size: most samples of a rank in a step; with a batch sampler only a guess.
        shard: the rank.
        seed: of the draws.
        drop_last: as in `SamplerPlan` and `BatchSamplerPlan`.
        deal: whether a sampler that is not a rank's own is dealt to the ranks. False takes it as the rank's own.

    Raises:
        TypeError: it is no sampler.
        ValueError: it is sharded for other ranks than there are.
    """
    given = sampler if batch_sampler is None else batch_sampler
    word = "sampler" if batch_sampler is None else "batch_sampler"
    if callable(given) and (isinstance(given, type) or not hasattr(given, "__iter__")):
        given = given(dataset)
    if not hasattr(given, "__iter__") or isinstance(given, (str, bytes)):
        raise TypeError(
            f"{word} is {given!r}: expected an iterable of {'dataset indices' if word == 'sampler' else 'lists of them'} "
            "with a length, such as those of torch.utils.data, or a function of the dataset that makes one."
        )
    own = _own_shard(given, shard, word) or not deal
    common: Any = {"num_samples": len(dataset), "shard": shard, "seed": seed, "drop_last": drop_last}
    if word == "sampler":
        return SamplerPlan(given, batch_size=batch_size, already_sharded=own, **common)
    guess = getattr(given, "batch_size", None)
    size = guess if isinstance(guess, int) and guess > 0 else batch_size
    return BatchSamplerPlan(given, batch_size=size, already_sharded=own, **common)


def _own_shard(sampler: Any, shard: Shard, word: str) -> bool:
    """Whether a sampler yields one rank's samples only: torch's `DistributedSampler`, and what looks like it."""
    for member in _members(sampler):
        replicas, rank = getattr(member, "num_replicas", None), getattr(member, "rank", None)
        if not isinstance(replicas, int) or not isinstance(rank, int):
            continue
        if (rank, replicas) != (shard.rank, shard.world_size):
            raise ValueError(
                f"{word}: {_name(member)} was made for rank {rank} of {replicas}, this is rank {shard.rank} of "
                f"{shard.world_size}. Pass a function that makes it when the ranks are known, such as "
                f"{word}=lambda dataset: ..., or a sampler that does not shard: the datamodule deals it to the ranks."
            )
        return True
    return False


def _members(sampler: object) -> list[Any]:
    """A sampler and those it wraps, outermost first."""
    members: list[Any] = [sampler]
    while (inner := getattr(members[-1], "sampler", None)) is not None and not any(inner is m for m in members):
        members.append(inner)
    return members
