"""Where a pass gets its requests: from worker processes, or made on the spot.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_dali.fetch import Fetcher
from lightning_dali.sampling import BatchTask
from lightning_dali.wire import KnownBad
from lightning_dali.worker import Failure
from lightning_dali.workers import Packed, Stream, WorkerPool


class PoolSource:
    """Requests from worker processes, for one pass.

    Args:
        pool: The workers; nobody else uses them meanwhile.
        stream: What they make for this pass.
        give_back: Called at the end with the stream that workers have begun for the next pass, if there is one.
        following: Makes that stream, once every task of this pass is handed out; None: there is to be none.
    """

    def __init__(
        self,
        pool: WorkerPool,
        stream: Stream,
        *,
        give_back: Callable[[Stream | None], None],
        following: Callable[[], Stream] | None = None,
    ) -> None:
        self._pool, self._stream = pool, stream
        self._give_back, self._following = give_back, following
        self._next: Stream | None = None

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        """See `Stream.next`."""
        if self._following is not None and self._next is None and self._stream.handed_out:
            self._next = self._following()
            self._stream.follow_with(self._next)
        return self._stream.next(stop=stop, timeout=timeout)

    def redo(self, task: KnownBad, *, stop: Callable[[], bool]) -> Packed | None:
        """Makes one batch again, before what is still to come."""
        return self._stream.redo(task, stop=stop)

    def wake(self) -> None:
        """Ends a wait in `next`."""
        self._pool.wake()

    def state(self) -> str:
        """What is being waited for, in words."""
        return self._pool.state()

    def close(self) -> None:
        """Gives back what was not used."""
        self._stream.close()
        self._give_back(self._next)


class InlineSource:
    """Requests made in the consumer's own thread: `num_workers=0`."""

    def __init__(self, fetcher: Fetcher, tasks: Iterator[BatchTask]) -> None:
        self._fetcher, self._tasks = fetcher, tasks

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        """The next request, or None."""
        task = next(self._tasks, None)
        return None if task is None or stop() else Packed(self._make(task))

    def redo(self, task: KnownBad, *, stop: Callable[[], bool]) -> Packed | None:
        """Makes one batch again."""
        return Packed(self._make(task))

    def _make(self, task: Any) -> Any:
        try:
            return self._fetcher(task)
        except Exception as error:
            return Failure.here(error)

    def wake(self) -> None:
        """Nobody waits: batches are made in the thread that asks for them."""

    def state(self) -> str:
        """What is being waited for."""
        return "the dataset, in this process (num_workers=0)"

    def close(self) -> None:
        """Nothing to end."""
