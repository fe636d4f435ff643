"""The iterable that Lightning sees: batches on the rank's device.

Runs in the rank. A `Loader` is cheap until it is iterated; it owns its worker pool and its server. Over 300 lines: a loader and
its pass are one contract with Lightning (epochs, positions, `len`), and half of it is small properties that Lightning and users read.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import SequentialSampler

from lightning_dali.delivery import Delivered
from lightning_dali.failures import BadSample
from lightning_dali.fetch import Fetcher
from lightning_dali.graph.spec import Device
from lightning_dali.passes import Pass
from lightning_dali.position import Position, load_position, save_position
from lightning_dali.sampling import BatchPlan, BatchTask, Plan, StreamPlan, StreamTask, TrainPlan
from lightning_dali.server import Server
from lightning_dali.sources import InlineSource, PoolSource
from lightning_dali.streams import StreamFetcher, StreamSource, Turns, set_epoch, told_state
from lightning_dali.throughput import Totals
from lightning_dali.wire import Request
from lightning_dali.workers import OUTSTANDING_PER_WORKER, Stream, WorkerPool

logger = logging.getLogger(__name__)


class Loader:
    """Batches of one dataset, on one rank's device.

    Args:
        fetcher: Makes requests out of tasks.
        plan: Which samples, in which order.
        device: Where graphs run.
        num_workers: Worker processes; 0 makes batches in the consumer's thread.
        prefetch: Finished batches that may wait for the consumer.
        context: Start method of the workers.
        persistent_workers: Whether workers outlive a pass.
        on_bad: Called with every bad sample.
        batch_transform: Applied to the finished batch on the device, `batch_transform(batch, task)`.
        before_start: Called before worker processes are started.
        on_epoch: Called after `set_epoch`.
        release_each_pass: Whether graphs are freed when a pass ends.
        watchdog_seconds: See `Pass`.
        name: For messages.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        plan: Plan,
        device: Device,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        context: str | None = None,
        persistent_workers: bool = True,
        on_bad: Callable[[BadSample], None] = lambda sample: None,
        batch_transform: Callable[[Any, BatchTask], Any] | None = None,
        before_start: Callable[[], None] = lambda: None,
        on_epoch: Callable[[Loader], None] = lambda loader: None,
        release_each_pass: bool = False,
        watchdog_seconds: float = 60.0,
        name: str = "train",
    ) -> None:
        self.name, self.plan, self.num_workers = name, plan, num_workers
        self.fetcher = fetcher if num_workers else replace(fetcher, restore_rng=True)
        self.batch_transform, self._before_start = batch_transform, before_start
        self._context, self._persistent = context, persistent_workers and num_workers > 0
        self._watchdog_seconds = watchdog_seconds
        self.server = Server(
            device, max_batch_size=max(1, plan.batch_size), on_bad=on_bad, queue=prefetch, keep=not release_each_pass
        )
        self._pool: WorkerPool | None = None
        self._pool_busy = False
        self._begun: tuple[WorkerPool, int, int, Stream] | None = None
        self._lock = threading.Lock()
        self.at = Position()
        self._told = False  # whether somebody sets the epochs; else each pass is an epoch
        self._on_epoch = on_epoch
        self._passes: weakref.WeakSet[LoaderPass] = weakref.WeakSet()
        self.totals = Totals()

    # -- what Lightning and users ask

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.fetcher.dataset

    @property
    def batch_size(self) -> int:
        """Rows of a full batch on this rank."""
        return self.plan.batch_size

    @property
    def sampler(self) -> EpochSetter:
        """Lightning sets the epoch on `loader.sampler`, and asks it whether the order is the dataset's."""
        return EpochSetter(self) if self.plan.shuffled else InOrder(self)

    batch_sampler: Any = None
    """Lightning looks for one; the order is the plan's."""

    def __len__(self) -> int:
        """Batches of a full pass on this rank; a TypeError where the dataset is a stream without a length."""
        return len(self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next pass: its order and its draws."""
        self._told = True
        if epoch != self.at.epoch:
            self.at = Position(epoch)  # a position belongs to the epoch it was taken in
        self._on_epoch(self)

    def __iter__(self) -> LoaderPass:
        """A pass that starts at its first batch: Lightning makes an iterator of every loader just to see if it can."""
        return LoaderPass(self)

    def begin(self, one: LoaderPass) -> Position:
        """Gives a pass that starts now its epoch and the global sample to start at."""
        if self.at.saved is not None and not self.at.begun:
            self._on_epoch(self)  # where there is no length, a trainer takes a batch before it tells the epoch
        at = self.at
        over = at.ended or (at.start > 0 and self.plan.is_over(at.start))
        if at.begun or (over and not self._told):
            self.at = Position(at.epoch if self._told else at.epoch + 1)
        self.at.begun = True
        self._passes.add(one)
        return self.at

    def peek(self) -> Any:
        """The batch that the next pass would begin with, or a running one began with; the position stays."""
        return self.look()[0]

    def look(self) -> tuple[Any, Delivered]:
        """The same, with what is known about it."""
        at, one = self.at, iter(self)
        self.at = replace(at, start=0 if at.begun else at.start, steps=0, begun=False, ended=False, saved=None)
        try:
            batch = next(one)
            assert one.last is not None
            return batch, one.last
        finally:
            one.close()
            self.at = at

    def state_dict(self) -> dict[str, Any]:
        """Where the last pass stands, also after it ended: the epoch and the number of global samples consumed."""
        return save_position(self.at, self.plan, seed=self.fetcher.seed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken: the next pass starts there. Nothing is decoded to get there.

        The number of ranks and workers and the batch size may have changed. `len` stays that of a full epoch.

        Raises:
            ValueError: The dataset, its order or the seed is another one, and the state was taken inside an epoch.
        """
        self.at = load_position(state, self.plan, seed=self.fetcher.seed, name=self.name)

    # -- passes

    def source(self, at: Position) -> Any:
        """Where a new pass gets its requests."""
        plan, fetcher = self.plan, self.fetcher
        if isinstance(plan, BatchPlan):
            return self._source(at.epoch, at.start, lambda: plan.batches(at.epoch, start=at.start))
        assert isinstance(plan, StreamPlan) and isinstance(fetcher, StreamFetcher)
        set_epoch(self.dataset, 0 if plan.fixed_order else at.epoch)
        turns = self._turns(plan, at)
        source = self._source(at.epoch, at.start, lambda: turns)
        return StreamSource(source, turns, on_close=lambda: fetcher.forget(turns.run))

    def _turns(self, plan: StreamPlan, at: Position) -> Turns:
        """The tasks of a pass over a stream: from the place that the dataset knows itself, or past what was consumed."""
        trail, states = at.trail(), None
        if at.start and trail is not None and not trail.ended:
            states = trail.states
            if states is None:
                told = told_state(
                    self.dataset, at.epoch, batches=at.start, batch_size=plan.batch_size, num_workers=plan.workers
                )
                states = None if told is None else plan.positions(at.start, told)
        return Turns(
            plan,
            at.epoch,
            name=self.name,
            start=at.start,
            over=at.ended,
            keep=-(-(self.ahead + self.server.device.depth) // plan.workers) + 1,  # what is under way, and itself
            states=states,
            firsts=at.trails[-1][1].firsts if at.start and at.trails else None,
        )

    def _source(self, epoch: int, start: int, tasks: Callable[[], Iterator[BatchTask]]) -> Any:
        if not self.num_workers:
            return InlineSource(self.fetcher, tasks())
        with self._lock:
            shared = self._persistent and not self._pool_busy
            if shared:
                self._pool_busy = True
        if not shared:
            pool = self._new_pool()
            self._before_start()
            pool.start()
            return PoolSource(pool, pool.stream(tasks(), ahead=self.ahead), give_back=lambda _: pool.close())
        try:
            self._before_start()
            pool = self._own_pool()
            return PoolSource(
                pool,
                self._begun_stream(pool, epoch, start) or pool.stream(tasks(), ahead=self.ahead),
                give_back=lambda following: self._return_pool(pool, epoch + 1, following),
                following=self._following(pool, epoch + 1),
            )
        except BaseException:
            self._pool_busy = False
            raise

    def _following(self, pool: WorkerPool, epoch: int) -> Callable[[], Stream] | None:
        """What workers begin with while the device finishes an epoch: the next one, in training, whose plan draws without
        touching the process's random state."""
        plan = self.plan
        return (lambda: pool.stream(plan.batches(epoch), ahead=self.ahead)) if isinstance(plan, TrainPlan) else None

    def _begun_stream(self, pool: WorkerPool, epoch: int, start: int) -> Stream | None:
        """What the workers have begun for just this pass; anything else that they have begun is dropped."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        if begun[:3] == (pool, epoch, start):
            return begun[3]
        begun[3].close()
        return None

    @property
    def ahead(self) -> int:
        """Requests that workers make or hold at a time.

        Two for each, so that none idles while the rank is busy with DALI, and a few that came out of turn: with fewer, 8
        workers gave two thirds of what they can (H200).
        """
        if not self.num_workers:
            return 1
        return OUTSTANDING_PER_WORKER * self.num_workers + self.server.device.depth

    def _return_pool(self, pool: WorkerPool, epoch: int, following: Stream | None) -> None:
        self._begun = None if following is None else (pool, epoch, 0, following)
        self._pool_busy = False

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(self.fetcher, self.num_workers, context=self._context)

    def trace(self, *, samples: int = 2, draws: int = 4) -> Request | None:
        """Runs the dataset on stand-ins a few times in this process, to learn which graphs it needs.

        Returns:
            The last request, for `explain`; None when these samples could not be fetched (the pass will say why).
        """
        request = None
        try:
            for request in self.draw(samples=samples, draws=draws):
                self.server.expect([lane.spec for lane in request.lanes])
        except Exception as error:
            logger.debug("%s: tracing stopped: %s", self.name, error)
        return request

    def draw(self, *, samples: int, draws: int) -> Iterator[Request]:
        """Requests for the first samples, made in this process from their headers, each with draws of its own."""
        fetcher = replace(self.fetcher, restore_rng=True, on_bad_sample="raise", ragged="list", collate_fn=None)
        if isinstance(fetcher, StreamFetcher):
            yield from fetcher.draw(samples=samples, batches=draws)
            return
        indices = tuple(range(min(samples, self.plan.num_samples or 0)))
        for epoch in range(draws):
            yield fetcher(BatchTask(epoch=epoch, step=0, indices=indices))

    def start_workers(self) -> None:
        """Starts the persistent workers if they are not there. Those that serve a pass are left alone, dead or alive."""
        if not self._pool_busy:
            self._own_pool()

    def _own_pool(self) -> WorkerPool:
        with self._lock:
            if self._pool is None or self._pool.broken:
                if self._pool is not None:
                    self._pool.close()
                self._pool = self._new_pool()
            self._pool.start()
            return self._pool

    @property
    def persistent(self) -> bool:
        """Whether it keeps worker processes between passes."""
        return self._persistent

    def stop(self) -> None:
        """Ends every pass."""
        for one in list(self._passes):
            one.close()

    def release(self) -> None:
        """Ends every pass and frees the graphs; workers stay."""
        self.stop()
        self.server.release()

    def close(self) -> None:
        """Ends passes, workers and graphs."""
        self.release()
        self._begun = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the persistent workers."""
        return [] if self._pool is None else self._pool.pids

    @property
    def context(self) -> str | None:
        """Start method of the workers; None: the platform's."""
        return self._context

    @property
    def slab_bytes(self) -> int:
        """Shared memory in which the persistent workers send batches."""
        return 0 if self._pool is None else self._pool.nbytes

    def __repr__(self) -> str:
        try:
            size = f"{self.plan.num_samples} samples, {len(self)} batches"
        except TypeError:  # a stream without a length
            size = "a stream, batches"
        return f"Loader({self.name}: {size} of {self.batch_size}, {self.num_workers} workers, {self.server.device.torch_device})"


class LoaderPass:
    """One iteration over a `Loader`. Nothing is started before the first batch is asked for."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._plan, self._batch_transform = loader.plan, loader.batch_transform
        self._at: Position | None = None
        self._pass: Pass | None = None
        self._closed = False
        self.last: Delivered | None = None

    def _begin(self) -> Pass:
        loader = self._loader
        self._at = loader.begin(self)
        source = loader.source(self._at)
        try:
            self._pass = Pass(
                loader.server, source, threaded=loader.num_workers > 0, watchdog_seconds=loader._watchdog_seconds
            )
        except BaseException:
            source.close()
            raise
        return self._pass

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        first, queued, start = self._pass is None, self.ready, time.perf_counter()
        try:
            delivered = next(self._pass or self._begin())
        except StopIteration:
            self._ended()
            raise
        assert self._at is not None
        self._loader.totals.add(
            samples=len(delivered.indices),
            waited_seconds=time.perf_counter() - start,
            first=first,
            queued=queued,
            nbytes=delivered.nbytes,
            seconds=delivered.seconds,
        )
        self._at.steps, self._at.indices = self._at.steps + 1, delivered.indices
        if isinstance(delivered.task, StreamTask):
            self._at.note(self._at.start + self._at.steps, delivered.task.after)
        batch, delivered.batch = delivered.batch, None
        self.last = delivered
        if self._batch_transform is not None:
            batch = self._batch_transform(batch, delivered.task)
        return batch

    def _ended(self) -> None:
        """The pass gave all there was; not one that was closed, whose end says nothing."""
        if self._at is not None and not self._closed:
            self._at.ended = True

    def __len__(self) -> int:
        """Batches of this pass: fewer than the loader's when it was resumed."""
        at = self._at or self._loader.at
        return self._plan.num_steps(start=at.start if at is self._at or not at.begun else 0)

    @property
    def waited_seconds(self) -> float:
        """How long the last batch was waited for."""
        return 0.0 if self._pass is None else self._pass.waited_seconds

    @property
    def ready(self) -> int:
        """Finished batches in the queue."""
        return 0 if self._pass is None else self._pass.ready

    def close(self) -> None:
        """Ends the pass at once."""
        self._closed = True
        if self._pass is not None:
            self._pass.close()


class EpochSetter:
    """A loader's `sampler` in Lightning's eyes."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)


class InOrder(EpochSetter, SequentialSampler):
    """The same for an order that is the dataset's, so that Lightning does not turn shuffling off (`overfit_batches`)."""

    def __init__(self, loader: Loader) -> None:
        SequentialSampler.__init__(self, loader.dataset)
        EpochSetter.__init__(self, loader)
