"""Who gets which sample of a stream: all workers and ranks in one process, whatever their speed."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dali.sampling import Shard, StreamPlan, stream_plan
from tests.streams.engine import Dealt, Uneven, rank_of, reference

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, size=st.integers(1, 4), drop_last=st.booleans(), ahead=st.integers(1, 9))
def test_order_does_not_depend_on_speed_and_each_sample_comes_once(
    sizes: list[int], size: int, drop_last: bool, ahead: int
) -> None:
    rank = rank_of(Uneven(sizes), size, len(sizes), drop_last=drop_last)
    found = rank.batches(ahead=ahead)
    assert found == reference(sizes, size, drop_last=drop_last)
    assert len(found) == (sum(sizes) // size if drop_last else -(-sum(sizes) // size))
    assert rank.batches(1, ahead=1) == found, "a second pass begins anew"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=SIZES, size=st.integers(1, 3), drop_last=st.booleans())
def test_a_pass_may_begin_anywhere(data: Any, sizes: list[int], size: int, drop_last: bool) -> None:
    whole = list(rank_of(Uneven(sizes), size, len(sizes), drop_last=drop_last).requests())
    start = data.draw(st.integers(0, len(whole)))
    rank = rank_of(Uneven(sizes), size, len(sizes), drop_last=drop_last)
    rest = list(rank.requests(start=start, ahead=data.draw(st.integers(1, 6))))
    assert [one.batch[0].tolist() for one in rest] == [one.batch[0].tolist() for one in whole[start:]]
    assert [one.task.step for one in rest] == [one.task.step for one in whole[start:]], "so the same draws of a batch"
    assert len({one.task.step for one in whole}) == len(whole)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 30),
    size=st.integers(1, 4),
    workers=st.integers(0, 3),
    world=st.integers(2, 3),
    drop_last=st.booleans(),
)
def test_ranks_take_the_same_number_of_batches(n: int, size: int, workers: int, world: int, drop_last: bool) -> None:
    each = max(1, workers)
    shares = [range(share, n, world * each) for share in range(world * each)]
    lengths = [sum(map(len, shares[rank * each : (rank + 1) * each])) for rank in range(world)]
    if 0 in lengths:
        with pytest.raises(ValueError, match=r"is empty on rank \d: its length is 0 \(lengths by rank"):
            stream_plan(
                lengths, name="train", batch_size=size, shard=Shard(0, world), num_workers=workers, drop_last=False
            )
        return
    ranks = [
        rank_of(Dealt(n, r, world), size, workers, shard=Shard(r, world), lengths=lengths, drop_last=drop_last)
        for r in range(world)
    ]
    found = [list(rank.requests(ahead=3)) for rank in ranks]
    assert {len(requests) for requests in found} == {len(ranks[0].plan)}
    once = [
        number
        for requests in found
        for request in requests
        if not request.task.repeated
        for number in request.batch[0].tolist()
    ]
    assert len(once) == len(set(once)), "what is repeated is marked"
    for requests in found:
        for request in requests:
            numbers = request.batch[0].tolist()
            assert request.batch[1].tolist() == numbers, "dealt in turn, so the number is the place in the whole"
            assert not request.task.repeated or len(request.task.repeated) == len(numbers)
    if not drop_last:
        assert sorted(once) == list(range(n)), "evaluation leaves nothing out"


def test_the_number_of_batches_that_ranks_agree_on(caplog: pytest.LogCaptureFixture) -> None:
    def plan(lengths: list[int | None], rank: int = 0, **options: Any) -> StreamPlan:
        given: dict[str, Any] = {"name": "val/0", "batch_size": 4, "num_workers": 0, "drop_last": False, **options}
        return stream_plan(lengths, shard=Shard(rank, 2), **given)

    assert [len(plan([9, 12], rank)) for rank in (0, 1)] == [3, 3] and not caplog.messages
    assert [len(plan([8, 9], rank)) for rank in (0, 1)] == [3, 3]
    assert "have [8, 9] samples, so [2, 3] batches; every rank takes 3. A rank with fewer begins" in caplog.messages[0]
    assert [len(plan([8, 13], rank, drop_last=True)) for rank in (0, 1)] == [2, 2]
    assert "every rank takes 2. What is more is left out" in caplog.messages[1]
    assert len(plan([3, 9], drop_last=True)) == 3
    assert "a rank's stream has 3 sample(s), no full batch of 4" in caplog.messages[2]
    with pytest.raises(ValueError, match=r"val/0 dataset is a stream without a length.* 2 ranks.*limit_val_batches"):
        plan([None, 9])
    limited = plan([None, 9], limit=5)
    assert limited.steps == 5
    with pytest.raises(TypeError, match="stream without a length"):
        len(limited)


def test_a_rank_that_ends_early_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    rank = rank_of(Uneven([3, 2]), 2, 2, shard=Shard(1, 2), lengths=[None, None], limit=6)
    caplog.set_level(logging.WARNING)
    assert rank.batches(ahead=4) == [[0, 1], [100, 101], [2], [0, 1], [100, 101], [2]]
    assert [bool(one.task.repeated) for one in rank.requests()] == [False] * 3 + [True] * 3
    assert "the stream of rank 1 ended after 3 batch(es) of the 6 that every rank takes" in caplog.messages[0]
    assert rank.batches(start=4) == [[100, 101], [2]], "resumed in the repetition"
    for sizes, drop_last in (([0, 0], False), ([1, 0], True)):
        rank = rank_of(Uneven(sizes), 2, 2, shard=Shard(1, 2), lengths=[None] * 2, limit=6, drop_last=drop_last)
        with pytest.raises(RuntimeError, match="gave no batch on rank 1, which is to take 6"):
            rank.batches()


def test_a_length_that_is_not_true_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert len(rank_of(Uneven([5]), 2, 0, lengths=[9]).batches()) == 3
    assert "length is 9, so 5 batch(es) of 2, but it gave 3 in epoch 0" in caplog.messages[0]
    assert len(rank_of(Uneven([5]), 2, 0, lengths=[2]).batches()) == 3, "nothing is kept back"
    assert len(caplog.messages) == 2
    rank_of(Uneven([5]), 2, 0, lengths=[5]).batches()
    assert len(caplog.messages) == 2


class Same(Dealt):
    """Every process gets everything."""

    def __iter__(self) -> Any:
        return iter(range(self.n))


def test_workers_that_get_the_same_are_noticed() -> None:
    for n, size in ((20, 4), (3, 4)):  # in whole batches, or in rests
        with pytest.raises(ValueError, match=r"workers 0 and 1 of rank 0 got the same first samples.*get_worker_info"):
            rank_of(Same(n), size, 2).batches(ahead=2)
    assert rank_of(Same(4), 2, 1).batches() == rank_of(Same(4), 2, 0).batches() == [[0, 1], [2, 3]]

    class Alike(Dealt):
        def __iter__(self) -> Any:
            return itertools.repeat(7, 4)

    assert rank_of(Alike(4), 2, 2).batches() == [[7, 7]] * 4, "samples that are all alike tell nothing"
