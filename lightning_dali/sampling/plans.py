"""Plans of the library's own: `TrainPlan` and `EvalPlan`, and what every plan can do. Runs in the rank process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from lightning_dali.sampling.cut import Cut, Shard
from lightning_dali.seeding import epoch_seed


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
    worker: int | None = None
    """The only worker that can make it; None: any."""

    def __post_init__(self) -> None:
        if self.repeated and len(self.repeated) != len(self.indices):
            raise ValueError(f"{len(self.indices)} indices but {len(self.repeated)} flags: give one each, or none.")

    @property
    def size(self) -> int:
        """About how much there is to send, in indices."""
        return len(self.indices)


class Plan(ABC):
    """What this rank takes at each step of an epoch."""

    batch_size: int
    """Most samples of this rank in a step; of a batch sampler, only what it was said to be."""
    shard: Shard
    num_samples: int | None
    """Length of the dataset, if it has one."""
    position_unit: ClassVar[str] = "samples"
    """What positions count. A position is only good for a plan of the same unit."""

    @property
    def shuffled(self) -> bool:
        """Whether the order may be another one than the dataset's."""
        return True

    @property
    def order(self) -> str:
        """What makes the order, in words. A position is only good for a plan of the same order."""
        return "a permutation" if self.shuffled else "the dataset"

    def __len__(self) -> int:
        """Number of batches on this rank in a full epoch."""
        return self.num_steps()

    @abstractmethod
    def num_steps(self, *, start: int = 0) -> int:
        """Number of batches on this rank from position `start` on; 0 if the epoch is over there."""

    @abstractmethod
    def position(self, steps: int, *, start: int = 0) -> int:
        """The position after `steps` batches from `start`."""

    def is_over(self, position: int) -> bool:
        """Whether no batch comes after `position`."""
        return self.num_steps(start=position) == 0

    def done(self, position: int) -> int:
        """How many batches of an epoch lie before `position`."""
        return len(self) - self.num_steps(start=position)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a position inside an epoch to mean the same samples, in plain numbers and words."""
        return {"num_samples": self.num_samples, "order": self.order, "unit": self.position_unit}


class BatchPlan(Plan):
    """Which samples of an indexed dataset this rank takes; all ranks take the same number of steps."""

    num_samples: int
    """Length of the dataset that the indices point into."""

    def __post_init__(self) -> None:
        cut = self._cut  # made on every rank, for its checks
        if self.shard.rank == 0:
            cut.announce()

    @property
    @abstractmethod
    def _cut(self) -> Cut:
        """The arithmetic of this plan."""

    @property
    def epoch_size(self) -> int:
        """The position at which every sample of an epoch is consumed: `num_samples`, or what a user's sampler gives."""
        return self._cut.size * self._cut.copies

    def identity(self) -> dict[str, Any]:
        """Also how many samples an epoch has."""
        return {**super().identity(), "epoch_size": self.epoch_size}

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

    def _tasks(self, epoch: int, pick: Callable[[range], tuple[int, ...]], cut: Cut, left: int) -> Iterator[BatchTask]:
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
    def shuffled(self) -> bool:
        """As asked."""
        return self.shuffle

    @property
    def _cut(self) -> Cut:
        return Cut(self.num_samples, self.batch_size, self.shard, self.drop_last)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        if not self.shuffle:
            return tuple
        # PCG64 by name: default_rng may change its generator with numpy's version.
        generator = np.random.Generator(np.random.PCG64(epoch_seed(self.seed, epoch)))
        return picker(array("q", generator.permutation(self.num_samples).astype(np.int64).tobytes()))


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
    def shuffled(self) -> bool:
        """Never."""
        return False

    @property
    def _cut(self) -> Cut:
        return Cut(self.num_samples, self.batch_size, self.shard, even=self.shard.world_size > 1)

    def _order(self, epoch: int) -> Callable[[range], tuple[int, ...]]:
        return tuple


def picker(order: Sequence[int]) -> Callable[[range], tuple[int, ...]]:
    """A plan's order as a function from places in it to dataset indices."""
    return lambda places: tuple(order[places.start : places.stop])
