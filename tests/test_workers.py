"""The worker pool: batches in order, deaths noticed, and nothing of one pass in the next."""

# Over 300 lines: one protocol, and what its failures look like to the same pool.

import contextlib
import gc
import os
import platform
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_dali.sampling import BatchTask
from lightning_dali.worker import Failure, Slabs
from lightning_dali.workers import LARGE_TASK, Packed, Stream, WorkerError, WorkerPool

Script = Callable[..., tuple[int, str, str]]


def tasks(count: int, *, size: int = 2, epoch: int = 0) -> Iterator[BatchTask]:
    for step in range(count):
        yield BatchTask(epoch, step, tuple(range(step * size, (step + 1) * size)))


@contextlib.contextmanager
def pool_of(make: Callable[[Any], Any], workers: int = 2, **options: Any) -> Iterator[WorkerPool]:
    pool = WorkerPool(make, workers, context="fork", **options)
    try:
        yield pool
    finally:
        pool.close()


def never() -> bool:
    return False


def values(stream: Stream) -> Iterator[Any]:
    """What comes out, each slab given back at once."""
    while (packed := stream.next(stop=never, timeout=20)) is not None:
        yield packed.value
        packed.free()


# -- order -----------------------------------------------------------------------------------------------------------


def test_batches_come_in_order_whoever_is_slow() -> None:
    def make(task: BatchTask) -> Any:
        time.sleep(0.02 * (task.step % 3))
        return task.step, task.indices

    with pool_of(make, 3) as pool:
        found = list(values(pool.stream(tasks(20), ahead=4)))
    assert found == [(step, (2 * step, 2 * step + 1)) for step in range(20)]


def test_what_an_abandoned_pass_asked_for_neither_comes_back_nor_ends_the_next_one() -> None:
    def make(task: BatchTask) -> Any:
        time.sleep(0.1)
        return task.epoch, task.step

    with pool_of(make, 2) as pool:
        for epoch in range(3):
            stream = pool.stream(tasks(8, epoch=epoch), ahead=4)
            with pytest.raises(TimeoutError):
                stream.next(stop=never, timeout=0.0)  # every worker has all the tasks that it takes
            stream.close()
        assert list(values(pool.stream(tasks(3, epoch=9), ahead=4))) == [(9, 0), (9, 1), (9, 2)]


def test_what_an_abandoned_pass_asked_for_is_not_made_if_no_worker_has_begun_with_it(tmp_path: Path) -> None:
    log = tmp_path / "made"

    def make(task: BatchTask) -> Any:
        with log.open("a") as stream:
            stream.write(f"{task.epoch} ")
        time.sleep(0.2)
        return task.epoch, task.step

    with pool_of(make, 2) as pool:
        stream = pool.stream(tasks(8), ahead=4)
        with pytest.raises(TimeoutError):
            stream.next(stop=never, timeout=0.0)
        stream.close()
        assert list(values(pool.stream(tasks(4, epoch=9), ahead=4))) == [(9, step) for step in range(4)]
        assert not any(worker.tasks or worker.unwanted for worker in pool._workers)
    assert log.read_text().split().count("0") <= 2, "a worker had one in work; the other one waited"


def test_a_batch_can_be_made_again_before_what_is_to_come() -> None:
    with pool_of(lambda task: (task.epoch, task.step)) as pool:
        stream = pool.stream(tasks(6), ahead=4)
        assert stream.next(stop=never).value == (0, 0)  # type: ignore[union-attr]
        again = stream.redo(BatchTask(7, 0, (0,)), stop=never)
        assert again is not None and again.value == (7, 0)
        assert list(values(stream)) == [(0, step) for step in range(1, 6)]
        assert stream.redo(BatchTask(7, 0, (0,)), stop=lambda: True) is None


def test_a_batch_of_very_many_indices_blocks_nobody() -> None:
    with pool_of(lambda task: list(task.indices)) as pool:
        found = list(values(pool.stream(tasks(4, size=100 * LARGE_TASK), ahead=4)))
    assert [len(batch) for batch in found] == [100 * LARGE_TASK] * 4


# -- slabs -----------------------------------------------------------------------------------------------------------


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lightning_dali")


