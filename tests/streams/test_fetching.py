"""What a worker makes of an iterated dataset: draws, bad samples, ends, its own state. In this process, nothing is started."""

# Over 300 lines: the policies for bad samples, each on a stream.

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_dali.failures import BadSampleError
from lightning_dali.media import ClipSampler, MediaError
from lightning_dali.modalities import ImageModality
from lightning_dali.modalities.several import SeveralModality
from lightning_dali.modalities.video import VideoModality
from lightning_dali.proxies import ProxyImage, capture
from lightning_dali.streams import StreamFetcher
from lightning_dali.testing import make_images
from lightning_dali.wire import KnownBad
from tests.streams.engine import Dealt, Rank, Uneven, as_worker, rank_of


class Draws(Dealt):
    """A sample draws from all three generators; the order is drawn too, from a buffer as streams have it."""

    def __init__(self, n: int, buffer: int = 1) -> None:
        super().__init__(n)
        self.buffer = buffer

    def __iter__(self) -> Iterator[Any]:
        held: list[int] = []
        for number in super().__iter__():
            held.append(number)
            if len(held) == self.buffer:
                yield self.sample(held.pop(random.randrange(self.buffer)))
        yield from map(self.sample, held)

    def sample(self, number: int) -> Any:
        return number, random.random(), float(np.random.rand()), float(torch.rand(()))


def samples(rank: Rank, epoch: int = 0, **options: Any) -> list[tuple[float, ...]]:
    found = [
        list(zip(*(column.tolist() for column in one.batch[:4]), strict=True))
        for one in rank.requests(epoch, **options)
    ]
    return [sample for batch in found for sample in batch]


def test_draws_come_again_and_do_not_depend_on_workers() -> None:
    one = samples(rank_of(Draws(20), 3, 1, lengths=[20]))
    assert one == samples(rank_of(Draws(20), 3, 1)) != samples(rank_of(Draws(20), 3, 1), epoch=1)
    assert sorted(samples(rank_of(Draws(20), 4, 3))) == one == sorted(samples(rank_of(Draws(20), 2, 0)))
    assert len({value for sample in one for value in sample[1:]}) == 60


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_that_is_drawn_comes_again_after_a_skip(workers: int) -> None:
    whole = samples(rank_of(Draws(20, buffer=5), 3, workers))
    assert [number for number, *_ in whole] != sorted(number for number, *_ in whole)
    for start in range(1, 7):
        assert samples(rank_of(Draws(20, buffer=5), 3, workers), start=start, ahead=4) == whole[3 * start :]


def test_draws_of_the_datamodules_own_transform(paths: list[Path]) -> None:
    def drawn(workers: int, size: int = 2, **options: Any) -> list[Any]:
        rank = rank_of(Files(paths, set()), size, workers)
        for fetcher in rank.fetchers:
            fetcher.transform = lambda image: torch.rand(2)
        found = [
            list(zip(one.batch[1].tolist(), one.batch[0].tolist(), strict=True)) for one in rank.requests(**options)
        ]
        return [sample for batch in found for sample in batch]

    one = drawn(1)
    assert len({tuple(numbers) for _, numbers in one}) == len(one) == 8
    assert drawn(0) == one == drawn(1, size=3) and drawn(1, start=2) == one[4:] and drawn(1, epoch=1) != one


def test_the_process_with_no_workers_keeps_its_random_state() -> None:
    state = random.getstate()
    rank = rank_of(Draws(9, buffer=2), 2, 0)
    rank.fetchers[0].restore_rng = True
    list(rank.requests(start=2))
    assert random.getstate() == state


class Epochs(Dealt):
    """Says which epoch it was told, and which seed its worker has."""

    epoch = -1
    closed = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        try:
            for number in super().__iter__():
                yield number, self.epoch, -1 if info is None else info.seed % 1_000_003
        finally:
            self.closed += 1


