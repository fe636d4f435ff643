"""The worker pool: processes that turn a `BatchTask` into a packed batch.

`WorkerPool` lives in the rank, `_work` is what each worker runs. Why not `torch.utils.data.DataLoader`'s workers: a pass
must be abandoned at once and without a trace, a killed worker must be noticed at once and must not hold a lock that the
others need, and shared memory should be used again instead of mapped anew for each batch.

- Each worker has one socket of its own. There is no shared queue and no lock between processes.
- A batch's bytes lie in a *slab*: an anonymous memory file (memfd) that the worker makes, hands over once through the
  socket, and reuses when the rank says it is free. No name in the file system, so nothing to leave behind, and no
  dependence on the size of /dev/shm.
- A worker ends when its socket closes or its rank's process ends, whichever it sees first.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import select
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_dali.sampling import BatchTask
from lightning_dali.wire import read, write

OUTSTANDING_PER_WORKER = 2
"""Tasks a worker holds at a time: one in work, one waiting so that it never idles."""
SLABS_PER_WORKER = 4
"""A slab a task in work or waiting, and as many that the rank still reads."""

_rank_sockets: weakref.WeakSet[Any] = weakref.WeakSet()
"""The rank's ends, so that a forked worker closes those it inherited."""


class WorkerError(RuntimeError):
    """A worker process died."""


@dataclass
class Failure:
    """An exception on its way from a worker to the rank."""

    error: BaseException | None
    """The exception itself when it can be pickled."""
    kind: str
    """Its class name."""
    text: str
    """The traceback in the worker."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Packs an exception with its traceback."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        kept: BaseException | None = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            kept = None
        return cls(kept, type(error).__name__, text)

    @classmethod
    def here(cls, error: BaseException) -> Failure:
        """Wraps an exception of this process."""
        return cls(error, type(error).__name__, "")

    def exception(self) -> BaseException:
        """The exception to raise in the rank; the worker's traceback is its cause."""
        if not self.text:
            assert self.error is not None
            return self.error
        cause = RuntimeError(f"in a worker process:\n{self.text}")
        error = self.error if self.error is not None else RuntimeError(f"{self.kind} in a worker process:\n{self.text}")
        error.__cause__ = cause
        return error


# -- in the worker ---------------------------------------------------------------------------------------------------


class _Slabs:
    """The worker's memory files. Free ones are reused; one that is too small is replaced."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[int, mmap.mmap]] = {}  # slab number -> (fd, mapping)
        self._free: deque[int] = deque()
        self._next = 0

    def release(self, numbers: list[int]) -> None:
        """The rank has finished with these."""
        self._free.extend(numbers)

    def take(self, size: int) -> tuple[int, mmap.mmap, int | None]:
        """(number, memory, file descriptor to hand over or None when the rank has it already)."""
        while self._free:
            number = self._free.popleft()
            descriptor, memory = self._memory[number]
            if len(memory) >= size:
                return number, memory, None
            self._drop(number)
        number, self._next = self._next, self._next + 1
        descriptor = os.memfd_create(f"lightning_dali_{os.getpid()}_{number}")
        os.ftruncate(descriptor, _round_up(size))
        memory = mmap.mmap(descriptor, _round_up(size))
        self._memory[number] = (descriptor, memory)
        return number, memory, descriptor

    def _drop(self, number: int) -> None:
        descriptor, memory = self._memory.pop(number)
        with contextlib.suppress(BufferError):
            memory.close()
        os.close(descriptor)


def _round_up(size: int) -> int:
    """A quarter more than asked, whole pages: batches differ a little in size, and a slab should serve the next one."""
    page = mmap.PAGESIZE
    return -(-(size + size // 4) // page) * page


def _watch_parent(parent: int) -> None:
    """Ends this process when the rank's process is gone, whatever this one is doing then."""
    try:
        descriptor = os.pidfd_open(parent)
        select.select([descriptor], [], [])
    except OSError:  # no pidfd on this kernel: look every second
        with contextlib.suppress(OSError):
            while True:
                os.kill(parent, 0)
                time.sleep(1)
    os._exit(1)


