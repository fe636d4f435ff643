"""What a dataset knows of its own place: `state_dict` and `load_state_dict`, where it has them. Runs in the worker."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_UNKNOWN = object()


class OwnState:
    """A dataset's own place in its stream.

    Args:
        dataset: Of any kind.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.there = has_own_state(dataset)
        """Whether the dataset has one."""
        self._initial: Any = _UNKNOWN
        self._used = False

    def begin(self, state: Any, epoch: int) -> None:
        """Tells the dataset the epoch, and puts it where `state` was taken; None: at the beginning, wherever it was left."""
        if self.there and not self._used:
            self._initial = self._look()
        if state is None and self._used:
            self._begin_anew()
        set_epoch(self._dataset, epoch)
        if state is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        self._used = True

    def _begin_anew(self) -> None:
        reset = getattr(self._dataset, "reset_state_dict", None)  # litdata's
        if callable(reset):
            reset()
        elif self.there and self._initial is not _UNKNOWN:
            self._dataset.load_state_dict(copy.deepcopy(self._initial))

    def now(self) -> Any:
        """The dataset's state after what it gave last; None: it has none."""
        return copy.deepcopy(self._dataset.state_dict()) if self.there else None

    def _look(self) -> Any:
        try:
            return copy.deepcopy(self._dataset.state_dict())
        except Exception as error:  # some have none before they were begun
            logger.debug("%s.state_dict() before the first sample: %s", type(self._dataset).__name__, error)
            return _UNKNOWN


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tells a dataset the epoch, if it wants to know. To be called in the rank before it is called in the workers.

    Hugging Face's streams have the number in memory that they share with their workers, who would all add to it if they were
    told at the same time (`datasets` 5.2): there the rank's word is enough.
    """
    tell = getattr(dataset, "set_epoch", None)
    shared = getattr(dataset, "_epoch", None)
    if callable(tell) and not (isinstance(shared, torch.Tensor) and shared.is_shared() and int(shared) == epoch):
        tell(epoch)


def has_own_state(dataset: Any) -> bool:
    """Whether it has `state_dict()` and `load_state_dict(state)`."""
    save, load = getattr(dataset, "state_dict", None), getattr(dataset, "load_state_dict", None)
    return callable(save) and callable(load) and _takes(save, 0) and _takes(load, 1)


def told_state(dataset: Any, epoch: int, *, batches: int, batch_size: int, num_workers: int) -> Any:
    """The state of a dataset that is told how far its workers are, as litdata's are; None: it is none of these.

    To be called in the rank. The same state is for all of its workers.

    Args:
        dataset: Of any kind.
        epoch: Which one.
        batches: That this rank has behind it, dealt by its workers in turn.
        batch_size: Samples of each.
        num_workers: Of this rank.
    """
    save = getattr(dataset, "state_dict", None)
    names = {"num_samples_yielded", "num_workers", "batch_size"}
    if not callable(save) or not callable(getattr(dataset, "load_state_dict", None)):
        return None
    if not names <= set(inspect.signature(save).parameters):
        return None
    set_epoch(dataset, epoch)
    return save(num_samples_yielded=batches * batch_size, num_workers=num_workers, batch_size=batch_size)


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*([None] * count))
    except (TypeError, ValueError):  # other arguments; or a builtin that tells none
        return False
    return True
