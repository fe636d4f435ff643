"""Plans for datasets that are iterated, each process over its own share. Runs in the rank process.

A *stream* deals itself: `world_size * num_workers` processes iterate over it, and what one of them gets is the dataset's
business. Tasks say whose turn it is and how many samples it takes. With 2 workers, batches of 2, and a stream that gives
`a b c d e` to one and `v w x` to the other:

=======  ===========  ===========
turn     worker 0     worker 1
=======  ===========  ===========
0        a b          v w
1        c d          (x is its rest)
2        (e)
rests    e x
=======  ===========  ===========

Batches come in that order whatever the speed of the workers; who has ended is passed over. Rests are joined in the order of
workers, so that a rank with `n` samples has `ceil(n / batch_size)` batches, `floor` with `drop_last`, on any number of workers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_dali.sampling.cut import Shard
from lightning_dali.sampling.plans import BatchTask, Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rest:
    """The samples that did not fill a worker's last batch."""

    numbers: tuple[int, ...]
    """Of the samples."""
    packed: Any = None
    """Samples, pickled, as an array of uint8; None: the worker still has them."""
    first: int = 0
    """Where among the packed ones they begin."""

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, start: int, stop: int) -> Rest:
        """Some of them."""
        return Rest(self.numbers[start:stop], self.packed, self.first + start)


