"""A pass: one iteration over a loader, with its own requests in flight, its own bounded queue and its own end.

Runs in the rank: `Pass.__next__` in the consumer's thread, `_serve` in the server's. Dropping a pass, breaking out of it or
closing it ends it at once, and waits until its thread has given back what it had borrowed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

from lightning_dali.delivery import Delivered, wait_for
from lightning_dali.environment import cores, limit_torch_threads
from lightning_dali.server import Driver, Server, Source

logger = logging.getLogger(__name__)

_live_passes: weakref.WeakSet[Pass] = weakref.WeakSet()


class _Channel:
    """A bounded queue between the server's thread and the consumer that either side can end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.items: deque[Delivered] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.ended = False
        self.error: BaseException | None = None

    def put(self, item: Delivered) -> None:
        with self.changed:
            while len(self.items) >= self.size and not self.closed:
                self.changed.wait()
            if not self.closed:
                self.items.append(item)
                self.changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()


class Pass:
    """One iteration over a loader. Dropping it, or `close`, ends it at once.

    Args:
        server: Whose executors it borrows.
        source: Where its requests come from.
        threaded: Whether a thread works ahead of the consumer; without one everything happens in `__next__`.
        watchdog_seconds: After so long without a batch it says in the log what it waits for.
    """

    def __init__(self, server: Server, source: Source, *, threaded: bool, watchdog_seconds: float = 60.0) -> None:
        self._source, self._watchdog_seconds = source, watchdog_seconds
        self._channel = _Channel(server.queue)
        self._owner = os.getpid()
        channel = self._channel
        self.waited_seconds = 0.0
        if threaded:
            self._thread: threading.Thread | None = threading.Thread(
                target=_serve, args=(server, source, channel), name="lightning_dali_server", daemon=True
            )
            self._inline: Iterator[Delivered] | None = None
            self._thread.start()
            self._finalizer = weakref.finalize(self, _stop, self._owner, channel, source, self._thread, None)
        else:
            self._thread = None
            driver = Driver(server, source, lambda: channel.closed)
            self._inline = driver.batches()
            self._finalizer = weakref.finalize(self, _stop, self._owner, channel, source, None, driver)
        _live_passes.add(self)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Delivered:
        start = time.perf_counter()
        try:
            delivered = self._next_inline() if self._inline is not None else self._next_threaded()
        except BaseException:
            self.close()
            raise
        self.waited_seconds = time.perf_counter() - start
        wait_for(delivered)
        return delivered

    def _next_inline(self) -> Delivered:
        assert self._inline is not None
        return next(self._inline)

    def _next_threaded(self) -> Delivered:
        channel, start, warned = self._channel, time.monotonic(), False
        with channel.changed:
            while True:
                if channel.items:
                    item = channel.items.popleft()
                    channel.changed.notify_all()
                    return item
                if channel.error is not None:
                    error, channel.error = channel.error, None
                    raise error
                if channel.ended or channel.closed:
                    raise StopIteration
                if self._thread is not None and not self._thread.is_alive():
                    raise RuntimeError("the server's thread is gone without a word; please report this")
                channel.changed.wait(1.0)
                waited = time.monotonic() - start
                if waited > self._watchdog_seconds and not warned:
                    warned = True
                    logger.warning("waiting for a batch for %.0f s: %s", waited, self._source.state())

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._finalizer.alive

    @property
    def ready(self) -> int:
        """Finished batches that wait for the consumer."""
        return len(self._channel.items)

    def close(self) -> None:
        """Ends the pass at once; safe to call twice."""
        self._finalizer()


def _stop(
    owner: int, channel: _Channel, source: Source, thread: threading.Thread | None, driver: Driver | None
) -> None:
    if os.getpid() != owner:
        return  # in a fork of the rank's process: neither the thread nor the workers are there
    channel.close()
    if driver is not None:
        driver.close()
        return
    source.wake()
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(30)


def _serve(server: Server, source: Source, channel: _Channel) -> None:
    """The server's thread."""
    driver: Driver | None = None
    error: BaseException | None = None
    try:
        if server.device.index is None:
            # Beside DALI, workers and a model on the same cores, a second thread is one to wait for, and torch's wait by
            # spinning: RandAugment on two cores came to a stop.
            limit_torch_threads(max(1, cores() // 4))
        driver = Driver(server, source, lambda: channel.closed)
        for delivered in driver.batches():
            channel.put(delivered)
            if channel.closed:
                break
            del delivered
    except BaseException as caught:
        error = caught
    try:
        (driver or source).close()
    except BaseException as caught:
        error = error or caught
    channel.end(error)
    del error  # its traceback holds this frame: a cycle, with all that the driver holds


def close_all() -> None:
    """Ends every pass of this process."""
    for one in list(_live_passes):
        if one._owner == os.getpid():
            one.close()


atexit.register(close_all)
with contextlib.suppress(Exception):
    # DALI is imported after this module, so that its exit handler runs before ours: it shuts pipelines down under a running
    # pass (and its assertion fails, DALI 2.4). What `concurrent.futures` uses runs before them all.
    threading._register_atexit(close_all)  # type: ignore[attr-defined]  # private: not in the stubs
