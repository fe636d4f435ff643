"""How fast a loader is and what holds it back, in numbers and in one sentence. Runs in the rank.

`Totals` is what a loader counts as it goes; `monitor` and `lightning-dali bench` read it. Counting costs two microseconds a
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Totals", "advice"]

STAGES = ("fetch", "pack", "decode")
"""Where a batch spends time: `fetch` and `pack` in one worker, `decode` in the server's thread."""
ENOUGH = 0.05
"""A share of waiting below this is no problem: nothing that can be set would be felt."""


@dataclass
class Totals:
    """What a loader has delivered so far, over all its passes."""

    batches: int = 0
    samples: int = 0
    waited_seconds: float = 0.0
    """How long the consumer stood still for batches, those that begin a pass excepted."""
    start_seconds: float = 0.0
    """How long it stood still for the first batch of each pass: workers and graphs start there."""
    passes: int = 0
    queued: int = 0
    """Batches that were ready when one was asked for, added up."""
    nbytes: int = 0
    """Bytes that came from workers through shared memory."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Work by stage; workers work at the same time, so it may exceed the time that passed."""

    def add(
        self,
        *,
        samples: int,
        waited_seconds: float,
        first: bool,
        queued: int,
        nbytes: int,
        seconds: Mapping[str, float],
    ) -> None:
        """Counts one batch."""
        self.batches += 1
        self.samples += samples
        self.queued += queued
        self.nbytes += nbytes
        if first:
            self.passes += 1
            self.start_seconds += waited_seconds
        else:
            self.waited_seconds += waited_seconds
        for stage in STAGES:
            self.seconds[stage] += seconds.get(stage, 0.0)

    def copy(self) -> Totals:
        """The numbers as they are now."""
        return Totals(**{**self.__dict__, "seconds": dict(self.seconds)})

    def since(self, earlier: Totals) -> Totals:
        """What has been added since `earlier` was copied."""
        numbers = {
            name: value - getattr(earlier, name) for name, value in self.__dict__.items() if not isinstance(value, dict)
        }
        return Totals(**numbers, seconds={name: self.seconds[name] - earlier.seconds[name] for name in STAGES})

    def __add__(self, other: Totals) -> Totals:
        numbers = {
            name: value + getattr(other, name) for name, value in self.__dict__.items() if not isinstance(value, dict)
        }
        return Totals(**numbers, seconds={name: self.seconds[name] + other.seconds[name] for name in STAGES})

    def per_batch(self, stage: str) -> float:
        """Seconds of work that one batch takes in a stage."""
        return self.seconds[stage] / self.batches if self.batches else 0.0


def advice(totals: Totals, *, wait_share: float | None, num_workers: int, cores: int, on_gpu: bool) -> str:
    """One sentence: what limits the run, and which setting to change.

    Args:
        totals: Of the stretch that is judged.
        wait_share: Of its time that the model waited for data; None: there was no model.
        num_workers: Of the loader.
        cores: Of this rank.
        on_gpu: Whether DALI runs on a GPU.
    """
    if not totals.batches:
        return "No batch came: nothing to judge."
    waits = "Without a model:" if wait_share is None else f"The model waits {100 * wait_share:.0f} % of the time:"
    if wait_share is not None and wait_share < ENOUGH:
        return f"The model is the limit (it waits for data {100 * wait_share:.0f} % of the time): faster data would not be felt."
    worker = (totals.per_batch("fetch") + totals.per_batch("pack")) / max(1, num_workers)
    server = totals.per_batch("decode")
    if num_workers == 0:
        return f"{waits} batches are made in its own process: set num_workers={max(1, min(8, cores // 2))}."
    # The server's time contains waiting for DALI, so it is called the limit only where workers cannot be.
    if worker >= 0.8 * server:
        made = f"the {num_workers} worker(s) make a batch every {1000 * worker:.0f} ms"
        if num_workers < cores - 1:
            return f"{waits} {made}: raise num_workers (this rank has {cores} cores)."
        return (
            f"{waits} {made} and all {cores} cores of this rank are in use: see what is "
            "materialised with datamodule.explain(), read from a faster disk, or give the rank more cores."
        )
    where = "the GPU" if on_gpu else "the CPU"
    change = (
        "raise hw_decoder_load or depth, or store smaller images"
        if on_gpu
        else "raise num_threads if cores are idle, or run DALI on a GPU"
    )
    return f"{waits} decoding on {where} takes {1000 * server:.0f} ms a batch: {change}."