@dataclass(frozen=True, slots=True)
class StreamTask(BatchTask):
    """A batch of a worker's next samples, or of samples that were left over."""

    run: int = field(default=0, kw_only=True)
    """The pass: each begins the stream anew."""
    lap: int = field(default=0, kw_only=True)
    """How often the stream was begun before in this pass."""
    serial: int = field(default=0, kw_only=True)
    """Tells the tasks of a pass apart."""
    count: int = field(default=0, kw_only=True)
    """Samples to take; fewer are a rest."""
    order_epoch: int = field(default=0, kw_only=True)
    """The epoch that the dataset is told, for its order."""
    skip: bool = field(default=False, kw_only=True)
    """Whether the samples are only to be passed."""
    pack_rest: bool = field(default=False, kw_only=True)
    """Whether a rest is sent to be joined with others'."""
    rests: tuple[Rest, ...] = field(default=(), kw_only=True)
    """What the batch is made of, if not of the next samples."""
    keep: int = field(default=1, kw_only=True)
    """How many of its last batches the worker keeps: one may have to be made again."""
    state: Any = field(default=None, kw_only=True)
    """The dataset's own state to begin with; None: at the stream's beginning."""
    position: int = field(default=0, kw_only=True)
    """How many samples of this worker lie before that state."""
    after: Any = field(default=None, kw_only=True)
    """Once the batch is there: what the worker told of it (`streams.Told`), then the `Trail` of the pass up to it."""

    @property
    def size(self) -> int:
        """About how much there is to send, in indices."""
        return sum(rest.packed.nbytes // 8 for rest in self.rests if rest.packed is not None)


@dataclass(frozen=True)
class Trail:
    """What a pass over a stream has behind it, for who resumes there."""

    firsts: dict[int, str] = field(default_factory=dict)
    """Fingerprint of the first samples of each worker."""
    states: dict[int, tuple[int, Any]] | None = field(default_factory=dict)
    """For each worker the samples that it has behind it and the dataset's own state there; None: it has none."""
    ended: bool = False
    """Whether the stream of a worker had ended: then `states` do not say where the pass stands."""


@dataclass(frozen=True)
class StreamPlan(Plan):
    """The batches of one rank's share of a stream.

    Args:
        batch_size: samples of a batch.
        shard: the rank.
        num_workers: processes that iterate on this rank; 0: this one does.
        num_samples: samples of this rank's share, if the dataset says.
        steps: how many batches every rank takes, so that none waits for another: a stream that ends before is begun again,
            one that goes on is left. None: what the stream gives.
        drop_last: leave out what does not fill a batch.
        fixed_order: tell the dataset the same epoch every time.
    """

    batch_size: int
    shard: Shard = field(kw_only=True)
    num_workers: int = field(default=0, kw_only=True)
    num_samples: int | None = field(default=None, kw_only=True)
    steps: int | None = field(default=None, kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)
    fixed_order: bool = field(default=False, kw_only=True)
    position_unit: ClassVar[str] = "batches of a stream"

    @property
    def workers(self) -> int:
        """Processes that iterate on this rank."""
        return max(1, self.num_workers)

    @property
    def shuffled(self) -> bool:
        """Whether it may be another one each epoch; Lightning wants `overfit_batches` to have one that is not."""
        return not self.fixed_order

    @property
    def order(self) -> str:
        """The dataset's own."""
        return "a stream"

    def identity(self) -> dict[str, Any]:
        """Who gets which share of the stream; the same on all ranks, whose shares may differ in length."""
        shares = f"{self.shard.world_size} rank(s), {self.workers} worker(s) each, batches of {self.batch_size}"
        length = {"num_samples": self.num_samples} if self.shard.world_size == 1 else {}
        return {**length, "order": self.order, "unit": self.position_unit, "shares": shares}

    def num_steps(self, *, start: int = 0) -> int:
        """Batches from batch `start` on.

        Raises:
            TypeError: The stream has no length.
        """
        if self.num_samples is None:
            raise TypeError("the dataset is a stream without a length: how many batches it gives shows when it ends")
        total = self.steps
        if total is None:
            total = num_batches(self.num_samples, self.batch_size, drop_last=self.drop_last)
        return max(0, total - start)

    def position(self, steps: int, *, start: int = 0) -> int:
        """The number of batches."""
        return start + steps

    def positions(self, batches: int, state: Any) -> dict[int, tuple[int, Any]]:
        """How many samples lie before `state` in each worker, after so many batches of this rank and while none had ended."""
        turns = [-(-(batches - worker) // self.workers) for worker in range(self.workers)]
        return {worker: (turn * self.batch_size, state) for worker, turn in enumerate(turns)}

    def is_over(self, position: int) -> bool:
        """Only where the number of batches is agreed; else the stream itself has to say so."""
        return self.steps is not None and position >= self.steps

    def done(self, position: int) -> int:
        """The position itself."""
        return position


def num_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches that samples make."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def stream_plan(
    lengths: Sequence[int | None],
    *,
    name: str,
    batch_size: int,
    shard: Shard,
    num_workers: int,
    drop_last: bool,
    limit: int | None = None,
    fixed_order: bool = False,
) -> StreamPlan:
    """This rank's plan, given what the streams of all ranks say of their lengths.

    Ranks take the same number of batches. Where all have a length it is the least of theirs with `drop_last`, and the greatest
    without, so that evaluation leaves out no sample; else it is `limit`.

    Args:
        lengths: samples of each rank's share, None where the dataset does not say; of this rank only if it knows no more.
        name: the stage's, for messages.
        batch_size: samples of a batch.
        shard: the rank.
        num_workers: processes that iterate on this rank.
        drop_last: leave out what does not fill a batch.
        limit: batches that the trainer takes at most, if it says.
        fixed_order: as in `StreamPlan`.

    Raises:
        ValueError: A stream has no samples; or there are several ranks and nothing says how many batches each takes.
    """
    own = lengths[shard.rank if len(lengths) > 1 else 0]
    known = [length for length in lengths if length is not None]
    complete = len(known) == len(lengths)
    if 0 in known:
        raise ValueError(
            f"the {name} stream is empty on rank {lengths.index(0)}: its length is 0 (lengths by rank: {list(lengths)}). Check "
            "its source, or give it as many shards as there are ranks."
        )
    if drop_last and known and min(known) < batch_size:
        drop_last = False
        logger.warning(
            "%s: a rank's stream has %d sample(s), no full batch of %d, so drop_last=True would leave nothing and is not "
            "followed. Use a smaller batch_size or fewer ranks.",
            *(name, min(known), batch_size),
        )
    steps = None
    if shard.world_size > 1:
        each = [num_batches(length, batch_size, drop_last=drop_last) for length in known] if complete else None
        steps = _steps_of_all(each, limit, name, shard.world_size, drop_last=drop_last)
        if each is not None:
            _announce(name, known, each, steps, shard)
    return StreamPlan(
        batch_size,
        shard=shard,
        num_workers=num_workers,
        num_samples=own if complete else None,
        steps=steps,
        drop_last=drop_last,
        fixed_order=fixed_order,
    )


def _steps_of_all(each: list[int] | None, limit: int | None, name: str, world_size: int, *, drop_last: bool) -> int:
    """How many batches every rank takes, given how many each has."""
    if each is not None:
        return min(each) if drop_last else max(each)
    if limit is not None:
        return limit
    raise ValueError(
        f"the {name} dataset is a stream without a length, and there are {world_size} ranks: one that ends before the others "
        "would leave them waiting for ever. Give it a __len__ (the samples of one rank's share), or tell the trainer: "
        f"limit_{name.split('/')[0]}_batches=<a number of batches>."
    )


def _announce(name: str, lengths: list[int], each: list[int], steps: int, shard: Shard) -> None:
    if shard.rank == 0 and len(set(each)) > 1:
        logger.warning(
            "%s: the ranks' streams have %s samples, so %s batches; every rank takes %d. %s",
            *(name, lengths, each, steps),
            "What is more is left out."
            if steps == min(each)
            else "A rank with fewer begins its stream again; with_index=True shows which samples come twice.",
        )
