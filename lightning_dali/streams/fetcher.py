"""Batches of a dataset that is iterated: the fetcher's way with samples that have no index.

Runs in the worker (with `num_workers=0` in the rank). What the iterator gives is drawn under one seed, what the datamodule does
with it afterwards under another, so that a sample that is passed, or handed to another worker, leaves all others as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import get_worker_info

from lightning_dali.failures import BadSample, BadSampleError
from lightning_dali.fetch import Fetcher, _add_note, _proxies
from lightning_dali.media import MediaError
from lightning_dali.proxies import capture, captures_follow, no_capture
from lightning_dali.sampling import BatchTask, Rest, StreamTask
from lightning_dali.seeding import batch_seed, sample_seed, seed_all, seeded
from lightning_dali.streams.answers import Skipped, StreamEnd, Told
from lightning_dali.streams.cursor import Cursor, Drawn, Kept, Scope, Share
from lightning_dali.streams.fingerprint import SAMPLES, fingerprint
from lightning_dali.streams.rests import pack_rest, unpack_rest
from lightning_dali.streams.state import OwnState

SEARCHED = 1000
"""Samples in which a good one is looked for when a whole batch is bad."""


class _Ended(Exception):
    """Instead of a batch: the stream has ended."""

    def __init__(self, end: StreamEnd) -> None:
        super().__init__()
        self.end = end


@dataclass
class StreamFetcher(Fetcher):
    """Makes the requests of a loader whose dataset is iterated."""

    world_size: int = 1
    _cursors: dict[int, Cursor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By pass."""
    _own: OwnState | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, task: Any) -> Any:
        """A request, or `StreamEnd` or `Skipped`."""
        if isinstance(task, StreamTask) and task.skip:
            return self._skip(task)
        try:
            request = super().__call__(task)
        except _Ended as ended:
            return ended.end
        if isinstance(task, StreamTask):
            request.task = replace(task, after=self._tell(task))
        return request

    def __getstate__(self) -> dict[str, Any]:
        """Without what lives: a worker makes its own iterators."""
        return {**self.__dict__, "_cursors": {}, "_own": None}

    def forget(self, run: int) -> None:
        """Ends a pass that was made in this process."""
        cursor = self._cursors.pop(run, None)
        if cursor is not None:
            cursor.close()

    def draw(self, *, samples: int, batches: int) -> Iterator[Any]:
        """Requests of the stream's first samples, made in this process; fewer when it ends."""
        task = StreamTask(epoch=0, step=0, indices=(), worker=0, run=-1, count=samples)
        try:
            for serial in range(batches):
                request = self(replace(task, serial=serial))
                if isinstance(request, StreamEnd):
                    return
                yield request
        finally:
            self.forget(task.run)

    # -- where it stands

    def _cursor(self, task: StreamTask) -> Cursor:
        """The iteration that a task belongs to; begun by its first task."""
        cursor = self._cursors.get(task.run)
        if cursor is not None and cursor.lap == task.lap:
            return cursor
        if not self.restore_rng:  # a worker serves one pass at a time: what it has of others was abandoned
            for run in [run for run in self._cursors if run != task.run]:
                self.forget(run)
        if cursor is not None:
            cursor.close()
        cursor = self._cursors[task.run] = self._new_cursor(task)
        with self._in_stream():
            cursor.begin(task)
        return cursor

    def _new_cursor(self, task: StreamTask) -> Cursor:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None and self.world_size > 1:  # a worker that is not forked has no torch.distributed to ask
            os.environ.setdefault("RANK", str(self.rank))
            os.environ.setdefault("WORLD_SIZE", str(self.world_size))
        if self._own is None:
            self._own = OwnState(self.dataset)
        scope, fallbacks = self._scopes()
        share = Share(self.rank * workers + worker, self.world_size * workers)
        return Cursor(self.dataset, self._own, self.seed, task.epoch, share, scope, fallbacks, lap=task.lap)

    def _scopes(self) -> tuple[Scope, dict[str, Scope]]:
        """What the dataset runs in, and what else if it fails there."""
        if not getattr(self.modality, "captures", True):
            return nullcontext, {}
        if "dataset" in self._eager:
            return no_capture, {}
        fewer = dict(getattr(self.modality, "less", tuple)())
        fallbacks: dict[str, Scope] = {kind: modality.scope for kind, modality in fewer.items()}
        return getattr(self.modality, "scope", capture), {**fallbacks, "dataset": no_capture}

    @contextmanager
    def _in_stream(self) -> Iterator[None]:
        """Around what the dataset's iterator does, outside of a batch."""
        with seeded(0, restore=self.restore_rng), captures_follow():
            yield

    def _take(self, task: StreamTask, cursor: Cursor) -> list[Drawn]:
        try:
            return cursor.take(task.count)
        except Exception as error:
            _add_note(
                error,
                f"{type(error).__name__}: {error} [from the dataset's own iterator, for sample {cursor.share.name(cursor.position)} "
                f"of the stream, rank {self.rank}, epoch {task.epoch}: an iterator that raised cannot go on]",
            )
            raise
        finally:
            if cursor.fell_back:
                self._fall_back(cursor)

    def _fall_back(self, cursor: Cursor) -> None:
        """Captures less from now on."""
        fell_back, cursor.fell_back = cursor.fell_back, {}
        fewer = dict(getattr(self.modality, "less", tuple)())
        for name, reason in fell_back.items():
            self.modality, self._eager[name] = fewer.get(name, self.modality), reason

    def _tell(self, task: StreamTask) -> Told:
        cursor, own = self._cursors[task.run], self._own
        first, cursor.first = cursor.first, None
        return Told(first, cursor.position, None if own is None else own.now())

    # -- samples

    def _samples(self, task: BatchTask, known: dict[int, MediaError]) -> tuple[list[Any], list[int], list[BadSample]]:
        assert isinstance(task, StreamTask)
        cursor = self._cursor(task)
        kept = cursor.kept.get(task.serial)
        if kept is None and known:
            raise RuntimeError("a batch is to be made again, but its samples are not kept any more; please report this")
        if kept is None:
            kept = self._new_batch(task, cursor)
        numbers = [number for number, _, _ in kept.samples]
        samples, bad = self._without_known(task, kept, known)
        if not bad:
            return samples, numbers, bad
        return *self._repair(task, samples, numbers, bad, known), bad

    def _new_batch(self, task: StreamTask, cursor: Cursor) -> Kept:
        """The samples of a batch that was not made before."""
        drawn = self._left_over(task, cursor) if task.rests else self._take(task, cursor)
        if not task.rests:
            self._look(cursor, drawn)
            if len(drawn) < task.count:
                raise _Ended(self._end(task, cursor, drawn))
        kept = Kept([], cursor.spare)
        for number, raw in drawn:
            sample, bad = None, None
            try:
                sample = self._made(task.epoch, number, raw)
                cursor.spare = number, sample
            except Exception as error:
                bad = self._bad(task, number, error)
            kept.samples.append((number, sample, bad))
        cursor.keep(task, kept)
        return kept

    def _left_over(self, task: StreamTask, cursor: Cursor) -> list[Drawn]:
        if task.rests[0].packed is None:
            drawn, cursor.rest = cursor.rest, []
            return drawn
        return [one for rest in task.rests for one in unpack_rest(rest)]

    def _look(self, cursor: Cursor, drawn: list[Drawn]) -> None:
        """Remembers what the stream began with."""
        if cursor.from_start and cursor.position == len(drawn) and drawn:
            cursor.first = fingerprint([sample for _, sample in drawn[:SAMPLES]])

    def _end(self, task: StreamTask, cursor: Cursor, drawn: list[Drawn]) -> StreamEnd:
        rest = None
        if drawn:
            rest = pack_rest(drawn, self.modality.is_proxy) if task.pack_rest else Rest(tuple(n for n, _ in drawn))
            cursor.rest = drawn if rest.packed is None else []
        return StreamEnd(task, self._tell(task), rest)

    def _made(self, epoch: int, number: int, raw: Any) -> Any:
        """A sample with proxies in the places of its media."""
        seed_all(sample_seed(self.seed, epoch, number))
        sample = self._wrap(raw)
        self._check(sample)
        return sample

    def _without_known(
        self, task: StreamTask, kept: Kept, known: dict[int, MediaError]
    ) -> tuple[list[Any], list[BadSample]]:
        """The samples of a batch, None for the bad ones: what DALI could not decode is decoded here, if it can be."""
        samples, bad = [], []
        for number, sample, reason in kept.samples:
            if reason is not None:
                bad.append(reason)
            elif number in known:
                try:
                    for _, proxy in _proxies(sample, self.modality):
                        self.modality.settle(proxy)
                except Exception:  # PIL cannot either: DALI's reason is the one that was told first
                    bad.append(self._bad(task, number, known[number]))
                    sample = None
            samples.append(sample)
        return samples, bad

    def _any_good(self, task: BatchTask, bad: list[BadSample], known: dict[int, MediaError]) -> tuple[int, Any]:
        """When a whole batch is bad: the last good sample before it; without any, the next one of the stream."""
        assert isinstance(task, StreamTask)
        cursor = self._cursors[task.run]
        kept = cursor.kept[task.serial]
        if kept.spare is not None:
            return kept.spare
        for _ in range(0 if known else SEARCHED):  # one that is made again must not take from those that come after it
            for number, raw in self._take(replace(task, count=1), cursor):
                try:
                    sample = self._made(task.epoch, number, raw)
                except Exception:  # bad too: only a good one is looked for
                    continue
                kept.spare = cursor.spare = number, sample
                return number, sample
        raise BadSampleError(bad[0])

    def _skip(self, task: StreamTask) -> StreamEnd | Skipped:
        """Passes samples: they are drawn, as their draws may decide on those that follow, and nothing is made of them."""
        cursor = self._cursor(task)
        with seeded(batch_seed(self.seed, task.epoch, task.step), restore=self.restore_rng), captures_follow():
            drawn = self._take(task, cursor)
        self._look(cursor, drawn)
        if len(drawn) < task.count:
            return self._end(task, cursor, drawn)
        return Skipped(task, self._tell(task))
