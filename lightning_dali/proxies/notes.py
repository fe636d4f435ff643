"""Why a sample's pixels were needed in the worker: collected while the sample is made.

Runs in the worker. A proxy that was materialised may be gone when the sample is finished, so it cannot be asked then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_current = threading.local()


def note(reason: str) -> None:
    """Says that pixels were needed, and by what."""
    reasons: set[str] | None = getattr(_current, "reasons", None)
    if reasons is not None:
        reasons.add(reason)


@contextmanager
def collect_notes(into: set[str]) -> Iterator[None]:
    """While it is open, this thread's notes are added to `into`."""
    before = getattr(_current, "reasons", None)
    _current.reasons = into
    try:
        yield
    finally:
        _current.reasons = before
