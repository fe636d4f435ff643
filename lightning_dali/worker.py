"""What a worker process runs: tasks come in through its socket, packed batches go out.

Runs in the worker; `workers.py` is the rank's side of it. A batch's large parts lie in a *slab*: an anonymous memory file
(memfd) that the worker makes, hands over once through the socket, and reuses when the rank says that it is free. It has no
name in the file system, so there is nothing to leave behind, and no dependence on the size of /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import multiprocessing.reduction
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_dali.wire import write, write_small

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of `mallopt` in glibc's malloc.h."""


@dataclass
class Failure:
    """An exception on its way from a worker to the rank."""

    error: BaseException | None
    """The exception itself when it can be pickled."""
    kind: str
    """Its class name."""
    text: str
    """The traceback in the worker; empty when it was raised in the rank itself."""

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


@dataclass(frozen=True)
class Answer:
    """What goes before a message: whose it is and where its large parts are."""

    ticket: int
    """The task's."""
    slab: int | None
    """The slab's number; None where everything is in the message."""
    nbytes: int = 0
    """The slab's size."""
    new: bool = False
    """Whether the slab's descriptor follows the message."""
    dropped: tuple[int, ...] = ()
    """Slabs that were too small and will not be used again."""


class Slabs:
    """The worker's memory files. Free ones are reused; one that is too small gives way to a larger one."""

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}
        self._descriptors: dict[int, int] = {}  # of those that the rank does not have yet
        self._free: list[int] = []
        self._dropped: list[int] = []
        self._next = 0

    def release(self, numbers: list[int]) -> None:
        """The rank has finished with these."""
        self._free.extend(numbers)

    def take(self, size: int) -> tuple[int, mmap.mmap]:
        """A slab of `size` bytes or more, by its number."""
        fitting = [number for number in self._free if len(self._memory[number]) >= size]
        if fitting:
            number = min(fitting, key=lambda one: len(self._memory[one]))
            self._free.remove(number)
            return number, self._memory[number]
        if self._free:
            self._drop(self._free.pop())
        number, self._next = self._next, self._next + 1
        descriptor = os.memfd_create(f"lightning_dali_{os.getpid()}_{number}")
        os.ftruncate(descriptor, _round_up(size))
        self._memory[number] = mmap.mmap(descriptor, _round_up(size))
        self._descriptors[number] = descriptor
        return number, self._memory[number]

    def describe(self, ticket: int, number: int | None) -> tuple[Answer, int | None]:
        """The answer for a batch in that slab, and the descriptor to hand over with it, if it is new."""
        dropped, self._dropped = tuple(self._dropped), []
        if number is None:
            return Answer(ticket, None, dropped=dropped), None
        descriptor = self._descriptors.pop(number, None)
        return Answer(ticket, number, len(self._memory[number]), descriptor is not None, dropped), descriptor

    def _drop(self, number: int) -> None:
        memory = self._memory.pop(number)
        with contextlib.suppress(BufferError):
            memory.close()
        descriptor = self._descriptors.pop(number, None)
        if descriptor is None:
            self._dropped.append(number)
        else:
            os.close(descriptor)


def _round_up(size: int) -> int:
    """A quarter more than asked, whole pages: batches differ a little in size, and a slab should serve the next one."""
    page = mmap.PAGESIZE
    return -(-(size + size // 4) // page) * page


def watch_parent(parent: int) -> None:
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


def work(
    socket: Any, others: list[Any], parent: int, number: int, num_workers: int, make: Callable[[Any], Any]
) -> None:
    """A worker's main loop.

    Args:
        socket: Its own end.
        others: The rank's ends that a fork inherited.
        parent: The rank's process id.
        number: From 0.
        num_workers: In its pool.
        make: From a task to the value to send.
    """
    # A fork has its rank's garbage too, and in it perhaps DALI pipelines: to collect them would wait for threads that are
    # not here, for ever (DALI 2.4). What was there before is never collected in this process.
    gc.freeze()
    gc.enable()
    _keep_freed_memory()
    _leave_signals_to_the_rank()
    for other in others:
        with contextlib.suppress(OSError):
            other.close()
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    _set_worker_info(number, num_workers, make)
    slabs = Slabs()
    waiting: dict[int, Any] = {}
    with contextlib.suppress(EOFError, ConnectionError, BrokenPipeError):
        while True:
            while not waiting or socket.poll():
                ticket, task, freed, unwanted = pickle.loads(socket.recv_bytes())
                slabs.release(freed)
                waiting[ticket] = task
                for dropped in [one for one in unwanted if waiting.pop(one, None) is not None]:
                    _answer(socket, slabs, dropped, None, _nothing)
            ticket = next(iter(waiting))
            _answer(socket, slabs, ticket, waiting.pop(ticket), make)
    os._exit(0)  # no atexit of the user's libraries in a worker


def _nothing(task: None) -> None:
    """What is made of a task that nobody waits for any more."""


def _keep_freed_memory() -> None:
    """Lets glibc keep up to 256 MB that were freed: a batch's files are read into what the last batch's left.

    By default it gives them back each time, and the kernel clears every page anew: a tenth to a fifth of what an image costs.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc here
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
        # The most that glibc takes: it no longer grows by itself once either is set.
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _leave_signals_to_the_rank() -> None:
    """Ctrl-C and a scheduler's signals reach every process of a job; the rank decides, and its end is the worker's.

    A fork has the rank's handlers too: Lightning's would save a checkpoint in here and requeue the job once more.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def _answer(socket: Any, slabs: Slabs, ticket: int, task: Any, make: Callable[[Any], Any]) -> None:
    used: int | None = None

    def slab(size: int) -> memoryview:
        nonlocal used
        used, memory = slabs.take(size)
        return memoryview(memory)

    try:
        message = write(make(task), slab)
    except BaseException as error:
        if used is not None:
            slabs.release([used])
        message, used = write_small(Failure.of(error)), None
    answer, descriptor = slabs.describe(ticket, used)
    socket.send_bytes(pickle.dumps(answer))
    socket.send_bytes(message)
    if descriptor is not None:
        multiprocessing.reduction.send_handle(socket, descriptor, None)
        os.close(descriptor)


def _set_worker_info(number: int, num_workers: int, make: Any) -> None:
    """What `torch.utils.data.get_worker_info()` answers in here: datasets that shard themselves ask it."""
    import torch.utils.data._utils.worker as torch_worker

    dataset: Any = getattr(make, "dataset", None)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=number, dataset=dataset
    )
