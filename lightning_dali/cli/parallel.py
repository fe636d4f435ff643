"""Work on every index of something, in worker processes that may die. Runs in the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_dali.sampling import BatchTask
from lightning_dali.workers import WorkerError, WorkerPool

__all__ = ["over_indices"]


def over_indices(
    make: Callable[[BatchTask], Any], total: int, *, num_workers: int, chunk: int, context: str | None = None
) -> Iterator[tuple[range, Any]]:
    """Yields (indices, what `make` gave), in order; a `WorkerError` for an index that ends its process.

    Args:
        make: From a task to the value to send; sent to the workers.
        total: Indices from 0.
        num_workers: Processes.
        chunk: Indices a task.
        context: Their start method.
    """
    first = 0
    while first < total:
        try:
            for indices, value in _pass(make, first, total, num_workers, chunk, context):
                yield indices, value
                first = indices.stop
        except WorkerError:
            # One of several chunks under way is to blame: the next one is done index by index, until it is known.
            end = min(total, first + chunk)
            for index in range(first, end):
                yield range(index, index + 1), _alone(make, index, context)
            first = end


def _pass(
    make: Callable[[BatchTask], Any], first: int, total: int, num_workers: int, chunk: int, context: str | None
) -> Iterator[tuple[range, Any]]:
    parts = [range(start, min(total, start + chunk)) for start in range(first, total, chunk)]
    tasks = (BatchTask(epoch=0, step=number, indices=tuple(part)) for number, part in enumerate(parts))
    pool = WorkerPool(make, min(num_workers, len(parts)), context=context)
    try:
        stream = pool.stream(tasks, ahead=4 * num_workers)
        for part in parts:
            packed = stream.next(stop=lambda: False)
            assert packed is not None
            value = packed.value
            packed.free()
            if hasattr(value, "exception"):
                raise value.exception()
            yield part, value
    finally:
        pool.close()


def _alone(make: Callable[[BatchTask], Any], index: int, context: str | None) -> Any:
    try:
        ((_, value),) = _pass(make, index, index + 1, 1, 1, context)
    except WorkerError as error:
        return error
    return value
