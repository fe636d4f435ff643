"""How benchmarks here measure: samples a second in one-second slices, median and range, never a single number."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
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
        self.samples = 0
        self._slices: list[float] = []
        self._begin: float | None = None
        self._mark: float | None = None
        self._seen = 0

    @property
    def begun(self) -> bool:
        """Whether the warm-up is over: `samples` counts from there."""
        return self._mark is not None

    def tick(self) -> bool:
        """A batch is there; returns whether the time is up."""
        wait_for_device()
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now
        if now - self._begin < self.warm_up_seconds:
            return False
        if self._mark is None:
            self._mark = now
            return False
        self._seen += self.batch_size
        self.samples += self.batch_size
        if now - self._mark >= self.slice_seconds:
            self._slices.append(self._seen / (now - self._mark))
            self._mark, self._seen = now, 0
        # Slices end with a batch, so they are longer than asked for: the number of them counts, within bounds.
        enough = len(self._slices) * self.slice_seconds >= self.seconds
        self.done = enough or now - self._begin > self.warm_up_seconds + 3 * self.seconds
        return self.done

    @property
    def rate(self) -> Rate:
        """What was counted so far."""
        return Rate(tuple(self._slices))


def wait_for_device() -> None:
    """Waits for what a model's first kernel would wait for; what loaders do on streams of their own goes on."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def measure(batches: Iterable[Any], batch_size: int, *, seconds: float, **options: Any) -> Rate:
    """Consumes batches, which may be endless, and counts; the arguments are those of `Meter`."""
    meter = Meter(batch_size, seconds=seconds, **options)
    for _ in batches:
        if meter.tick():
            break
    return meter.rate


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def judged(name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """A line with a figure, the percent of its target that it is, and whether that is enough."""
    line = f"{name:<58} {value:10.3g}"
    if at_least is not None:
        return f"{line}   {100 * value / at_least:4.0f} % of at least {at_least:g}: {_verdict(value >= at_least)}"
    if at_most is not None:
        return f"{line}   {100 * value / at_most:4.0f} % of at most {at_most:g}: {_verdict(value <= at_most)}"
    return line


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"