def _work(
    socket: Any, others: list[Any], parent: int, number: int, num_workers: int, make: Callable[[BatchTask], Any]
) -> None:
    """A worker's main loop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the rank decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        with contextlib.suppress(OSError):
            other.close()
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    _set_worker_info(number, num_workers, make)
    slabs = _Slabs()
    with contextlib.suppress(EOFError, ConnectionError, BrokenPipeError):
        while True:
            ticket, task, freed = pickle.loads(socket.recv_bytes())
            slabs.release(freed)
            _answer(socket, slabs, ticket, task, make)
    os._exit(0)  # no atexit of the user's libraries in a worker


def _answer(socket: Any, slabs: _Slabs, ticket: Any, task: BatchTask, make: Callable[[BatchTask], Any]) -> None:
    used: tuple[int, int, int | None] | None = None

    def slab(size: int) -> memoryview:
        nonlocal used
        number, memory, descriptor = slabs.take(size)
        used = (number, len(memory), descriptor)
        return memoryview(memory)

    try:
        message = write(make(task), slab)
    except BaseException as error:
        if used is not None and used[2] is None:
            slabs.release([used[0]])
        message, used = write(Failure.of(error), slab), None
    number, size, descriptor = used or (-1, 0, None)
    socket.send_bytes(pickle.dumps((ticket, number, size, descriptor is not None)))
    socket.send_bytes(message)
    if descriptor is not None:
        multiprocessing.reduction.send_handle(socket, descriptor, None)


def _set_worker_info(number: int, num_workers: int, make: Any) -> None:
    """What `torch.utils.data.get_worker_info()` answers in here: datasets that shard themselves ask it."""
    import torch.utils.data._utils.worker as torch_worker

    torch_worker._worker_info = torch_worker.WorkerInfo(  # type: ignore[attr-defined]
        id=number, num_workers=num_workers, seed=number, dataset=getattr(make, "dataset", None)
    )


# -- in the rank -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    process: Any
    socket: Any
    number: int
    tasks: dict[int, BatchTask] = field(default_factory=dict)
    slabs: dict[int, mmap.mmap] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)

    def death(self) -> WorkerError:
        """Why it is gone, in words."""
        self.process.join(1)
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (the system kills processes so when memory runs out: try fewer workers or smaller batches)"
        indices = [index for task in self.tasks.values() for index in task.indices]
        doing = f" while fetching dataset indices {indices[:16]}{'...' if len(indices) > 16 else ''}" if indices else ""
        return WorkerError(f"worker {self.number} (pid {self.process.pid}) died with {how}{doing}")


class Packed:
    """A batch that came from a worker; its arrays look into a slab until `free`."""

    def __init__(self, value: Any, free: Callable[[], None] = lambda: None, *, nbytes: int = 0) -> None:
        self.value, self.free, self.nbytes = value, free, nbytes


class WorkerPool:
    """Worker processes that serve one pass at a time.

    Args:
        make: Turns a task into the value to send; pickled to the workers unless they are forked.
        num_workers: At least one.
        context: A multiprocessing start method, or None for the platform's.
    """

    def __init__(
        self,
        make: Callable[[BatchTask], Any],
        num_workers: int,
        *,
        context: str | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._make = make
        self._context = mp.get_context(context)
        self._workers: list[_Worker] = []
        self._tickets = 0
        self._alarm_read, self._alarm_write = os.pipe()
        os.set_blocking(self._alarm_read, False)
        self._finalizer = weakref.finalize(
            self, _end, self._workers, [self._alarm_read, self._alarm_write], os.getpid()
        )

    @property
    def started(self) -> bool:
        """Whether the processes exist."""
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Starts the processes, if they are not there yet."""
        if self._workers:
            return
        try:
            for number in range(self.num_workers):
                self._workers.append(self._start_one(number))
        except BaseException:
            _end(self._workers, [], os.getpid())
            raise

    def _start_one(self, number: int) -> _Worker:
        mine, theirs = self._context.Pipe(duplex=True)
        forked = self._context.get_start_method() == "fork"
        others = [socket for socket in (*_rank_sockets, mine) if not socket.closed] if forked else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(theirs, others, os.getpid(), number, self.num_workers, self._make),
            name=f"lightning_dali_worker_{number}",
            daemon=True,
        )
        process.start()
        theirs.close()
        _rank_sockets.add(mine)
        return _Worker(process, mine, number)

    def stream(self, tasks: Iterator[BatchTask], *, ahead: int) -> Stream:
        """The batches of `tasks`, in order, made by the workers; `ahead` of them at most at a time."""
        self.start()
        return Stream(self, tasks, ahead)

    def wake(self) -> None:
        """Makes a `Stream.next` that waits in another thread return."""
        with contextlib.suppress(OSError):
            os.write(self._alarm_write, b"!")

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        self._finalizer()

    @property
    def broken(self) -> bool:
        """Whether a process has died, or the pool was closed."""
        return not self._finalizer.alive or any(not worker.process.is_alive() for worker in self._workers)

    def state(self) -> str:
        """What each worker is doing, in words."""
        busy = [
            f"worker {worker.number} (pid {worker.process.pid}) has dataset indices "
            f"{[index for task in worker.tasks.values() for index in task.indices][:8]}"
            for worker in self._workers
            if worker.tasks
        ]
        return "; ".join(busy) or "no worker has anything to do: the server is decoding"

    # -- used by Stream, in one thread at a time

    def new_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def send(self, worker: _Worker, ticket: int, task: BatchTask) -> None:
        freed, worker.freed = worker.freed, []
        try:
            worker.socket.send_bytes(pickle.dumps((ticket, task, freed)))
        except OSError:
            worker.tasks[ticket] = task
            raise worker.death() from None
        worker.tasks[ticket] = task

    def wait(self, timeout: float) -> Iterator[tuple[int, Packed]]:
        """Yields (ticket, batch) for what has arrived; waits up to `timeout` seconds for something."""
        by_socket = {worker.socket: worker for worker in self._workers}
        sentinels = {worker.process.sentinel: worker for worker in self._workers}
        ready = multiprocessing.connection.wait([*by_socket, *sentinels, self._alarm_read], timeout)
        for item in ready:
            if item in by_socket:
                worker = by_socket[item]
                try:
                    yield self._receive(worker)
                except (EOFError, OSError):
                    raise worker.death() from None
        for item in ready:
            if item == self._alarm_read:
                with contextlib.suppress(OSError):
                    os.read(self._alarm_read, 4096)
            elif item in sentinels and sentinels[item].socket not in ready:
                raise sentinels[item].death()

    def _receive(self, worker: _Worker) -> tuple[int, Packed]:
        ticket, number, size, new = pickle.loads(worker.socket.recv_bytes())
        message = worker.socket.recv_bytes()
        if new:
            descriptor = multiprocessing.reduction.recv_handle(worker.socket)
            worker.slabs[number] = mmap.mmap(descriptor, size)
            os.close(descriptor)
        worker.tasks.pop(ticket, None)
        if number < 0:
            return ticket, Packed(read(message, None))
        slab = worker.slabs[number]
        value = read(message, memoryview(slab))
        return ticket, Packed(value, lambda: worker.freed.append(number), nbytes=size)

    def idle_worker(self) -> _Worker | None:
        """The worker with the fewest tasks, if it can take one more."""
        worker = min(self._workers, key=lambda one: len(one.tasks))
        return worker if len(worker.tasks) < OUTSTANDING_PER_WORKER else None

    @property
    def nbytes(self) -> int:
        """Shared memory held by slabs, in bytes."""
        return sum(len(slab) for worker in self._workers for slab in worker.slabs.values())


class Stream:
    """One pass over the workers. Ends for good at `close`; what is still under way is thrown away when it arrives."""

    def __init__(self, pool: WorkerPool, tasks: Iterator[BatchTask], ahead: int) -> None:
        self._pool, self._tasks, self._ahead = pool, tasks, max(ahead, pool.num_workers)
        self._order: deque[int] = deque()
        self._arrived: dict[int, Packed] = {}
        self._exhausted = False
        self._closed = False

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
        while True:
            self._fill()
            if stop() or not self._order:
                return None
            if self._order[0] in self._arrived:
                packed = self._arrived.pop(self._order.popleft())
                self._fill()
                return packed
            left = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left <= 0:
                raise TimeoutError
            self._take(left)

    def redo(self, task: Any) -> Packed:
        """Makes one batch now; what else arrives meanwhile is kept."""
        while (worker := self._pool.idle_worker()) is None:
            self._take(1.0)
        ticket = self._pool.new_ticket()
        self._order.appendleft(ticket)
        self._pool.send(worker, ticket, task)
        while ticket not in self._arrived:
            self._take(1.0)
        self._order.popleft()
        return self._arrived.pop(ticket)

    def _take(self, timeout: float) -> None:
        wanted = set(self._order)
        for ticket, packed in self._pool.wait(timeout):
            if ticket in wanted:
                self._arrived[ticket] = packed
            else:
                packed.free()  # of a pass that was abandoned

    def _fill(self) -> None:
        while not self._exhausted and len(self._order) < self._ahead:
            worker = self._pool.idle_worker()
            if worker is None:
                return
            task = next(self._tasks, None)
            if task is None:
                self._exhausted = True
                return
            ticket = self._pool.new_ticket()
            self._order.append(ticket)
            self._pool.send(worker, ticket, task)

    def close(self) -> None:
        """Gives back what arrived and was not asked for."""
        for packed in self._arrived.values():
            packed.free()
        self._arrived.clear()
        self._order.clear()
        self._exhausted = True


def _end(workers: list[_Worker], descriptors: list[int], owner: int) -> None:
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
            with contextlib.suppress(BufferError):  # somebody still looks into it; it goes with its last view
                slab.close()
    workers.clear()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
