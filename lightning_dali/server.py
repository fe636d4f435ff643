"""The DALI proxy server of one rank and stage: executors, and the driver that runs a pass's requests through them.

Runs in the rank. A `Server` owns the built graphs; a pass (`passes.py`) borrows a set of them. Results follow their requests
through first-in-first-out queues; nothing is looked up by a number, so an abandoned pass cannot leave anything that a later
one could mistake for its own.
"""

# Over 300 lines: what a driver does when DALI fails belongs beside what it does when DALI does not.

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

from lightning_dali.delivery import Delivered, assemble, to_device
from lightning_dali.failures import BadSample
from lightning_dali.graph.spec import Device, Executor, LaneSpec
from lightning_dali.memory import give_back
from lightning_dali.wire import KnownBad, Lane, Request
from lightning_dali.worker import Failure
from lightning_dali.workers import Packed

logger = logging.getLogger(__name__)

MAX_EXECUTORS = 8
"""Graphs kept at a time; the one unused longest is closed for a new one."""


class Source(Protocol):
    """Where a pass gets its requests; see `loader`."""

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None: ...
    def redo(self, task: KnownBad, *, stop: Callable[[], bool]) -> Packed | None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...
    def state(self) -> str: ...


class Executors:
    """Built graphs, by what they serve. Used by one pass at a time."""

    def __init__(self, device: Device, max_batch_size: int, *, expected: list[LaneSpec]) -> None:
        self.device, self.max_batch_size = device, max_batch_size
        self._expected = expected
        self._stream: Any = None
        self._limit = MAX_EXECUTORS
        self._built: dict[LaneSpec, Executor] = {}
        self._changes = 0

    def get_all(self, lanes: list[Lane], *, busy: Callable[[Executor], bool]) -> list[Executor] | None:
        """The executors of one request's lanes; None when one must be rebuilt first and still has work (`busy`).

        What serves one lane may be rebuilt to serve the next as well, so they are asked for until the answer stays.
        """
        self._limit = max(self._limit, len(lanes))
        while True:
            before, found = self._changes, []
            for lane in lanes:
                executor = self.get(lane.spec, len(lane), busy=busy)
                if executor is None:
                    return None
                found.append(executor)
            if self._changes == before:  # none was built or closed for a later lane: all of them are there
                return found

    def get(self, spec: LaneSpec, rows: int, *, busy: Callable[[Executor], bool]) -> Executor | None:
        """The executor that serves `spec`; None when one must be rebuilt first and still has work (`busy`)."""
        if rows > self.max_batch_size:
            if any(busy(executor) for executor in self._built.values()):
                return None
            self.close()
            self.max_batch_size = rows
        serving = next((built for built in self._built if built.merge(spec) == built), None)
        if serving is not None:
            self._built[serving] = self._built.pop(serving)  # used last
            return self._built[serving]
        for built, executor in self._built.items():
            union = built.merge(spec)
            if union is not None:
                if busy(executor):
                    return None
                self._close(built)
                return self._build(union)
        if len(self._built) >= self._limit:
            oldest = next(iter(self._built))
            if busy(self._built[oldest]):
                return None
            self._close(oldest)
        return self._build(spec)

    def _build(self, spec: LaneSpec) -> Executor:
        for expected in self._expected:
            spec = expected.merge(spec) or spec
        executor = spec.build(self.device, max_batch_size=self.max_batch_size)
        self._built[spec] = executor
        self._changes += 1
        return executor

    def _close(self, spec: LaneSpec) -> None:
        self._changes += 1
        self._built.pop(spec).close()

    def stream(self) -> Any:
        """The CUDA stream of everything done here, None on the CPU; one for good, since torch caches memory by stream."""
        if self._stream is None:
            self._stream = _side_stream(self.device)
        return self._stream

    @property
    def specs(self) -> list[LaneSpec]:
        """What is built."""
        return list(self._built)

    def close(self) -> None:
        """Frees every graph."""
        while self._built:
            self._close(next(reversed(self._built)))


