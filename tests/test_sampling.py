"""Own orders: every rank built in one process, over dataset and batch sizes, world sizes and points of resumption."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dali.sampling import EvalPlan, Shard, TrainPlan
from lightning_dali.seeding import seeded
from tests.plans import (
    BATCHES,
    MANY,
    SEEDS,
    SIZES,
    WORLDS,
    Make,
    batch_sampled,
    evaluate,
    indices,
    order,
    ranks,
    rows,
    sampled,
    train,
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
