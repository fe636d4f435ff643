"""A rank's share of a stream in one process: turns, and a fetcher for each worker. Nothing is started."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from lightning_dali.modalities import ImageModality
from lightning_dali.sampling import Shard, StreamPlan, StreamTask, stream_plan
from lightning_dali.streams import StreamEnd, StreamFetcher, Turns
from lightning_dali.wire import Request


class Dealt(IterableDataset[int]):
    """The numbers below `n`, dealt to the processes in turn."""

    def __init__(self, n: int, rank: int = 0, world_size: int = 1) -> None:
        self.n, self.rank, self.world_size = n, rank, world_size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(self.rank * workers + worker, self.n, self.world_size * workers)


class Uneven(IterableDataset[int]):
    """So many samples to each worker; sample `i` of worker `w` is `100 * w + i`."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        yield from range(100 * worker, 100 * worker + self.sizes[worker])


@contextmanager
def as_worker(number: int, workers: int, dataset: Any) -> Iterator[None]:
    """`get_worker_info()` answers as in a worker, whose variables of ranks are then put back."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=0, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = None
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class Rank:
    """One rank's workers."""

    def __init__(self, dataset: Any, plan: StreamPlan, **options: Any) -> None:
        self.dataset, self.plan = dataset, plan
        shared = {"rank": plan.shard.rank, "world_size": plan.shard.world_size, "seed": 5, "with_index": True}
        self.fetchers = [StreamFetcher(dataset, ImageModality(), **shared, **options) for _ in range(plan.workers)]

    def make(self, task: StreamTask) -> Any:
        assert task.worker is not None
        if not self.plan.num_workers:
            return self.fetchers[0](task)
        with as_worker(task.worker, self.plan.workers, self.dataset):
            return self.fetchers[task.worker](task)

    def requests(self, epoch: int = 0, *, ahead: int = 1, **options: Any) -> Iterator[Request]:
        """What a pass delivers when so many tasks are handed out before the first answer is looked at."""
        turns = Turns(self.plan, epoch, **options)
        under_way: deque[Any] = deque()
        while not turns.is_over:
            under_way.extend(self.make(task) for task in itertools.islice(turns, ahead - len(under_way)))
            if not under_way:
                turns.report()
                return
            value = under_way.popleft()
            if turns.take(value):
                yield value

    def batches(self, epoch: int = 0, **options: Any) -> list[list[int]]:
        """The samples of each batch."""
        return [request.batch[0].tolist() for request in self.requests(epoch, **options)]


def rank_of(dataset: Any, batch_size: int, workers: int, *, shard: Shard | None = None, **options: Any) -> Rank:
    """One rank; `lengths` and the rest as in `stream_plan`."""
    fetching = {name: options.pop(name) for name in ("on_bad_sample", "collate_fn") if name in options}
    settings: dict[str, Any] = {"lengths": [None], "drop_last": False, **options}
    plan = stream_plan(name="train", batch_size=batch_size, shard=shard or Shard(), num_workers=workers, **settings)
    return Rank(dataset, plan, **fetching)


def reference(sizes: list[int], size: int, *, drop_last: bool) -> list[list[int]]:
    """The batches of `Uneven`, by the rule in `sampling.streams`."""
    streams = [list(range(100 * worker, 100 * worker + count)) for worker, count in enumerate(sizes)]
    full = [[stream[i : i + size] for i in range(0, len(stream) - size + 1, size)] for stream in streams]
    batches = [batch for turn in itertools.zip_longest(*full) for batch in turn if batch is not None]
    rest = [number for stream in streams for number in stream[len(stream) - len(stream) % size :]]
    joined = [rest[i : i + size] for i in range(0, len(rest), size)]
    return batches + [batch for batch in joined if len(batch) == size or not drop_last]


__all__ = ["Dealt", "Rank", "StreamEnd", "Uneven", "as_worker", "rank_of", "reference"]
