"""The iterable that Lightning sees: batches on the rank's device.

Runs in the rank. A `Loader` is cheap until it is iterated; it owns its worker pool and its server.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_dali.failures import BadSample
from lightning_dali.fetch import Fetcher
from lightning_dali.graph.spec import Device
from lightning_dali.sampling import BatchPlan, BatchTask
from lightning_dali.server import Delivered, Pass, Server
from lightning_dali.wire import KnownBad, Request
from lightning_dali.workers import Failure, Packed, Stream, WorkerPool

logger = logging.getLogger(__name__)


class PoolSource:
    """Requests from worker processes, for one pass."""

    def __init__(
        self, pool: WorkerPool, tasks: Iterator[BatchTask], *, ahead: int, keep_pool: Callable[[], bool]
    ) -> None:
        self._pool, self._keep_pool = pool, keep_pool
        self._stream: Stream = pool.stream(tasks, ahead=ahead)

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        """See `Stream.next`."""
        return self._stream.next(stop=stop, timeout=timeout)

    def redo(self, task: KnownBad) -> Packed:
        """Makes one batch again, before what is still to come."""
        return self._stream.redo(task)

    def wake(self) -> None:
        """Ends a wait in `next`."""
        self._pool.wake()

    def state(self) -> str:
        """What is being waited for, in words."""
        return self._pool.state()

    def close(self) -> None:
        """Gives back what was not used; ends the workers unless they are kept."""
        self._stream.close()
        if not self._keep_pool():
            self._pool.close()


class InlineSource:
    """Requests made in the consumer's own thread: `num_workers=0`."""

    def __init__(self, fetcher: Fetcher, tasks: Iterator[BatchTask]) -> None:
        self._fetcher, self._tasks = fetcher, tasks

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        """The next request, or None."""
        task = next(self._tasks, None)
        return None if task is None or stop() else Packed(self._make(task))

    def _make(self, task: Any) -> Any:
        try:
            return self._fetcher(task)
        except Exception as error:
            return Failure.here(error)

    def redo(self, task: KnownBad) -> Packed:
        """Makes one batch again."""
        return Packed(self._make(task))

    def wake(self) -> None: ...

    def state(self) -> str:
        """What is being waited for."""
        return "the dataset, in this process (num_workers=0)"

    def close(self) -> None: ...


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
        release_each_pass: Whether graphs are freed when a pass ends.
        watchdog_seconds: See `Pass`.
        name: For messages.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        plan: BatchPlan,
        device: Device,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        context: str | None = None,
        persistent_workers: bool = True,
        on_bad: Callable[[BadSample], None] = lambda sample: None,
        batch_transform: Callable[[Any, BatchTask], Any] | None = None,
        before_start: Callable[[], None] = lambda: None,
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
        self._lock = threading.Lock()
        self._epoch: int | None = None
        self._next_epoch = 0
        self._start = 0
        self._passes: weakref.WeakSet[LoaderPass] = weakref.WeakSet()
        self._current: weakref.ref[LoaderPass] | None = None

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
    def sampler(self) -> Loader:
        """Lightning sets the epoch on `loader.sampler`: that is the loader itself."""
        return self

    def __len__(self) -> int:
        """Batches of a full pass on this rank."""
        return len(self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next pass: its order and its draws."""
        if self._start and epoch != self._next_epoch:
            self._start = 0  # a position belongs to the epoch it was taken in
        self._epoch = self._next_epoch = epoch

    batch_sampler = None
    """Lightning looks for one; the order is the plan's."""

    def __iter__(self) -> LoaderPass:
        """A pass that starts at its first batch: Lightning makes an iterator of every loader just to see if it can."""
        return LoaderPass(self)

    def begin(self, one: LoaderPass) -> tuple[int, int]:
        """Gives a pass that starts now its epoch and the global sample to start at."""
        epoch, start = self._next_epoch, self._start
        self._start = 0
        self._next_epoch = epoch if self._epoch is not None else epoch + 1
        self._passes.add(one)
        self._current = weakref.ref(one)
        return epoch, start

    def state_dict(self) -> dict[str, Any]:
        """Where the current pass stands: the epoch and the number of global samples consumed."""
        one = self._current() if self._current is not None else None
        if one is None:
            return {"epoch": self._next_epoch, "samples": self._start, **self._identity()}
        return {"epoch": one.epoch, "samples": one.position, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {"num_samples": self.plan.num_samples, "seed": self.fetcher.seed, "unit": self.plan.position_unit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken: the next pass starts there. Nothing is decoded to get there.

        Raises:
            ValueError: The dataset has another length than the one the state was taken on.
        """
        if state.get("num_samples", self.plan.num_samples) != self.plan.num_samples:
            raise ValueError(
                f"the checkpoint's {self.name} position was taken in a dataset of {state['num_samples']} samples, this one "
                f"has {self.plan.num_samples}: the order cannot be continued. Resume with the same dataset, or load only "
                "the weights."
            )
        if state.get("seed", self.fetcher.seed) != self.fetcher.seed:
            raise ValueError(
                f"the checkpoint's {self.name} position was taken with seed {state['seed']}, this run has seed "
                f"{self.fetcher.seed}: the order would be another one. Pass seed={state['seed']} to the datamodule."
            )
        if state.get("unit", self.plan.position_unit) != self.plan.position_unit:
            raise ValueError(
                f"the checkpoint's {self.name} position counts {state['unit']}, this loader counts {self.plan.position_unit}: "
                "resume with the same kind of sampler, or load only the weights."
            )
        self._next_epoch, self._start = int(state["epoch"]), int(state["samples"])
        self._epoch = self._next_epoch if self._epoch is not None else None
        if self.plan.num_steps(start=self._start) == 0:  # taken at the end of an epoch
            self._next_epoch, self._start = self._next_epoch + 1, 0
        self._current = None

    # -- passes

    def source(self, epoch: int, start: int) -> Any:
        """Where a new pass gets its requests."""
        tasks = self.plan.batches(epoch, start=start)
        if not self.num_workers:
            return InlineSource(self.fetcher, tasks)
        ahead = max(self.num_workers + 1, self.server.device.depth + self.server.queue)
        with self._lock:
            shared = self._persistent and not self._pool_busy
            if shared:
                self._pool_busy = True
        if not shared:
            pool = self._new_pool()
            self._before_start()
            pool.start()
            return PoolSource(pool, tasks, ahead=ahead, keep_pool=lambda: False)
        try:
            self._before_start()
            return PoolSource(self.start_workers(), tasks, ahead=ahead, keep_pool=self._return_pool)
        except BaseException:
            self._pool_busy = False
            raise

    def _return_pool(self) -> bool:
        self._pool_busy = False
        return True

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(self.fetcher, self.num_workers, context=self._context)

    def trace(self, *, samples: int = 2, draws: int = 4) -> Request | None:
        """Runs the dataset on stand-ins a few times in this process, to learn which graphs it needs.

        Returns:
            The last request, for `explain`; None when these samples could not be fetched (the pass will say why).
        """
        fetcher = replace(self.fetcher, restore_rng=True, on_bad_sample="raise", ragged="list", collate_fn=None)
        request = None
        for draw in range(draws):
            indices = tuple(range(min(samples, self.plan.num_samples)))
            try:
                request = fetcher(BatchTask(epoch=draw, step=0, indices=indices))
            except Exception as error:
                logger.debug("%s: tracing stopped: %s", self.name, error)
                break
            self.server.expect([lane.spec for lane in request.lanes])
        return request

    def start_workers(self) -> WorkerPool:
        """Starts the persistent workers if they are not there."""
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
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the persistent workers."""
        return [] if self._pool is None else self._pool.pids

    def __repr__(self) -> str:
        return (
            f"Loader({self.name}: {self.plan.num_samples} samples, {len(self)} batches of {self.batch_size}, "
            f"{self.num_workers} workers, {self.server.device.torch_device})"
        )


class LoaderPass:
    """One iteration over a `Loader`. Nothing is started before the first batch is asked for."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._plan, self._batch_transform = loader.plan, loader.batch_transform
        self.epoch, self._start, self._steps = 0, 0, 0
        self._pass: Pass | None = None
        self._closed = False
        self.last: Delivered | None = None

    def _begin(self) -> Pass:
        loader = self._loader
        self.epoch, self._start = loader.begin(self)
        source = loader.source(self.epoch, self._start)
        self._pass = Pass(
            loader.server, source, threaded=loader.num_workers > 0, watchdog_seconds=loader._watchdog_seconds
        )
        return self._pass

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        delivered = next(self._pass or self._begin())
        self._steps += 1
        batch, delivered.batch = delivered.batch, None
        self.last = delivered
        if self._batch_transform is not None:
            batch = self._batch_transform(batch, delivered.task)
        return batch

    def __len__(self) -> int:
        """Batches of this pass: fewer than the loader's when it was resumed."""
        return self._plan.num_steps(start=self._start)

    @property
    def position(self) -> int:
        """Global samples consumed in this epoch."""
        return self._plan.position(self._steps, start=self._start)

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
