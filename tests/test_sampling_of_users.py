"""Samplers and batch samplers of a user: dealt to the ranks, or refused with advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_dali.sampling import BatchPlan, Shard
from lightning_dali.seeding import seeded
from tests.plans import (
    BATCHES,
    SIZES,
    SOME,
    WORLDS,
    Make,
    batch_sampled,
    indices,
    order,
    ranks,
    rows,
    sampled,
    train,
)


class Recorder:
    """A sampler that shuffles with all three global states and remembers the epochs it was told."""

    def __init__(self, n: int, *, given: int | None = None) -> None:
        self.n, self.given, self.epochs = n, n if given is None else given, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        keys = torch.rand(self.given).numpy() + np.random.rand(self.given)
        yield from (int(i) for i in np.argsort(keys))


@SOME
@given(SIZES, WORLDS, BATCHES, st.booleans(), st.integers(0, 60))
def test_sampler_is_dealt_as_a_permutation(n: int, w: int, b: int, drop_last: bool, start: int) -> None:
    start = min(start, n)
    mine = rows(ranks(sampled(SequentialSampler(range(n)), n, b, drop_last=drop_last), w), start=start)
    assert mine == rows(ranks(train(n, b, shuffle=False, drop_last=drop_last), w), start=start)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: RandomSampler(range(40)),
        lambda: RandomSampler(range(40), generator=torch.Generator()),
        lambda: WeightedRandomSampler([1.0] * 20 + [3.0] * 20, 30),
        lambda: Recorder(40),
    ],
)
def test_random_sampler_agrees_on_all_ranks(make_sampler: Callable[[], object]) -> None:
    """Each rank has its own sampler and its own random states, some already used: the order is the same."""
    plans = []
    for rank in range(3):
        sampler = make_sampler()
        list(sampler)  # type: ignore[call-overload]
        plans.append(sampled(sampler, 40, 4)(Shard(rank, 3)))
    table = []
    for number, plan in enumerate(plans):
        with seeded(number, restore=True):
            table.append(indices(plan, 3))
            assert indices(plan, 3) == table[-1]
            assert indices(plan, 4) != table[-1]
    whole = indices(sampled(make_sampler(), 40, 3 * 4)(Shard()), 3)
    assert [sum(parts, ()) for parts in zip(*table, strict=True)] == whole


def random_words() -> list[int]:
    words: list[int] = np.random.get_state(legacy=False)["state"]["key"].tolist()
    return words


def test_sampler_leaves_no_trace() -> None:
    generator = torch.Generator().manual_seed(5)
    plan = sampled(RandomSampler(range(9), generator=generator), 9, 2)(Shard())
    before = torch.get_rng_state(), random_words(), generator.get_state()
    tasks = plan.batches(0)
    after = torch.get_rng_state(), random_words(), generator.get_state()
    assert torch.equal(before[0], after[0]) and before[1] == after[1] and torch.equal(before[2], after[2])
    with seeded(1, restore=True):  # drawn in the call of batches(), not later, in another thread
        assert list(tasks) == list(plan.batches(0))


def test_set_epoch_is_called_also_on_a_wrapped_sampler() -> None:
    inner = Recorder(8)
    list(batch_sampled(BatchSampler(inner, 2, False), 8)(Shard()).batches(4))
    list(sampled(inner, 8, 2)(Shard()).batches(5))
    assert inner.epochs == [4, 5]


@SOME
@given(SIZES, WORLDS, BATCHES, st.booleans(), st.data())
def test_already_sharded(n: int, w: int, b: int, drop_last: bool, data: st.DataObject) -> None:
    def make(shard: Shard) -> BatchPlan:
        sampler: Sampler[int] = DistributedSampler(range(n), shard.world_size, shard.rank, drop_last=False)  # type: ignore[arg-type]
        return sampled(sampler, n, b, drop_last=drop_last, already_sharded=True)(shard)

    plans = ranks(make, w)
    table = rows(plans, 1)
    samplers = [list(plan.sampler) for plan in plans]  # type: ignore[attr-defined]  # set_epoch(1) was called
    own_size = -(-n // w)
    for rank, sampler in enumerate(samplers):
        taken = [index for row in table for index in row[rank].indices]
        assert taken == sampler[: own_size // b * b if drop_last and own_size >= b else own_size]
    assert {plan.epoch_size for plan in plans} == {own_size * w}
    steps = data.draw(st.integers(0, len(table)))
    (position,) = {plan.position(steps) for plan in plans}
    assert position == sum(len(task.indices) for row in table[:steps] for task in row)
    assert rows(plans, 1, start=position) == table[steps:]
    other = ranks(make, data.draw(WORLDS))
    assert list(other[0].batches(1, start=60 + 6)) == []  # padded for more ranks, an epoch was longer
    if not drop_last:  # on another number of ranks nothing is lost
        seen = {i for row in table[:steps] + rows(other, 1, start=position) for t in row for i in t.indices}
        assert seen == set(range(n))


@SOME
@given(SIZES, WORLDS, BATCHES, st.booleans(), st.data())
def test_batch_sampler(n: int, w: int, b: int, drop_last: bool, data: st.DataObject) -> None:
    batches = list(BatchSampler(range(n), b, False))
    plans = ranks(batch_sampled(batches, n, drop_last=drop_last), w)
    table = rows(plans)
    drops = drop_last and len(batches) >= w
    count = len(batches) // w * w if drops else len(batches)
    assert order(table) == [i for batch in batches[:count] for i in batch]
    assert {task.indices for row in table for task in row} == {tuple(batch) for batch in batches[:count]}
    assert {plan.position_unit for plan in plans} == {"batches"}
    steps = data.draw(st.integers(0, len(table)))
    assert rows(plans, start=plans[0].position(steps)) == table[steps:]
    new = ranks(batch_sampled(batches, n), data.draw(WORLDS))
    resumed = order(rows(new, start=plans[0].position(steps)))
    assert order(table[:steps]) + resumed == list(range(n))


def test_batch_sampler_that_shards_itself() -> None:
    def make(shard: Shard) -> BatchPlan:
        sampler: Sampler[int] = DistributedSampler(range(10), shard.world_size, shard.rank, shuffle=False)  # type: ignore[arg-type]
        return batch_sampled(BatchSampler(sampler, 3, False), 10, already_sharded=True)(shard)

    table = rows(ranks(make, 2))
    assert [[task.indices for task in row] for row in table] == [[(0, 2, 4), (1, 3, 5)], [(6, 8), (7, 9)]]
    assert make(Shard(0, 2)).position(1) == 2


def test_endless_sampler_does_not_hang() -> None:
    class Endless(Recorder):
        def __iter__(self) -> Iterator[int]:
            yield from [0] * 100
            raise AssertionError("asked for far more than its length")

    with pytest.raises(ValueError, match="Endless has length 5 but gave more"):
        sampled(Endless(5), 9, 2)(Shard()).batches(0)


def test_sampler_that_cannot_be_honoured() -> None:
    def run(make: Make) -> object:
        return make(Shard()).batches(0)

    for make in (sampled(iter(range(3)), 3, 1), batch_sampled((b for b in [[1]]), 3)):
        with pytest.raises(TypeError, match=r"(range_iterator|generator) has no length: .* __len__ .* IterableDataset"):
            make(Shard())
    with pytest.raises(
        ValueError, match="Recorder has length 5 but gave 3 in epoch 0.*make __len__ and __iter__ agree"
    ):
        run(sampled(Recorder(5, given=3), 9, 2))
    with pytest.raises(ValueError, match="Recorder has length 5 but gave more"):
        run(sampled(Recorder(5, given=6), 9, 2))
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=f"list gave index {bad}: the dataset has 3 samples, 0 to 2"):
            run(sampled([0, bad, 1], 3, 2))
        with pytest.raises(IndexError, match=f"list gave index {bad}: "):
            run(batch_sampled([[0], [1, bad]], 3))
    for make in (sampled([0, "a"], 3, 1), sampled([[0], [1]], 3, 1), batch_sampled([0, 1], 3)):
        with pytest.raises(
            TypeError, match="list must yield dataset indices: integers, or, from a batch sampler, lists"
        ):
            run(make)
    with pytest.raises(ValueError, match="list gave an empty batch in epoch 0"):
        run(batch_sampled([[0], []], 3))
    assert indices(sampled([torch.tensor(1), np.int64(0)], 2, 2)(Shard())) == [(1, 0)]
