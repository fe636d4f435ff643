"""How benchmarks here measure: samples a second in one-second slices, median and range, never a single number."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rate:
    """Samples a second over the slices of one run."""

    slices: tuple[float, ...]
    """One figure a slice."""

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.slices) if self.slices else 0.0

    @property
    def tenth_percentile(self) -> float:
        """How slow the slow slices are."""
        return sorted(self.slices)[len(self.slices) // 10] if self.slices else 0.0

    def __str__(self) -> str:
        if not self.slices:
            return "too short to measure"
        low, high = min(self.slices), max(self.slices)
        return (
            f"{self.median:10.0f} /s  ({low:.0f} - {high:.0f}, p10 {self.tenth_percentile:.0f}, n {len(self.slices)})"
        )


class Meter:
    """Counts a batch at each `tick`, as `measure` does, where something else drives the loop.

    Args:
        batch_size: Samples a batch.
        seconds: How long to measure after the warm-up.
        warm_up_seconds: Not counted, from the first batch on.
        slice_seconds: Length of a slice.
    """

    def __init__(
        self, batch_size: int, *, seconds: float, warm_up_seconds: float = 2.0, slice_seconds: float = 1.0
    ) -> None:
        self.batch_size, self.seconds = batch_size, seconds
        self.warm_up_seconds, self.slice_seconds = warm_up_seconds, slice_seconds
        self.done = False
        self._slices: list[float] = []
        self._begin: float | None = None
        self._mark: float | None = None
        self._seen = 0

    def tick(self) -> bool:
        """A batch is there; returns whether the time is up."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now
        if now - self._begin < self.warm_up_seconds:
            return False
        if self._mark is None:
            self._mark = now
            return False
        self._seen += self.batch_size
        if now - self._mark >= self.slice_seconds:
            self._slices.append(self._seen / (now - self._mark))
            self._mark, self._seen = now, 0
        self.done = now - self._begin > self.warm_up_seconds + self.seconds
        return self.done

    @property
    def rate(self) -> Rate:
        """What was counted so far."""
        return Rate(tuple(self._slices))


def measure(batches: Iterable[Any], batch_size: int, *, seconds: float, **options: Any) -> Rate:
    """Consumes batches, which may be endless, and counts; the arguments are those of `Meter`."""
    meter = Meter(batch_size, seconds=seconds, **options)
    for _ in batches:
        if meter.tick():
            break
    return meter.rate


def endless(loader: Iterable[Any]) -> Iterable[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader
