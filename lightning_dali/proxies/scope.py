"""Which kinds of media this thread captures at the moment.

Runs in the worker (and, with `num_workers=0`, in the rank's own process, where other threads must not notice).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

_active = threading.local()
_NOTHING: frozenset[str] = frozenset()


def captured_kinds() -> frozenset[str]:
    """Of "image", "video", "audio" those that are captured."""
    kinds: frozenset[str] = getattr(_active, "kinds", _NOTHING)
    return kinds


class _Only:
    """Sets the kinds for this thread and puts the former ones back. A class, since it is opened for each sample."""

    __slots__ = ("_before", "_kinds")

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        self._before = captured_kinds()
        _active.kinds = self._kinds

    def __exit__(self, *_: object) -> None:
        _active.kinds = self._before


def capturing(kind: str) -> AbstractContextManager[None]:
    """Adds a kind to those that this thread captures."""
    return _Only(captured_kinds() | {kind})


def no_capture() -> AbstractContextManager[None]:
    """Suspends all capture in this thread: what is decoded inside comes as pixels and samples."""
    return _Only(_NOTHING)