def test_epochs_seeds_and_iterators_that_are_closed() -> None:
    dataset = Epochs(8)
    rank = rank_of(dataset, 2, 2)
    found = {epoch: list(rank.requests(epoch)) for epoch in (0, 3)}
    for epoch, requests in found.items():
        assert {value for one in requests for value in one.batch[1].tolist()} == {epoch}
    assert len({one.batch[2][0].item() for requests in found.values() for one in requests}) == 4
    dataset.closed = 0
    abandoned = rank.requests(0)
    next(abandoned), next(abandoned)
    assert dataset.closed == 0
    assert [one.batch[0].tolist() for one in rank.requests(1)] == [[0, 2], [1, 3], [4, 6], [5, 7]], (
        "the pass before left nothing"
    )
    assert dataset.closed == 4, "an abandoned iterator is closed by the next pass"
    fixed = rank_of(dataset, 2, 2, fixed_order=True)
    assert {value for one in fixed.requests(5) for value in one.batch[1].tolist()} == {0}


# -- bad samples -------------------------------------------------------------------------------------------------------


class Files(IterableDataset[Any]):
    """Paths; some lead nowhere."""

    def __init__(self, paths: list[Path], missing: set[int]) -> None:
        self.paths = [path.with_name("missing.png") if n in missing else path for n, path in enumerate(paths)]

    def __iter__(self) -> Iterator[Any]:
        yield from ((str(path), number) for number, path in enumerate(self.paths))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_images(tmp_path_factory.mktemp("images"), 8)


def read(paths: list[Path], missing: set[int], policy: str, size: int = 4) -> Rank:
    rank = rank_of(Files(paths, missing), size, 0, on_bad_sample=policy)
    rank.fetchers[0].transform = lambda image: image
    return rank


def labels(rank: Rank) -> list[list[int]]:
    return [one.batch[1].tolist() for one in rank.requests()]


def test_bad_samples_follow_the_policy(paths: list[Path]) -> None:
    with pytest.raises(BadSampleError, match=r"sample 2 \(.*missing.png\) on rank 0 in epoch 0"):
        labels(read(paths, {2}, "raise"))
    assert labels(read(paths, {2, 7}, "drop")) == [[0, 1, 3], [4, 5, 6]]
    replaced = labels(read(paths, {2, 7}, "replace"))
    assert [len(row) for row in replaced] == [4, 4] and replaced[0][2] in (0, 1, 3)
    assert replaced == labels(read(paths, {2, 7}, "replace"))
    (request, _) = read(paths, {2}, "drop").requests()
    assert [(one.dataset_index, one.epoch) for one in request.bad] == [(2, 0)]
    assert request.indices == (0, 1, 3)


def test_a_batch_of_nothing_but_bad_samples(paths: list[Path]) -> None:
    assert labels(read(paths, {4, 5}, "replace", size=2)) == [[0, 1], [2, 3], [3, 3], [6, 7]], (
        "the last good one before"
    )
    assert labels(read(paths, {0, 1, 2}, "drop", size=2)) == [[3], [4, 5], [6, 7]], (
        "the next good one, and no other twice"
    )
    with pytest.raises(BadSampleError, match="sample 0"):
        labels(read(paths, set(range(8)), "drop", size=2))


def test_what_the_device_cannot_decode_is_made_again_from_what_was_kept(paths: list[Path]) -> None:
    rank = read(paths, set(), "drop", size=2)
    first, second, third = take(rank.requests(keep=2), 3)
    for request, bad in ((second, 2), (third, 5)):
        again = rank.fetchers[0](KnownBad(request.task, ((bad, "broken", None),)))
        assert again.batch[1].tolist() == request.batch[1].tolist(), "PIL could decode it: its pixels travel"
        assert again.lanes[0].data[bad % 2].tobytes() != request.lanes[0].data[bad % 2].tobytes()
    with pytest.raises(RuntimeError, match="not kept any more"):
        rank.fetchers[0](KnownBad(first.task, ((0, "broken", None),)))


def take(items: Iterator[Any], count: int) -> list[Any]:
    return [next(items) for _ in range(count)]


class Undecodable(ImageModality):
    def settle(self, proxy: Any) -> None:
        raise MediaError("nor can PIL")


