"""The worker pool: processes that turn a `BatchTask` into a packed batch.

Runs in the rank; `worker.py` is what each process runs. Why not `torch.utils.data.DataLoader`'s workers: a pass must be
abandoned at once and without a trace, a killed worker must be noticed at once and must not hold a lock that the others
need, and shared memory should be used again instead of mapped anew for each batch.

- Each worker has one socket of its own. There is no shared queue and no lock between processes.
- A worker ends when its socket closes or its rank's process ends, whichever it sees first.
"""

# Over 300 lines: the pool and its streams are one protocol, and apart neither could be read.

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.reduction
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from multiprocessing.forkserver import _forkserver  # what the user chose to preload
from typing import Any

from lightning_dali.sampling import BatchTask
from lightning_dali.wire import read
from lightning_dali.worker import Answer, work

OUTSTANDING_PER_WORKER = 2
"""Tasks a worker holds at a time: one in work, one waiting so that it never idles."""
LARGE_TASK = 4096
"""Indices. So large a task waits until its worker is at rest: a socket holds some 200 KB, and if the rank blocked while it
writes a task and the worker while it writes a batch, neither would ever read."""

_rank_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
"""The rank's ends, so that a forked worker closes those it inherited."""


class WorkerError(RuntimeError):
    """A worker process died."""


@dataclass(eq=False)
class _Worker:
    process: Any
    socket: Any
    number: int
    tasks: dict[int, BatchTask] = field(default_factory=dict)
    slabs: dict[int, mmap.mmap] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)
    """Tickets of an abandoned pass that it has not answered; it hears of them with its next task."""

    def indices(self) -> list[int]:
        """Of all its tasks; none where the dataset is iterated."""
        return [index for task in list(self.tasks.values()) for index in task.indices]

    def death(self) -> WorkerError:
        """Why it is gone, in words."""
        self.process.join(1)
        indices = self.indices()
        doing = f" while fetching dataset indices {indices[:16]}{'...' if len(indices) > 16 else ''}" if indices else ""
        if self.tasks and not indices:
            doing = " while iterating over the dataset"
        return WorkerError(
            f"worker {self.number} (pid {self.process.pid}) died with {_how(self.process.exitcode)}{doing}. "
            "The next pass starts new workers."
        )


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = str(-code)
    memory = " (the system kills processes so when memory runs out: try fewer workers or smaller batches)"
    return f"signal {name}{memory if name == 'SIGKILL' else ''}"


class Packed:
    """A batch that came from a worker; its arrays look into a slab until `free`.

    Args:
        value: What the worker made.
        freed: Called once when the slab may be used again.
        nbytes: Of the slab.
    """

    def __init__(self, value: Any, freed: Callable[[], None] | None = None, *, nbytes: int = 0) -> None:
        self.value, self._freed, self.nbytes = value, freed, nbytes

    def free(self) -> None:
        """Gives the slab back; safe to call twice."""
        freed, self._freed = self._freed, None
        if freed is not None:
            freed()


