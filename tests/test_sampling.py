"""Plans: every rank built in one process, over dataset and batch sizes, world sizes and points of resumption."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_dali.sampling import BatchPlan, BatchSamplerPlan, BatchTask, EvalPlan, SamplerPlan, Shard, TrainPlan
from lightning_dali.seeding import seeded

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


# ---------------------------------------------------------------------------------------------------------- training


@MANY
@given(SIZES, WORLDS, BATCHES, st.booleans(), st.booleans(), SEEDS, st.integers(0, 5))
def test_train(n: int, w: int, b: int, shuffle: bool, drop_last: bool, seed: int, epoch: int) -> None:
    table = rows(ranks(train(n, b, seed, shuffle=shuffle, drop_last=drop_last), w), epoch)
    seen, drops = order(table), drop_last and n >= w * b
    whole = order(rows([TrainPlan(n, 1, shard=Shard(), seed=seed, shuffle=shuffle)], epoch))

    assert sorted(whole) == list(range(n))
    assert seen == whole[: n // (w * b) * w * b if drops else n]
    assert len(table) == (n // (w * b) if drops else -(-n // (w * b)))
    for step, row in enumerate(table):
        counts = [len(task.indices) for task in row]
        assert max(counts) - min(counts) <= 1
        if drops or step < n // (w * b):
            assert counts == [b] * w
            assert not any(task.repeated for task in row)
    # Only where samples are fewer than ranks is anything repeated, and no more than it takes.
    assert sum(sum(task.repeated) for row in table for task in row) == (
        0 if drops or not (rest := n % (w * b)) else max(0, w - rest)
    )


@MANY
@given(SIZES, st.booleans(), st.data())
def test_train_resumes_at_the_global_position(n: int, drop_last: bool, data: st.DataObject) -> None:
    w, w2, b, b2 = (data.draw(strategy) for strategy in (WORLDS, WORLDS, BATCHES, BATCHES))
    old, new = ranks(train(n, b, drop_last=drop_last), w), ranks(train(n, b2, drop_last=drop_last), w2)
    table = rows(old)
    steps = data.draw(st.integers(0, len(table)))
    (position,) = {plan.position(steps) for plan in old}
    before, after = order(table[:steps]), order(rows(new, start=position))

    assert position == len(before)
    whole = order(rows(ranks(train(n, 1), 1)))
    assert before + after == whole[: len(before + after)]
    left_out = n - len(before + after)
    assert left_out == ((n - position) % (w2 * b2) if drop_last and n >= w2 * b2 else 0)
    (end,) = {plan.position(len(list(plan.batches(0, start=position))), start=position) for plan in new}
    assert end == n - left_out
    assert {plan.position(10**6, start=position) for plan in new} == {end}


@MANY
@given(SIZES, WORLDS, BATCHES, st.booleans(), st.integers(0, 60))
def test_resumed_alike_goes_on_alike(n: int, w: int, b: int, drop_last: bool, steps: int) -> None:
    for make in (train(n, b, drop_last=drop_last), evaluate(n, b)):
        for plan in ranks(make, w):
            tasks = list(plan.batches(2))
            assert list(plan.batches(2, start=plan.position(steps))) == tasks[steps:]
            half = min(steps, len(tasks)) // 2
            rest = min(steps, len(tasks)) - half
            assert plan.position(rest, start=plan.position(half)) == plan.position(steps)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    plan = TrainPlan(50, 4, shard=Shard(1, 2), seed=1)
    assert indices(plan) == indices(TrainPlan(50, 4, shard=Shard(1, 2), seed=1))
    with seeded(9, restore=True):
        assert indices(plan) == indices(plan)
    assert len({tuple(indices(replace(plan, seed=s), epoch)) for s in (1, 2) for epoch in (0, 1)}) == 4
    assert indices(TrainPlan(6, 6, shard=Shard(), seed=0)) == [(2, 5, 3, 4, 1, 0)]  # a checkpoint counts on it


# -------------------------------------------------------------------------------------------------------- evaluation


@MANY
@given(SIZES, WORLDS, BATCHES)
def test_eval_is_exact(n: int, w: int, b: int) -> None:
    table = rows(ranks(evaluate(n, b), w))
    assert order(table) == list(range(n))
    assert len(table) == -(-n // (w * b))
    counts = [len(task.indices) for row in table for task in row]
    assert max(counts) <= b
    assert sum(counts) == max(n, w * len(table))
    if w > 1:
        assert max(counts) - min(counts) <= 1
    else:
        assert set(counts[:-1]) <= {b}


@MANY
@given(SIZES, st.data())
def test_eval_resumes_at_the_global_position(n: int, data: st.DataObject) -> None:
    w, w2, b, b2 = (data.draw(strategy) for strategy in (WORLDS, WORLDS, BATCHES, BATCHES))
    old = ranks(evaluate(n, b), w)
    table = rows(old)
    steps = data.draw(st.integers(0, len(table)))
    before = order(table[:steps])
    assert {plan.position(steps) for plan in old} == {len(before)}
    assert before + order(rows(ranks(evaluate(n, b2), w2), start=len(before))) == list(range(n))


# -------------------------------------------------------------------------------------------- examples: cases 10, 11


def test_last_partial_batch() -> None:
    """Case 10: IMG(10), batch 4; IMG(3), batch 4; IMG(0)."""
    one = Shard()
    keep = TrainPlan(10, 4, shard=one, seed=0, shuffle=False, drop_last=False)
    assert indices(keep) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert len(keep) == 3
    assert indices(EvalPlan(10, 4, shard=one)) == indices(keep)
    drop = replace(keep, drop_last=True)
    assert (indices(drop), len(drop)) == ([(0, 1, 2, 3), (4, 5, 6, 7)], 2)
    assert indices(replace(drop, num_samples=3)) == [(0, 1, 2)]
    assert indices(EvalPlan(3, 4, shard=one)) == [(0, 1, 2)]
    for make in (train(0, 4), evaluate(0, 4), sampled([], 10, 4), batch_sampled([], 10)):
        with pytest.raises(
            ValueError, match=r"Nothing to iterate over: the dataset .* has 0 (samples|batches)\. Check"
        ):
            make(one)


def test_61_samples_on_two_ranks() -> None:
    """Case 11: 61 samples, batch 4, and 3 samples, batch 1, both on 2 ranks."""
    table = rows(ranks(train(61, 4), 2))
    assert (len(table), len(set(order(table)))) == (7, 56)
    table = rows(ranks(evaluate(61, 4), 2))
    assert (len(table), order(table)) == (8, list(range(61)))
    assert {len(task.indices) for row in table for task in row} == {3, 4}

    assert [len(order(rows(ranks(train(3, 1, drop_last=d), 2)))) for d in (True, False)] == [2, 3]
    zero, one = (list(plan.batches(0)) for plan in ranks(evaluate(3, 1), 2))
    assert [(task.indices, task.repeated) for task in zero] == [((0,), ()), ((2,), ())]
    assert [(task.indices, task.repeated) for task in one] == [((1,), ()), ((2,), (True,))]


def test_table_of_the_module() -> None:
    def both(make: Make) -> list[list[tuple[int, ...]]]:
        return [[task.indices for task in row] for row in rows(ranks(make, 2))]

    assert both(train(10, 2, shuffle=False)) == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert both(train(10, 2, shuffle=False, drop_last=False))[2:] == [[(8,), (9,)]]
    assert both(train(9, 2, shuffle=False, drop_last=False))[2:] == [[(8,), (8,)]]
    assert both(evaluate(10, 4)) == [[(0, 1, 2), (3, 4, 5)], [(6, 7), (8, 9)]]
    assert both(evaluate(3, 1)) == [[(0,), (1,)], [(2,), (2,)]]
    batches = [[0], [1, 2], [3, 4, 5]]
    assert both(batch_sampled(batches, 6)) == [[(0,), (1, 2)], [(3, 4, 5), (3, 4, 5)]]
    assert both(batch_sampled(batches, 6, drop_last=True)) == [[(0,), (1, 2)]]


# ------------------------------------------------------------------------------------------------ samplers of a user


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


# ------------------------------------------------------------------------------------------------ values, words, logs


def test_plans_are_values() -> None:
    shard = Shard(0, 2)
    for make in (train(5, 2), evaluate(5, 2), sampled([0, 1], 5, 1), batch_sampled([[0], [1]], 5)):
        plan = make(shard)
        copy = pickle.loads(pickle.dumps(plan))
        assert copy == plan == make(shard) != make(Shard(1, 2))
        assert list(copy.batches(1)) == list(plan.batches(1))
        assert "world_size=2" in repr(plan)
        assert plan.num_samples == 5
    task = BatchTask(1, 2, tuple(range(256)))
    assert pickle.loads(pickle.dumps(task)) == task
    assert len(pickle.dumps(task)) < 1000


def test_bad_arguments() -> None:
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(
            ValueError, match=rf"Shard\(rank={rank}, world_size={world_size}\): .* rank in \[0, world_size"
        ):
            Shard(rank, world_size)
    with pytest.raises(ValueError, match="batch_size is 0: it must be 1 or more"):
        EvalPlan(4, 0, shard=Shard())
    with pytest.raises(ValueError, match="3 indices but 1 flags"):
        BatchTask(0, 0, (1, 2, 3), (True,))
    plan = EvalPlan(4, 2, shard=Shard())
    assert list(plan.batches(0, start=4)) == []
    for start in (-1, 5):
        with pytest.raises(ValueError, match=f"Cannot start at position {start}: an epoch has 4 samples"):
            plan.batches(0, start=start)
    with pytest.raises(ValueError, match="steps is -1"):
        plan.position(-1)


@pytest.mark.parametrize(
    ("make", "world_size", "level", "words"),
    [
        (
            train(61, 4),
            2,
            "INFO",
            "61 samples, 2 rank(s) with 4 a step each: 7 step(s), 5 samples left out each epoch.",
        ),
        (train(7, 4), 2, "WARNING", "7 samples, 2 rank(s) with 4 a step each: not one full step of 8"),
        (train(9, 4, drop_last=False), 2, "WARNING", "in the last of 2 step(s) 1 rank(s) have none"),
        (
            evaluate(3, 1),
            4,
            "WARNING",
            "3 samples, 4 rank(s) with 1 a step each: in the last of 1 step(s) 1 rank(s) have",
        ),
        (batch_sampled([[0], [1], [2]], 3), 2, "WARNING", "3 batches, 2 rank(s) with 1 a step each: in the last of 2"),
        (
            sampled([0, 1, 2], 9, 2, drop_last=True, already_sharded=True),
            2,
            "INFO",
            "6 samples, 2 rank(s) .* 2 samples left",
        ),
    ],
)
def test_numbers_are_named_once(
    make: Make, world_size: int, level: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_dali.sampling"):
        plans = ranks(make, world_size)
        for plan in plans:
            list(plan.batches(0))
    (record,) = caplog.records
    assert record.levelname == level
    assert all(part in record.getMessage() for part in words.split(" .* "))


@pytest.mark.parametrize("make", [train(16, 4), train(10, 4, drop_last=False), evaluate(61, 4), sampled([3, 1], 4, 1)])
def test_nothing_to_say(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_dali.sampling"):
        ranks(make, 2)
    assert not caplog.records


def test_weights_are_honoured() -> None:
    plan = sampled(WeightedRandomSampler([0.0, 1.0, 3.0], 4000), 3, 100)(Shard())
    counts = Counter(i for task in plan.batches(0) for i in task.indices)
    assert counts[0] == 0
    assert 2.6 < counts[2] / counts[1] < 3.4
