"""Which kinds of media this thread captures at the moment.

Runs in the worker (and, with `num_workers=0`, in the rank's own process, where other threads must not notice).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_active = threading.local()
_NOTHING: frozenset[str] = frozenset()


def captured_kinds() -> frozenset[str]:
    """Of "image", "video", "audio" those that are captured."""
    kinds: frozenset[str] = getattr(_active, "kinds", _NOTHING)
    return kinds


@contextmanager
def _only(kinds: frozenset[str]) -> Iterator[None]:
    """Sets the kinds for this thread and puts the former ones back."""
    before = captured_kinds()
    _active.kinds = kinds
    try:
        yield
    finally:
        _active.kinds = before


def capturing(kind: str) -> AbstractContextManager[None]:
    """Adds a kind to those that this thread captures."""
    return _only(captured_kinds() | {kind})


def no_capture() -> AbstractContextManager[None]:
    """Suspends all capture in this thread: what is decoded inside comes as pixels and samples."""
    return _only(_NOTHING)