class _Alarm:
    """Wakes a thread that waits for sockets. A descriptor of its own, and never used again once it is closed."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a pass, and so ring, inside of it
        self._open = True

    def ring(self) -> None:
        """Makes the descriptor readable."""
        with self._lock:  # after `close` the number may be another file's
            if self._open:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Takes note."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Safe to call twice."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.descriptor)


class WorkerPool:
    """Worker processes that serve one pass at a time.

    Args:
        make: Turns a task into the value to send; pickled to the workers unless they are forked.
        num_workers: At least one.
        context: A multiprocessing start method, or None for the platform's.
    """

    def __init__(self, make: Callable[[Any], Any], num_workers: int, *, context: str | None = None) -> None:
        self.num_workers = num_workers
        self._make = make
        self._context = mp.get_context(context)
        self._workers: list[_Worker] = []
        self._tickets = 0
        self._alarm = _Alarm()
        self._finalizer = weakref.finalize(self, _end, self._workers, self._alarm, os.getpid())
        # Workers ignore SIGTERM, and multiprocessing sends it to children at the end of a process and then waits for them.
        # What has a priority runs before that, also where the rank is itself such a child (`ddp_spawn`): there is no atexit.
        mp.util.Finalize(self, _end, (self._workers, self._alarm, os.getpid()), exitpriority=10)

    @property
    def started(self) -> bool:
        """Whether the processes exist."""
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Starts the processes, if they are not there yet.

        Raises:
            TypeError: The dataset, a transform or the collate function cannot be sent to a process that is not forked.
        """
        if self._workers:
            return
        _preload(self._context)
        try:
            for number in range(self.num_workers):
                self._workers.append(self._start_one(number))
        except BaseException:
            _end(self._workers, None, os.getpid())
            raise

    def _start_one(self, number: int) -> _Worker:
        mine, theirs = self._context.Pipe(duplex=True)
        method = self._context.get_start_method()
        others = [socket for socket in (*_rank_sockets, mine) if not socket.closed] if method == "fork" else []
        process = self._context.Process(  # type: ignore[attr-defined]  # every context has it, not their base
            target=work,
            args=(theirs, others, os.getpid(), number, self.num_workers, self._make),
            name=f"lightning_dali_worker_{number}",
            daemon=True,
        )
        try:
            with _no_garbage_collection():
                process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            mine.close()
            raise TypeError(
                f"the dataset, its transforms or the collate_fn cannot be sent to a worker that is started with {method!r}: "
                f"{error}. Define functions and classes at the top of a module instead of as lambdas or inside functions, "
                "or pass multiprocessing_context='fork' or num_workers=0."
            ) from error
        finally:
            theirs.close()
        _rank_sockets.add(mine)
        return _Worker(process, mine, number)

    def stream(self, tasks: Iterator[BatchTask], *, ahead: int) -> Stream:
        """The batches of `tasks`, in order, made by the workers; `ahead` of them at most at a time."""
        self.start()
        return Stream(self, tasks, ahead)

    def wake(self) -> None:
        """Makes a `Stream.next` that waits in another thread return."""
        self._alarm.ring()

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        self._finalizer()

    @property
    def broken(self) -> bool:
        """Whether a process has died, or the pool was closed."""
        return not self._finalizer.alive or any(not worker.process.is_alive() for worker in self._workers)

    def state(self) -> str:
        """What each worker is doing, in words."""
        busy = []
        for worker in [one for one in list(self._workers) if one.tasks]:
            indices = worker.indices()
            has = f"dataset indices {indices[:8]}" if indices else "the next samples of its iterator to get"
            busy.append(f"worker {worker.number} (pid {worker.process.pid}) has {has}")
        return "; ".join(busy) or "no worker has anything to do: the server is decoding"

    @property
    def nbytes(self) -> int:
        """Shared memory held by slabs, in bytes."""
        return sum(len(slab) for worker in self._workers for slab in list(worker.slabs.values()))

    # -- used by Stream, in one thread at a time

    def new_ticket(self) -> int:
        """A number that no other task of this pool has."""
        self._tickets += 1
        return self._tickets

    def send(self, worker: _Worker, ticket: int, task: BatchTask) -> None:
        """Gives a worker a task."""
        freed, worker.freed = worker.freed, []
        worker.tasks[ticket] = task
        try:
            worker.socket.send_bytes(pickle.dumps((ticket, task, freed, tuple(worker.unwanted))))
        except OSError:
            raise worker.death() from None

    def wait(self, timeout: float) -> Iterator[tuple[int, Packed]]:
        """Yields (ticket, batch) for what has arrived; waits up to `timeout` seconds for something."""
        by_socket = {worker.socket: worker for worker in self._workers}
        sentinels = {worker.process.sentinel: worker for worker in self._workers}
        ready = multiprocessing.connection.wait([*by_socket, *sentinels, self._alarm.descriptor], timeout)
        for item in ready:
            if item in by_socket:
                worker = by_socket[item]
                try:
                    received = self._receive(worker)
                except (EOFError, OSError):
                    raise worker.death() from None
                yield received
        for item in ready:
            if item == self._alarm.descriptor:
                self._alarm.clear()
            elif item in sentinels and sentinels[item].socket not in ready:
                raise sentinels[item].death()
        if not ready:  # socket and sentinel stay silent if a process that the dataset forked has them too
            for worker in self._workers:
                if not worker.process.is_alive():
                    raise worker.death()

    def _receive(self, worker: _Worker) -> tuple[int, Packed]:
        answer: Answer = pickle.loads(worker.socket.recv_bytes())
        message = worker.socket.recv_bytes()
        for number in answer.dropped:
            _unmap(worker.slabs.pop(number))
        if answer.new and answer.slab is not None:
            descriptor = multiprocessing.reduction.recv_handle(worker.socket)
            worker.slabs[answer.slab] = mmap.mmap(descriptor, answer.nbytes)
            os.close(descriptor)
        worker.tasks.pop(answer.ticket, None)
        worker.unwanted.discard(answer.ticket)
        if answer.slab is None:
            return answer.ticket, Packed(read(message, None))
        number = answer.slab
        value = read(message, memoryview(worker.slabs[number]))
        return answer.ticket, Packed(value, lambda: worker.freed.append(number), nbytes=answer.nbytes)

    def idle_worker(self, task: Any) -> _Worker | None:
        """The worker with the fewest tasks, if it can take this one as well."""
        if not self._workers:
            raise WorkerError("the worker pool was closed while a pass was using it")
        able = self._workers if task.worker is None else [self._workers[task.worker]]
        if task.size > LARGE_TASK:
            return next((worker for worker in able if not worker.tasks), None)
        worker = min(able, key=lambda one: (len(one.tasks) - len(one.unwanted), len(one.tasks)))
        return worker if len(worker.tasks) - len(worker.unwanted) < OUTSTANDING_PER_WORKER else None

    def drop(self, tickets: Collection[int]) -> None:
        """Nobody waits for these any more: a worker that has not begun with one leaves it out."""
        for worker in self._workers:
            worker.unwanted |= worker.tasks.keys() & set(tickets)


