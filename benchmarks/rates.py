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


def measure(
    batches: Iterable[Any], batch_size: int, *, seconds: float, warm_up_seconds: float = 2.0, slice_seconds: float = 1.0
) -> Rate:
    """Consumes batches and counts.

    Args:
        batches: Whatever yields a batch of `batch_size` samples; may be endless.
        batch_size: Samples a batch.
        seconds: How long to measure after the warm-up.
        warm_up_seconds: Not counted, from the first batch on.
        slice_seconds: Length of a slice.
    """
    slices: list[float] = []
    begin = mark = None
    seen = 0
    for _ in batches:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if begin is None:
            begin = now
        if now - begin < warm_up_seconds:
            continue
        if mark is None:
            mark = now
            continue
        seen += batch_size
        if now - mark >= slice_seconds:
            slices.append(seen / (now - mark))
            mark, seen = now, 0
        if now - begin > warm_up_seconds + seconds:
            break
    return Rate(tuple(slices))


def endless(loader: Iterable[Any]) -> Iterable[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader
