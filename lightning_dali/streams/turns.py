"""Whose turn it is: the tasks of one pass over a stream, made as it becomes known who has ended.

Runs in the rank. What comes back from the workers is handed to `take`, in order, so what follows depends on nothing but what
the stream gave: not on which worker was faster.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_dali.sampling import Rest, StreamPlan, StreamTask, Trail
from lightning_dali.streams.answers import Skipped, StreamEnd, Told
from lightning_dali.wire import Request

logger = logging.getLogger(__name__)

_runs = itertools.count(1)


class Turns(Iterator[StreamTask]):
    """The tasks of one pass. Tasks may be taken ahead of their answers; `take` says what to deliver.

    Args:
        plan: Of this rank.
        epoch: Of the draws.
        name: The loader's, for messages.
        start: Batches that are not delivered again.
        over: Whether nothing is to come.
        keep: Batches that a worker keeps.
        states: The dataset's own state in each worker after `start` batches; None: they are passed one by one.
        firsts: The fingerprints of the run that is continued.
    """

    def __init__(
        self,
        plan: StreamPlan,
        epoch: int,
        *,
        name: str = "train",
        start: int = 0,
        over: bool = False,
        keep: int = 1,
        states: Mapping[int, tuple[int, Any]] | None = None,
        firsts: Mapping[int, str] | None = None,
    ) -> None:
        self.plan, self.epoch, self.name = plan, epoch, name
        self.run = next(_runs)
        self._start, self._over, self._keep = start, over, keep
        self._states, self._known_firsts = dict(states or {}), dict(firsts or {})
        self.done = start if states is not None else 0
        """Batches that lie behind, those that were passed too."""
        self._serial = itertools.count()
        self._next = self.done % plan.workers
        self._turn = [-(-(self.done - worker) // plan.workers) for worker in range(plan.workers)]
        self._handed_out = 0
        """Tasks of rests that are not back: each is sure to be a batch."""
        self._begin_lap(0)
        self._trail = Trail() if states is None else Trail(dict(firsts or {}), dict(states))

    def _begin_lap(self, lap: int) -> None:
        workers = range(self.plan.workers)
        self.lap = lap
        self._before = self._made
        """Batches that lie before this lap."""
        self._ended = [False for _ in workers]
        self._rests: dict[int, Rest] = {}
        self._last: deque[tuple[int, tuple[Rest, ...]]] | None = None

    @property
    def _made(self) -> int:
        """Batches that lie behind, or are certain."""
        return self.done + self._handed_out

    # -- tasks

    def __next__(self) -> StreamTask:
        if self._over or self.is_over:
            raise StopIteration
        for _ in range(self.plan.workers):
            worker = self._next
            self._next = (worker + 1) % self.plan.workers
            if not self._ended[worker]:
                return self._task_of(worker)
        task = self._task_of_rests()
        if task is not None:
            return task
        if self.plan.steps is None or self._made >= self.plan.steps:
            raise StopIteration
        self._again()
        return next(self)

    @property
    def is_over(self) -> bool:
        """Whether every rank has had its batches."""
        return self.plan.steps is not None and self.done >= self.plan.steps

    def _task_of(self, worker: int) -> StreamTask:
        turn, self._turn[worker] = self._turn[worker], self._turn[worker] + 1
        position, state = self._states.pop(worker, (0, None))
        step = turn * self.plan.workers + worker
        return self._task(
            worker,
            step,
            count=self.plan.batch_size,
            skip=self._before + step < self._start,
            position=position,
            state=state,
        )

    def _task(self, worker: int, step: int, **more: Any) -> StreamTask:
        plan = self.plan
        return StreamTask(
            self.epoch,
            step,
            (),
            worker=worker,
            run=self.run,
            lap=self.lap,
            serial=next(self._serial),
            order_epoch=0 if plan.fixed_order else self.epoch,
            pack_rest=plan.workers > 1,
            keep=self._keep,
            **more,
        )

    def _task_of_rests(self) -> StreamTask | None:
        """The next batch of what was left over; None: there is none, or none any more."""
        if self._last is None:
            self._last = deque(_joined(self._rests, self.plan.batch_size, drop_last=self.plan.drop_last))
        while self._last and self._made < self._start:
            self._last.popleft()  # passed: nobody needs to make it
            self.done += 1
        if not self._last:
            return None
        worker, rests = self._last.popleft()
        self._handed_out += 1
        step = max(self._turn) * self.plan.workers + len(self._last)
        return self._task(worker, step, rests=rests)

    def _again(self) -> None:
        """Begins the stream again, so that this rank takes as many batches as the others."""
        plan = self.plan
        if self._made == self._before:
            raise RuntimeError(
                f"the {self.name} stream gave no batch on rank {plan.shard.rank}, which is to take {plan.steps}: it is empty "
                f"there, or has fewer than batch_size={plan.batch_size} samples and drop_last=True. Give every rank a share, or "
                "use fewer ranks or a smaller batch_size."
            )
        if not self.lap:
            logger.warning(
                "%s: the stream of rank %d ended after %d batch(es) of the %d that every rank takes; it begins again for the "
                "rest of epoch %d.",
                *(self.name, plan.shard.rank, self._made, plan.steps, self.epoch),
            )
        self._begin_lap(self.lap + 1)
        self._next, self._turn = 0, [0] * plan.workers

    # -- answers

    def take(self, value: Any) -> bool:
        """Takes note of what a task came to, in the order of the tasks; returns whether it is to be delivered.

        Raises:
            ValueError: Workers got the same samples; or others than in the run that is continued.
        """
        if isinstance(value, StreamEnd):
            self._end(value)
            return False
        if not isinstance(value, (Request, Skipped)):
            return True
        task = value.task
        assert isinstance(task, StreamTask)
        told = value.told if isinstance(value, Skipped) else task.after
        self._first(task, told)
        self.done += 1
        if task.rests:
            self._handed_out -= 1
        elif self._trail.states is not None and task.worker is not None:
            known = told.state is not None
            states = {**self._trail.states, task.worker: (told.position, told.state)} if known else None
            self._trail = replace(self._trail, states=states)
        if isinstance(value, Skipped) or self.done <= self._start:
            return False
        repeated = (True,) * len(value.indices) if task.lap else ()
        value.task = replace(task, indices=value.indices, repeated=repeated, rests=(), state=None, after=self._trail)
        return True

    def _end(self, end: StreamEnd) -> None:
        task, worker = end.task, end.task.worker
        if task.lap != self.lap or worker is None or self._ended[worker]:
            return  # it had ended before it got this task
        self._first(task, end.told)
        self._ended[worker] = True
        self._turn[worker] = min(self._turn[worker], task.step // self.plan.workers)
        if end.rest is not None:
            packed = None if end.rest.packed is None else np.array(end.rest.packed)  # its slab will be used again
            self._rests[worker] = replace(end.rest, packed=packed)
        self._trail = replace(self._trail, ended=True)

    def _first(self, task: StreamTask, told: Told) -> None:
        """Compares the first samples of a worker with those of the others, and with those it had in an earlier run."""
        worker, first = task.worker, told.first
        if worker is None or first is None or task.lap:
            return
        twin = next((other for other, known in self._trail.firsts.items() if known == first and other != worker), None)
        if twin is not None:
            raise ValueError(
                f"{self.name}: workers {twin} and {worker} of rank {self.plan.shard.rank} got the same first samples: the dataset "
                "does not shard itself, and each sample would come several times. Let its __iter__ give each worker a share "
                "(torch.utils.data.get_worker_info()), or pass num_workers=1."
            )
        if self._known_firsts.get(worker, first) != first:
            raise ValueError(
                f"{self.name}: the stream begins with other samples than in the run that is to be continued, so what that run had "
                "consumed cannot be passed. Make the stream's order repeatable (draw it from a seed and the epoch of "
                "set_epoch), or resume from a checkpoint of an epoch's end."
            )
        self._trail = replace(self._trail, firsts={**self._trail.firsts, worker: first})

    @property
    def firsts(self) -> dict[int, str]:
        """Fingerprints of what the workers began with, as far as they are known."""
        return self._trail.firsts

    def report(self) -> None:
        """Says so once the stream has ended if it gave another number of batches than it had promised."""
        plan = self.plan
        if plan.steps is not None or plan.num_samples is None or self._over:
            return
        promised = plan.num_steps()
        if self.done != promised:
            logger.warning(
                "%s: the dataset's length is %d, so %d batch(es) of %d, but it gave %d in epoch %d. A trainer counts on the "
                "length: make __len__ the number of samples that this rank's workers get together.",
                *(self.name, plan.num_samples, promised, plan.batch_size, self.done, self.epoch),
            )


def _joined(rests: Mapping[int, Rest], size: int, *, drop_last: bool) -> Iterator[tuple[int, tuple[Rest, ...]]]:
    """Batches of rests in the order of workers, each with the worker that is to make it.

    A worker's own rest, which it could not send, stays a batch by itself.
    """
    pieces: deque[Rest] = deque()
    for worker in sorted(rests):
        if rests[worker].packed is not None:
            pieces.append(rests[worker])
        elif not drop_last:
            yield worker, (rests[worker],)
    workers = itertools.cycle(sorted(rests))
    left = sum(map(len, pieces))
    while left >= size or (left and not drop_last):
        batch: list[Rest] = []
        missing = size
        while missing and pieces:
            batch.append(pieces[0].part(0, missing))
            if len(pieces[0]) > missing:
                pieces[0] = pieces[0].part(missing, len(pieces[0]))
            else:
                pieces.popleft()
            missing -= len(batch[-1])
        left -= size - missing
        yield next(workers), tuple(batch)