class Server:
    """Executors for one loader; a pass borrows a set of them, a second pass at the same time gets its own.

    Args:
        device: Where the graphs run.
        max_batch_size: Rows of a batch; grows if a batch has more.
        on_bad: Called with every bad sample, in the server's thread; may raise to end the run.
        queue: Finished batches that may wait for the consumer.
        keep: Whether graphs outlive the pass that used them.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_batch_size: int,
        on_bad: Callable[[BadSample], None] = lambda sample: None,
        queue: int = 1,
        keep: bool = True,
    ) -> None:
        self.device, self.max_batch_size, self.on_bad, self.queue = device, max_batch_size, on_bad, queue
        self._keep = keep
        self.specs: list[LaneSpec] = []
        self._idle: list[Executors] = []
        self._lock = threading.Lock()

    def expect(self, specs: list[LaneSpec]) -> None:
        """Remembers graphs that will be needed, so that they are built once, with every stage they will need."""
        # No lock: threads hold locks only where nothing is allocated, since the garbage collector may end a pass there
        # and then waits for that pass's thread. At worst a graph is built a second time.
        known = list(self.specs)
        for spec in specs:
            for number, one in enumerate(known):
                union = one.merge(spec)
                if union is not None:
                    known[number] = union
                    break
            else:
                known.append(spec)
        self.specs[:] = known

    def borrow(self) -> Executors:
        """A set of executors that nobody else uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Executors(self.device, self.max_batch_size, expected=self.specs)

    def give_back(self, executors: Executors) -> None:
        """Returns a drained set; one spare is kept."""
        self.expect(executors.specs)
        with self._lock:
            if self._keep and not self._idle:
                self._idle.append(executors)
                return
        executors.close()
        if not self._keep:
            give_back(self.device.index)

    @property
    def built(self) -> bool:
        """Whether an idle set of executors is kept."""
        return any(executors.specs for executors in self._idle)

    def release(self) -> None:
        """Frees the graphs; the next pass builds them again."""
        nothing: list[Executors] = []
        with self._lock:
            idle, self._idle = self._idle, nothing
        for executors in idle:
            executors.close()


