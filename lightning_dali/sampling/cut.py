"""How the places of an epoch's order fall to steps and ranks: arithmetic only. Runs in the rank process."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Cut:
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
        """Whether places are left out."""
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
        """Steps that `left` places make."""
        full, rest = divmod(left, self.step_size)
        return full + (rest > 0 and not self.drops)

    def edge(self, step: int, left: int) -> int:
        """Where global step `step` begins, when the first begins at 0 and `left` places are to be cut."""
        if not self.even:
            return min(step * self.step_size, left)
        return part(left, self.num_steps(left) * self.sharers, step * self.sharers)

    def share(self, begin: int, end: int) -> tuple[range, bool]:
        """This rank's places of a step's [begin, end), and whether another rank has them too."""
        rank = self.shard.rank if self.sharers > 1 else 0
        first, last = (begin + part(end - begin, self.sharers, r) for r in (rank, rank + 1))
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
                "ranks take the same steps; with_index=True shows which. A batch_size or a number of ranks that divides the "
                "dataset better avoids it.",
                *(sizes, steps, surplus),
            )


def part(size: int, parts: int, index: int) -> int:
    """Where part `index` begins when [0, size) is cut into parts that differ by at most one, larger ones first."""
    small, larger = divmod(size, parts)
    return index * small + min(index, larger)
