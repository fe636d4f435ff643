"""What a worker answers beside batches: where its stream stands, and that it has ended. Crosses from worker to rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_dali.sampling import Rest, StreamTask


@dataclass(frozen=True)
class Told:
    """What a worker says of its stream beside a batch."""

    first: str | None = None
    """Fingerprint of its first samples, once a pass."""
    position: int = 0
    """Samples that it has behind it."""
    state: Any = None
    """The dataset's own state there; None: it has none."""


@dataclass(frozen=True)
class StreamEnd:
    """A worker's stream gives no more."""

    task: StreamTask
    """In which that showed."""
    told: Told
    rest: Rest | None = None
    """The samples that did not fill a batch; None: there are none, or they were told before."""


@dataclass(frozen=True)
class Skipped:
    """A task's samples were passed."""

    task: StreamTask
    told: Told