def test_what_nobody_can_decode_is_bad(paths: list[Path]) -> None:
    rank = read(paths, set(), "drop", size=2)
    rank.fetchers[0].modality = Undecodable()
    (request,) = take(rank.requests(), 1)
    again = rank.fetchers[0](KnownBad(request.task, ((1, "broken", "some.png"),)))
    assert again.batch[1].tolist() == [0]
    assert [(one.dataset_index, one.path, one.reason) for one in again.bad] == [(1, "some.png", "broken")]


TOLD = "from the dataset's own iterator, for sample 3 of the stream, rank 0, epoch 0"


class Breaks(IterableDataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise self.error


@pytest.mark.parametrize("policy", ["raise", "replace"])
@pytest.mark.parametrize("error", [ValueError("no more"), OSError("no more"), MediaError("no more")])
def test_an_iterator_that_raises_has_ended(policy: str, error: Exception) -> None:
    rank = rank_of(Breaks(error), 2, 0, on_bad_sample=policy)
    requests = rank.requests()
    assert next(requests).batch[0].tolist() == [0, 1]
    with pytest.raises(type(error), match="no more") as caught:
        next(requests)
    assert any(TOLD in note for note in getattr(caught.value, "__notes__", [TOLD]))
    assert next(rank.requests(1)).batch[0].tolist() == [0, 1], "the next pass begins anew"


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class Pictures(IterableDataset[Any]):
    """Opens its files; `insists` on what a stand-in is not."""

    def __init__(self, paths: list[Path], insists_from: int | None = None) -> None:
        self.paths, self.insists_from, self.opened = paths, insists_from, 0

    def __iter__(self) -> Iterator[Any]:
        for number, path in enumerate(self.paths):
            self.opened += 1
            image = PIL.Image.open(path).convert("RGB")
            if self.insists_from is not None and number >= self.insists_from and isinstance(image, ProxyImage):
                raise TypeError("not a real image")
            yield image, number


def test_what_the_iterator_decodes_is_captured(paths: list[Path]) -> None:
    (request,) = take(rank_of(Pictures(paths), 4, 0).requests(), 1)
    assert [bytes(blob) for blob in request.lanes[0].data] == [path.read_bytes() for path in paths[:4]]
    assert not isinstance(PIL.Image.open(paths[0]), ProxyImage), "only while it runs"


def test_a_dataset_that_insists_on_real_images_gets_them_and_no_sample_twice(paths: list[Path]) -> None:
    rank = rank_of(Pictures(paths, insists_from=3), 2, 0)
    assert labels(rank) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rank.dataset.opened == 4 + 8, "three came again, with pixels"
    (request, *_) = rank.requests(1)
    assert ("sample", "TypeError: not a real image") in request.notes
    assert rank.dataset.opened == 20, "the next pass knows"


def test_of_several_kinds_only_one_is_given_up(paths: list[Path]) -> None:
    rank = rank_of(Pictures(paths, insists_from=1), 2, 0)
    (fetcher,) = rank.fetchers
    fetcher.modality = SeveralModality({"image": ImageModality(), "video": VideoModality(ClipSampler(2))})
    assert labels(rank) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert fetcher.modality.uncaptured == {"image"} and "not a real image" in fetcher._eager["image"]


# -- rests that travel -------------------------------------------------------------------------------------------------


def test_stand_ins_travel_in_rests(paths: list[Path]) -> None:
    class Shared(Pictures):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            for image, number in super().__iter__():
                if number % 2 == info.id:
                    yield image.transpose(PIL.Image.Transpose.ROTATE_90), number

    rank = rank_of(Shared(paths[:6]), 4, 2)
    (request, last) = rank.requests()
    assert request.batch[1].tolist() == [0, 2, 4, 1] and last.batch[1].tolist() == [3, 5]
    assert [bytes(blob) for blob in request.lanes[0].data] == [paths[n].read_bytes() for n in (0, 2, 4, 1)]
    with capture(), pytest.raises(TypeError, match="stays in its worker"):
        pickle.dumps(PIL.Image.open(paths[0]))


def test_a_rest_that_cannot_travel_stays_a_batch_of_its_own() -> None:
    class Unpicklable(Uneven):
        def __iter__(self) -> Iterator[Any]:
            for number in super().__iter__():
                yield number, lambda held=number: held

    def first(batch: list[Any]) -> Any:
        return (torch.tensor([number for number, _ in batch]),)

    rank = rank_of(Unpicklable([5, 3]), 2, 2, collate_fn=first)
    assert rank.batches(ahead=3) == [[0, 1], [100, 101], [2, 3], [4], [102]]
    assert rank_of(Unpicklable([5, 3]), 2, 2, collate_fn=first, drop_last=True).batches() == [
        [0, 1],
        [100, 101],
        [2, 3],
    ]


# -- its own state -----------------------------------------------------------------------------------------------------


class Stateful(Dealt):
    """Knows its place; counts what it has drawn. Its epoch is part of its order."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.place, self.epoch, self.drawn = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        mine = list(super().__iter__())
        while self.place < len(mine):
            self.drawn += 1
            number = mine[self.place]
            self.place += 1
            yield number + 1000 * self.epoch
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


def as_processes(rank: Rank) -> Rank:
    """Each worker with a dataset of its own, as in processes."""
    rank.fetchers = [pickle.loads(pickle.dumps(fetcher)) for fetcher in rank.fetchers]
    return rank


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_dataset_that_knows_its_place_is_put_there(workers: int) -> None:
    rank = as_processes(rank_of(Stateful(22), 2, workers))
    whole = list(rank.requests(2))
    assert whole[0].batch[0][0] == 2000
    for start in range(1, len(whole)):
        trail = whole[start - 1].task.after
        if trail.ended:
            continue  # it has to be passed one by one then, which test_turns does
        again = as_processes(rank_of(Stateful(22), 2, workers))
        rest = list(again.requests(2, start=start, states=trail.states, ahead=2))
        assert [one.batch[0].tolist() for one in rest] == [one.batch[0].tolist() for one in whole[start:]]
        assert [one.task.step for one in rest] == [one.task.step for one in whole[start:]]
        assert sum(fetcher.dataset.drawn for fetcher in again.fetchers) == 22 - 2 * start, "nothing was drawn again"
        assert len(again.batches(2)) == len(whole), "and the pass after that begins at the beginning"


def test_a_pass_begins_at_the_beginning_wherever_the_dataset_was_left() -> None:
    rank = as_processes(rank_of(Stateful(8), 2, 1))
    abandoned = rank.requests()
    next(abandoned), next(abandoned)
    assert rank.batches() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_state_that_cannot_be_read_is_replaced_by_passing(caplog: pytest.LogCaptureFixture) -> None:
    rank = as_processes(rank_of(Stateful(8), 2, 1))
    assert rank.batches(start=2, states={0: (4, {"place": "?", "epoch": 0})}) == [[4, 5], [6, 7]]
    assert "could not go on from its own state (TypeError" in caplog.messages[0]
    assert "its first 4 sample(s) are passed one by one" in caplog.messages[0]


def test_another_stream_than_the_one_that_is_continued_is_refused() -> None:
    trail = list(rank_of(Dealt(9), 2, 0).requests())[1].task.after
    assert rank_of(Dealt(9), 2, 0).batches(start=2, firsts=trail.firsts) == [[4, 5], [6, 7], [8]]

    class Other(Dealt):
        def __iter__(self) -> Iterator[int]:
            return map(lambda number: 8 - number, super().__iter__())

    with pytest.raises(ValueError, match="begins with other samples than in the run that is to be continued"):
        rank_of(Other(9), 2, 0).batches(start=2, firsts=trail.firsts)


def test_workers_know_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found: list[Any] = []

    class Asks(Dealt):
        def __iter__(self) -> Iterator[int]:
            found.append((os.environ.get("RANK"), os.environ.get("WORLD_SIZE")))
            return iter([1])

    dataset = Asks(1)
    for world_size in (2, 1):
        fetcher = StreamFetcher(dataset, ImageModality(), rank=world_size - 1, world_size=world_size)
        with as_worker(0, 1, dataset):
            list(fetcher.draw(samples=1, batches=1))
    assert found == [("1", "2"), (None, None)]
