"""One iteration over a stream in this process: where it stands, under which seed each sample is drawn, what it has kept.

Runs in the worker (with `num_workers=0` in the rank). Sample `n` of share `s` of `S` has the number `n * S + s`: where a dataset
deals its samples in turn, that is the sample's place in the whole stream, on any number of ranks and workers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch.utils.data._utils.worker as torch_worker

from lightning_dali.failures import BadSample
from lightning_dali.media import MediaError
from lightning_dali.sampling import StreamTask
from lightning_dali.seeding import seed_all, stream_seed
from lightning_dali.streams.state import OwnState

logger = logging.getLogger(__name__)

Scope = Callable[[], AbstractContextManager[Any]]
"""Makes what a dataset is run in: a capture of its decoding, or none."""
Drawn = tuple[int, Any]
"""A sample's number, and what the dataset gave."""
REPLAYED = 256
"""How many samples are drawn once more when a dataset turns out to insist on real images, all of which it then decodes."""
_END = object()


@dataclass(frozen=True)
class Share:
    """Which part of the stream a process iterates over."""

    number: int = 0
    """In [0, of): rank by rank, in each of them worker by worker."""
    of: int = 1
    """Processes that iterate."""

    def name(self, position: int) -> int:
        """The number of the sample at a position of this share."""
        return position * self.of + self.number


_share = Share()


def this_share() -> Share:
    """That of this process, while a dataset is iterated."""
    return _share


@dataclass
class Kept:
    """What a batch was made of, for when it has to be made again."""

    samples: list[tuple[int, Any, BadSample | None]]
    """(number, sample or None, why it is None)."""
    spare: Drawn | None
    """A good sample from before the batch."""


@dataclass(eq=False)
class Cursor:
    """One iteration over a dataset, under seeds.

    Args:
        dataset: The user's.
        own: Its own place, if it has one.
        seed: Of the run.
        epoch: Of the draws.
        share: Of this process.
        scope: What the dataset is run in.
        fallbacks: What to run it in instead, in order, when it fails there; by name.
    """

    dataset: Any
    own: OwnState
    seed: int
    epoch: int
    share: Share
    scope: Scope
    fallbacks: dict[str, Scope] = field(default_factory=dict)
    position: int = 0
    """Samples that lie behind."""
    ended: bool = False
    fell_back: dict[str, str] = field(default_factory=dict)
    """The fallback that it came to, with the reason."""
    rest: list[Drawn] = field(default_factory=list)
    """What did not fill the last batch."""
    kept: OrderedDict[int, Kept] = field(default_factory=OrderedDict)
    """By the serial number of the task."""
    spare: Drawn | None = None
    """The last good sample."""
    from_start: bool = True
    """Whether it began with the stream."""
    first: str | None = None
    """Fingerprint of the first samples, until it is told."""
    lap: int = 0
    """How often the pass had begun the stream before."""
    _iterator: Any = None
    _resumed: StreamTask | None = None
    """The task whose state it began with, until that proved to be good."""

    def begin(self, task: StreamTask) -> None:
        """Makes the dataset's iterator: where the task's state was taken, else at the beginning."""
        global _share
        _share = self.share
        _tell_worker_info(stream_seed(self.seed, self.epoch, -1 - self.share.number))
        self.own.begin(task.state, task.order_epoch)
        self.position, self.from_start = task.position, task.state is None
        self._resumed = None if task.state is None else task
        self._iterator = self._iterate(self.scope)

    def _iterate(self, scope: Scope) -> Any:
        seed_all(stream_seed(self.seed, self.epoch, -1 - self.share.number))
        with scope():
            return iter(self.dataset)

    def take(self, count: int) -> list[Drawn]:
        """The next samples, fewer when the stream ends.

        Raises:
            Exception: Whatever the dataset's iterator raised. It has ended then.
        """
        taken: list[Drawn] = []
        while len(taken) < count and not self.ended:
            number = self.share.name(self.position)
            sample = self._draw(number)
            if sample is _END:
                self.ended = True
            else:
                taken.append((number, sample))
                self.position += 1
        return taken

    def _draw(self, number: int) -> Any:
        resumed, self._resumed = self._resumed, None
        try:
            return self._next(self._iterator, number, self.scope)
        except Exception as error:
            if resumed is not None:
                return self._pass_by(resumed, number, error)
            if isinstance(error, (OSError, MediaError)) or self.position > REPLAYED or not self.from_start:
                self.ended = True
                raise
            return self._draw_again(number, error)

    def _next(self, iterator: Any, number: int, scope: Scope) -> Any:
        seed_all(stream_seed(self.seed, self.epoch, number))
        with scope():
            return next(iterator, _END)

    def _draw_again(self, number: int, error: Exception) -> Any:
        """Perhaps the dataset insists on a real PIL image: the same stream with pixels, up to the same sample."""
        for name, scope in self.fallbacks.items():
            try:
                iterator = self._iterate(scope)
                for passed in range(self.position):
                    self._next(iterator, self.share.name(passed), scope)
                sample = self._next(iterator, number, scope)
            except Exception as again:
                logger.debug("%s with %s not captured: %s", type(self.dataset).__name__, name, again)
                continue
            self._iterator, self.scope, self.fallbacks = iterator, scope, {}
            self.fell_back = {name: f"{type(error).__name__}: {error}"}
            return sample
        self.ended = True
        raise error

    def _pass_by(self, task: StreamTask, number: int, error: Exception) -> Any:
        """Comes to the same place without the dataset's own state, which it could not read."""
        logger.warning(
            "%s could not go on from its own state (%s: %s): its first %d sample(s) are passed one by one.",
            *(type(self.dataset).__name__, type(error).__name__, error, self.position),
        )
        self._iterator = None
        self.own.begin(None, task.order_epoch)
        self._iterator, self.from_start = self._iterate(self.scope), True
        for passed in range(self.position):
            self._next(self._iterator, self.share.name(passed), self.scope)
        return self._draw(number)

    def keep(self, task: StreamTask, kept: Kept) -> None:
        """Keeps what a batch was made of; what is too old is dropped."""
        self.kept[task.serial] = kept
        while len(self.kept) > task.keep:
            self.kept.popitem(last=False)

    def close(self) -> None:
        """Lets go of the iterator and of what was kept; a generator's own clean-up runs here."""
        self.ended, self._iterator = True, None
        self.kept.clear()
        self.rest.clear()


def _tell_worker_info(seed: int) -> None:
    """Gives `torch.utils.data.get_worker_info().seed` a value of this epoch's, as torch does."""
    known = torch_worker.get_worker_info()
    if known is not None:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=known.id, num_workers=known.num_workers, seed=seed, dataset=known.dataset
        )