def test_slabs_are_used_again_and_small_ones_give_way() -> None:
    def make(task: BatchTask) -> Any:
        return np.full(1000 * 3 ** min(task.step // 4, 5), task.step, np.int64)

    with pool_of(make, 1) as pool:
        counts, sizes = [], []
        for step, value in enumerate(values(pool.stream(tasks(60), ahead=2))):
            assert (value == step).all()
            del value
            counts.append(mapped())
            sizes.append(pool.nbytes)
        assert max(counts) <= 4  # not one for each size
        assert len(set(sizes[40:])) == 1
    assert mapped() == 0


def test_a_batch_keeps_its_slab_until_it_is_freed() -> None:
    with pool_of(lambda task: np.full(5000, task.step, np.int64), 1) as pool:
        stream = pool.stream(tasks(8), ahead=2)
        held = [stream.next(stop=never, timeout=20) for _ in range(8)]
        assert [int(one.value.min()) for one in held if one] == list(range(8))
        assert [int(one.value.max()) for one in held if one] == list(range(8))


def test_freeing_twice_is_freeing_once() -> None:
    freed: list[int] = []
    packed = Packed(None, lambda: freed.append(1))
    packed.free()
    packed.free()
    assert freed == [1]


def faults_of_a_batch_of_files(task: BatchTask) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    files = [b"file" * (16 << 10) for _ in range(256)]
    del files
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_worker_reads_into_memory_that_it_has_freed() -> None:
    with pool_of(faults_of_a_batch_of_files, 1) as pool:
        stream = pool.stream(tasks(6), ahead=1)
        faults = [one.value for _ in range(6) if (one := stream.next(stop=never, timeout=20))]
    assert max(faults[2:]) < 400, faults  # 16 MB are 4096 pages


def test_a_slab_that_was_not_sent_is_free_again() -> None:
    slabs = Slabs()
    number, memory = slabs.take(100)
    slabs.release([number])
    assert slabs.take(100) == (number, memory)
    assert slabs.describe(1, number)[0].new
    slabs.release([number])
    larger, _ = slabs.take(1_000_000)
    answer, descriptor = slabs.describe(2, larger)
    assert (answer.new, answer.dropped) == (True, (number,))
    assert descriptor is not None
    os.close(descriptor)


# -- failures --------------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class Heavy(ValueError):
    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.evidence = np.zeros(100_000)


@pytest.mark.parametrize(("kind", "expected"), [(KeyError, KeyError), (Heavy, Heavy), (Unpicklable, RuntimeError)])
def test_an_exception_travels_with_its_traceback(kind: type[Exception], expected: type[Exception]) -> None:
    def make(task: BatchTask) -> Any:
        if task.step == 1:
            raise kind("in make")
        return task.step

    with pool_of(make) as pool:
        for _ in range(2):  # the workers live on
            first, failure, *rest = values(pool.stream(tasks(4), ahead=3))
            assert (first, rest) == (0, [2, 3])
            assert isinstance(failure, Failure)
            error = failure.exception()
            assert type(error) is expected
            assert "in make" in str(error)
            assert "in a worker process" in str(error.__cause__) and "raise kind" in str(error.__cause__)


@pytest.mark.faults
def test_a_killed_worker_is_named_at_once() -> None:
    def make(task: BatchTask) -> Any:
        if task.step >= 2:
            time.sleep(60)
        return task.step

    with pool_of(make) as pool:
        stream = pool.stream(tasks(8), ahead=4)
        assert [stream.next(stop=never).value for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
        victim = pool.pids[0]
        start = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(
            WorkerError, match=rf"pid {victim}\) died with signal SIGKILL.*memory.*dataset indices \[\d"
        ):
            stream.next(stop=never, timeout=20)
        assert time.monotonic() - start < 2
        assert pool.broken


@pytest.mark.faults
def test_a_death_is_noticed_although_a_grandchild_holds_the_socket() -> None:
    def make(task: BatchTask) -> Any:
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        os._exit(3)

    with pool_of(make, 1) as pool:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"exit code 3 while fetching dataset indices \[0, 1"):
            pool.stream(tasks(4), ahead=2).next(stop=never, timeout=20)
        assert time.monotonic() - start < 3


@pytest.mark.faults
def test_a_forked_worker_leaves_its_ranks_garbage_alone() -> None:
    """A DALI pipeline that a worker collects waits for threads that its process does not have."""

    class Pipeline:
        def __init__(self) -> None:
            self.cycle, self.owner = self, os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.owner:
                time.sleep(60)

    def make(task: BatchTask) -> int:
        return gc.collect()

    Pipeline()
    with pool_of(make, 1) as pool:
        assert len(list(values(pool.stream(tasks(2), ahead=1)))) == 2
    assert gc.isenabled()


def test_waking_a_closed_pool_writes_to_nobody(tmp_path: Path) -> None:
    pool = WorkerPool(lambda task: task.step, 1, context="fork")
    assert list(values(pool.stream(tasks(2), ahead=1))) == [0, 1]
    pool.close()
    files = [(tmp_path / str(number)).open("wb", buffering=0) for number in range(8)]  # take the numbers that are free
    pool.wake()
    pool.close()
    for file in files:
        file.close()
    assert all((tmp_path / str(number)).stat().st_size == 0 for number in range(8))


def test_waking_ends_a_wait() -> None:
    stopped = False

    def stop() -> bool:
        return stopped

    with pool_of(lambda task: time.sleep(30), 1) as pool:
        import threading

        def later() -> None:
            nonlocal stopped
            stopped = True
            pool.wake()

        timer = threading.Timer(0.2, later)
        timer.start()
        start = time.monotonic()
        assert pool.stream(tasks(2), ahead=1).next(stop=stop) is None
        assert time.monotonic() - start < 0.9  # `stop` alone would be asked each second
        timer.join()


def test_a_closed_pool_says_so() -> None:
    with pool_of(lambda task: task.step) as pool:
        stream = pool.stream(tasks(3), ahead=1)
        pool.close()
        with pytest.raises(WorkerError, match="closed while a pass was using it"):
            stream.next(stop=never)


def test_what_cannot_be_sent_says_so() -> None:
    pool = WorkerPool(lambda task: task, 1, context="spawn")
    with pytest.raises(
        TypeError, match=r"cannot be sent to a worker that is started with 'spawn'.*lambda.*'fork' or num_workers=0"
    ):
        pool.start()
    assert not pool.started
    pool.close()


def test_workers_are_told_who_they_are() -> None:
    def make(task: BatchTask) -> Any:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers

    with pool_of(make, 2) as pool:
        assert set(values(pool.stream(tasks(8), ahead=3))) <= {(0, 2), (1, 2)}


ORPHANS = """
import os, signal, time
from lightning_dali.sampling import BatchTask
from lightning_dali.workers import WorkerPool

def make(task):
    time.sleep(60)

if __name__ == "__main__":
    pool = WorkerPool(make, 2, context="fork")
    pool.stream(iter([BatchTask(0, step, (step,)) for step in range(4)]), ahead=4)._fill()
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.faults
def test_workers_end_with_their_rank(run_script: Script) -> None:
    rc, stdout, _ = run_script(ORPHANS, 30)  # fails if one is left
    assert rc == -signal.SIGKILL
    assert len(stdout.split()) == 2