class Driver:
    """Runs requests through executors, in order. Has no thread of its own; used by one at a time."""

    def __init__(self, server: Server, source: Source, stop: Callable[[], bool]) -> None:
        self._server, self._source, self._stop = server, source, stop
        self._executors = server.borrow()
        self._received: Packed | None = None
        """Not started yet."""
        self._later: BaseException | None = None
        """A failure that must wait until the batches before it are out."""
        self._ended = False
        self._flying: deque[tuple[Packed, list[Executor]]] = deque()
        """Inside DALI, oldest first."""
        self._using: list[Packed] = []
        """What the batch that is being finished looks into."""
        self._held: deque[tuple[Any, Packed]] = deque()
        """Slabs whose copies to the device may still run."""
        self._broken = False
        """Whether DALI failed: what was in flight is lost and must run again before anything new is started."""
        self._stream = self._executors.stream()

    def batches(self) -> Iterator[Delivered]:
        """Yields batches until the source ends or `stop()` is true."""
        while not self._stop():
            while not self._broken and len(self._flying) < self._server.device.depth and self._receive():
                if not self._start():
                    break
            if self._flying:
                yield self._finish()
            elif self._later is not None:
                error, self._later = self._later, None
                raise error
            elif self._ended:
                return

    def _receive(self) -> bool:
        """Whether there is a request to start; waits for one only if DALI has nothing to do."""
        if self._received is not None:
            return True
        if self._ended:
            return False
        try:
            packed = self._source.next(stop=self._stop, timeout=0.0 if self._flying else None)
        except TimeoutError:
            return False
        if packed is None:
            self._ended = True
        elif isinstance(packed.value, Failure):
            self._ended, self._later = True, packed.value.exception()
            packed.free()
        else:
            self._received = packed
        return self._received is not None

    def _start(self) -> bool:
        """Feeds the received request; False when a graph must be rebuilt first and is still in use."""
        assert self._received is not None
        request: Request = self._received.value
        flying = {id(executor) for _, used in self._flying for executor in used}
        executors = self._executors.get_all(request.lanes, busy=lambda one: id(one) in flying)
        if executors is None:
            return False
        packed, self._received = self._received, None
        try:
            with self._on_stream():
                for lane, executor in zip(request.lanes, executors, strict=True):
                    executor.feed(lane)
        except Exception as error:
            self._recover(error)
        self._flying.append((packed, executors))
        return True

    def _finish(self) -> Delivered:
        """Collects the oldest request."""
        packed, executors = self._flying.popleft()
        self._using = [packed]
        start = time.perf_counter()
        try:
            with self._on_stream():
                request, results = self._collect(packed.value, executors)
                batch = to_device(assemble(request.batch, results), self._server.device)
            for sample in request.bad:
                self._server.on_bad(sample)
        finally:
            event = self._hold(self._using)
        seconds = {**request.seconds, "decode": time.perf_counter() - start}
        return Delivered(batch, request.task, request.indices, event, seconds, packed.nbytes)

    def _collect(self, request: Request, executors: list[Executor]) -> tuple[Request, list[Any]]:
        """The results of a request's lanes; where DALI cannot decode one, those of the request that replaces it."""
        if not self._broken:
            try:
                return request, [e.collect(lane) for e, lane in zip(executors, request.lanes, strict=True)]
            except Exception as error:
                self._recover(error)
        request, results = self._rerun(request)
        self._broken = bool(self._flying)
        return request, results

    def _on_stream(self) -> Any:
        if self._stream is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def _hold(self, used: list[Packed]) -> Any:
        """Gives slabs back once nothing on the device reads them any more; returns the event of that."""
        event = None if self._stream is None else self._stream.record_event()
        self._held.extend((event, packed) for packed in used)
        while self._held and (self._held[0][0] is None or len(self._held) > 2 or self._held[0][0].query()):
            waited, old = self._held.popleft()
            if waited is not None:
                waited.synchronize()
            old.free()
        return event

    # -- when DALI fails

    def _recover(self, error: Exception) -> None:
        """A pipeline that raised is unusable, with everything that was in it."""
        logger.debug("rebuilding after: %s", _short(error))  # words: the error itself would keep the batch alive
        self._executors.close()
        self._broken = True

    def _rerun(self, request: Request) -> tuple[Request, list[Any]]:
        """Runs a request again, in parts until the offenders are known, and without them at last.

        Who comes in for them may be no better, so it goes on as long as it learns something.
        """
        known: dict[int, tuple[int, str, str | None]] = {}
        while True:
            try:
                return request, self._run_alone(request.lanes)
            except Exception:
                new = {one[0]: one for one in self._offenders(request) if one[0] not in known}
                if not new:
                    raise
            known.update(new)
            again = self._source.redo(KnownBad(request.task, tuple(known.values())), stop=self._stop)
            if again is None:
                raise _Stopped
            self._using.append(again)
            if isinstance(again.value, Failure):
                raise again.value.exception() from None
            request = again.value

    def _run_alone(self, lanes: list[Lane]) -> list[Any]:
        """Runs lanes while nothing else is in flight."""
        try:
            results = []
            for lane in lanes:
                executor = self._executors.get(lane.spec, len(lane), busy=lambda _: False)
                assert executor is not None
                executor.feed(lane)
                results.append(executor.collect(lane))
            return results
        except Exception:
            self._executors.close()
            raise

    def _offenders(self, request: Request) -> list[tuple[int, str, str | None]]:
        found: dict[int, tuple[int, str, str | None]] = {}
        for lane in request.lanes:
            for row, reason in self._bad_rows(lane, list(range(len(lane)))):
                found[lane.indices[row]] = (lane.indices[row], reason, lane.paths[row])
        return list(found.values())

    def _bad_rows(self, lane: Lane, rows: list[int]) -> list[tuple[int, str]]:
        """Halves a lane until the rows that fail are alone."""
        try:
            self._run_alone([lane.select(rows)])
        except Exception as error:
            if len(rows) == 1:
                return [(rows[0], _short(error))]
            middle = len(rows) // 2
            return self._bad_rows(lane, rows[:middle]) + self._bad_rows(lane, rows[middle:])
        return []

    def close(self) -> None:
        """Empties DALI, gives slabs and executors back."""
        try:
            if not self._broken:
                with self._on_stream():
                    for packed, executors in self._flying:
                        for executor, lane in zip(executors, packed.value.lanes, strict=True):
                            executor.collect(lane)
        except Exception as error:
            self._recover(error)
        if self._broken:
            self._executors.close()
        self._hold([*(packed for packed, _ in self._flying), *filter(None, [self._received])])
        for event, packed in self._held:
            if event is not None:
                event.synchronize()
            packed.free()
        for queue in (self._flying, self._held):
            queue.clear()
        self._received = None
        self._source.close()
        self._server.give_back(self._executors)


class _Stopped(Exception):
    """The pass was ended while a batch was being made again."""


def _short(error: Exception) -> str:
    """DALI's own words, without its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if "Assert" in line or "rror" in line or "ailed" in line or "not supported" in line
    ]
    return (telling or lines or [type(error).__name__])[-1][:300]


def _side_stream(device: Device) -> Any:
    if device.index is None:
        return None
    import torch

    torch.cuda.set_device(device.index)
    return torch.cuda.Stream(device.index)
