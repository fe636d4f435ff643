"""Plans of every rank in one process, and what their batches amount to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import settings
from hypothesis import strategies as st

from lightning_dali.sampling import BatchPlan, BatchSamplerPlan, BatchTask, EvalPlan, SamplerPlan, Shard, TrainPlan

MANY = settings(deadline=None, max_examples=150)
SOME = settings(deadline=None, max_examples=50)
SIZES = st.integers(1, 60)
WORLDS = st.integers(1, 5)
BATCHES = st.integers(1, 6)
SEEDS = st.integers(0, 3)

Make = Callable[[Shard], BatchPlan]


def ranks(make: Make, world_size: int) -> list[BatchPlan]:
    return [make(Shard(rank, world_size)) for rank in range(world_size)]


def rows(plans: Sequence[BatchPlan], epoch: int = 0, *, start: int = 0) -> list[tuple[BatchTask, ...]]:
    """The tasks of each step over all ranks, in order; asserts that ranks agree on the steps and announce them."""
    per_rank = [list(plan.batches(epoch, start=start)) for plan in plans]
    for plan, tasks in zip(plans, per_rank, strict=True):
        assert len(tasks) == plan.num_steps(start=start)
        assert [task.step for task in tasks] == list(range(len(plan) - len(tasks), len(plan)))
        assert all(task.epoch == epoch for task in tasks)
    return list(zip(*per_rank, strict=True))


def own(row: Sequence[BatchTask]) -> list[int]:
    """Indices of a step that are not repetitions, in the order of ranks; asserts that the flags are right."""
    first = []
    for task in row:
        assert task.indices
        flags = task.repeated or (False,) * len(task.indices)
        first += [index for index, again in zip(task.indices, flags, strict=True) if not again]
    for task in row:
        assert all(index in first for index in task.indices)
    return first


def order(table: Sequence[Sequence[BatchTask]]) -> list[int]:
    return [index for row in table for index in own(row)]


def sizes(plan: BatchPlan) -> list[int]:
    return [len(task.indices) for task in plan.batches(0)]


def indices(plan: BatchPlan, epoch: int = 0) -> list[tuple[int, ...]]:
    return [task.indices for task in plan.batches(epoch)]


def train(n: int, b: int, seed: int = 0, *, shuffle: bool = True, drop_last: bool = True) -> Make:
    return lambda shard: TrainPlan(n, b, shard=shard, seed=seed, shuffle=shuffle, drop_last=drop_last)


def evaluate(n: int, b: int) -> Make:
    return lambda shard: EvalPlan(n, b, shard=shard)


def sampled(sampler: object, n: int, b: int, *, drop_last: bool = False, already_sharded: bool = False) -> Make:
    return lambda shard: SamplerPlan(
        sampler,  # type: ignore[arg-type]
        n,
        b,
        shard=shard,
        seed=0,
        drop_last=drop_last,
        already_sharded=already_sharded,
    )


def batch_sampled(sampler: object, n: int, *, drop_last: bool = False, already_sharded: bool = False) -> Make:
    return lambda shard: BatchSamplerPlan(
        sampler,  # type: ignore[arg-type]
        n,
        shard=shard,
        seed=0,
        drop_last=drop_last,
        already_sharded=already_sharded,
    )
