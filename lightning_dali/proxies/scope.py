"""Which kind of media this thread captures at the moment.

Runs in the worker (and, with `num_workers=0`, in the rank's own process, where other threads must not notice).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_active = threading.local()


def captured_kind() -> str:
    """ "image", "audio", or nothing."""
    kind: str = getattr(_active, "kind", "")
    return kind


@contextmanager
def capturing(kind: str) -> Iterator[None]:
    """Sets the kind for this thread and puts the former one back."""
    before = captured_kind()
    _active.kind = kind
    try:
        yield
    finally:
        _active.kind = before


def no_capture() -> AbstractContextManager[None]:
    """Suspends the capture in this thread: what is decoded inside comes as pixels."""
    return capturing("")
