"""Plans as values, what they refuse, and what they log."""

from __future__ import annotations

import logging
import pickle
from collections import Counter

import pytest
from torch.utils.data import WeightedRandomSampler

from lightning_dali.sampling import BatchTask, EvalPlan, Shard
from tests.plans import Make, batch_sampled, evaluate, ranks, sampled, train


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