class Stream:
    """One pass over the workers. Ends for good at `close`; what is still under way is thrown away when it arrives."""

    def __init__(self, pool: WorkerPool, tasks: Iterator[BatchTask], ahead: int) -> None:
        self._pool, self._tasks, self._ahead = pool, tasks, max(ahead, pool.num_workers)
        self._order: deque[int] = deque()
        self._arrived: dict[int, Packed] = {}
        self._upcoming: BatchTask | None = next(tasks, None)
        self._follower: Stream | None = None

    def next(self, *, stop: Callable[[], bool], timeout: float | None = None) -> Packed | None:
        """The next batch; None at the end, or when `stop()` turned true meanwhile.

        Args:
            stop: Asked at least every second, and at once after `WorkerPool.wake`.
            timeout: Seconds to wait at most; None without a limit.

        Raises:
            TimeoutError: Nothing came within `timeout`.
            WorkerError: A worker died.
        """
        end = None if timeout is None else time.monotonic() + timeout
        looked = False
        while True:
            self._fill()
            if self._follower is not None:
                self._follower._fill()
            if stop() or (not self._order and self._upcoming is None):
                return None
            # Without an order yet the workers still have tasks of an abandoned pass: their answers make room.
            if self._order and self._order[0] in self._arrived:
                packed = self._arrived.pop(self._order.popleft())
                self._fill()
                return packed
            left = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left <= 0 and looked:
                raise TimeoutError
            self._take(max(0.0, left))
            looked = True

    def redo(self, task: Any, *, stop: Callable[[], bool]) -> Packed | None:
        """Makes one batch now; what else arrives meanwhile is kept. None when `stop()` turned true meanwhile."""
        while (worker := self._pool.idle_worker(task)) is None:
            if stop():
                return None
            self._take(1.0)
        ticket = self._pool.new_ticket()
        self._order.appendleft(ticket)
        self._pool.send(worker, ticket, task)
        while ticket not in self._arrived:
            if stop():
                return None
            self._take(1.0)
        self._order.popleft()
        return self._arrived.pop(ticket)

    def _take(self, timeout: float) -> None:
        wanted = set(self._order)
        for ticket, packed in self._pool.wait(timeout):
            if ticket in wanted:
                self._arrived[ticket] = packed
            elif self._follower is not None and ticket in self._follower._order:
                self._follower._arrived[ticket] = packed
            else:
                packed.free()  # of a pass that was abandoned

    def _fill(self) -> None:
        while self._upcoming is not None and len(self._order) < self._ahead:
            worker = self._pool.idle_worker(self._upcoming)
            if worker is None:
                return
            ticket, task = self._pool.new_ticket(), self._upcoming
            self._order.append(ticket)
            self._upcoming = next(self._tasks, None)
            self._pool.send(worker, ticket, task)

    @property
    def handed_out(self) -> bool:
        """Whether the workers have been given every task."""
        return self._upcoming is None

    def follow_with(self, stream: Stream) -> None:
        """Lets workers that have nothing left to do begin with another stream, which is to be used after this one."""
        self._follower = stream

    def close(self) -> None:
        """Gives back what arrived and was not asked for; a follower stays as it is."""
        for packed in self._arrived.values():
            packed.free()
        self._arrived.clear()
        self._pool.drop(self._order)
        self._order.clear()
        self._upcoming = None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """So that a forked worker collects nothing before it has set its rank's garbage aside, see `worker.work`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _preload(context: Any) -> None:
    """Lets the fork server import once what otherwise every worker imports for itself, for seconds."""
    if context.get_start_method() == "forkserver" and getattr(_forkserver, "_preload_modules", None) == ["__main__"]:
        # workers import the user's script, so what that has imported of Lightning too
        heavy = [name for name in ("lightning_dali.modalities", "lightning_dali.datamodules") if name in sys.modules]
        context.set_forkserver_preload(["__main__", *heavy])


def _unmap(slab: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # somebody still looks into it; it goes with its last view
        slab.close()


def _end(workers: list[_Worker], alarm: _Alarm | None, owner: int) -> None:
    """Ends worker processes, at once: they hold nothing that needs a goodbye."""
    if os.getpid() != owner:
        return  # a fork of the rank's process that ends: the workers are not its own
    for worker in workers:
        with contextlib.suppress(OSError):
            worker.socket.close()
    for worker in workers:
        if worker.process.is_alive():
            worker.process.kill()
    for worker in workers:
        worker.process.join(5)
        with contextlib.suppress(ValueError):
            worker.process.close()
        for slab in worker.slabs.values():
            _unmap(slab)
    workers.clear()
    if alarm is not None:
        alarm.close()
