"""What an executor is made from: a value that says which graph to build.

Written in the worker, read in the rank. Imports no DALI until something is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from lightning_dali.wire import Lane


@dataclass(frozen=True)
class Device:
    """Where a lane's graph runs and what it may use there."""

    index: int | None
    """CUDA device; None for the CPU."""
    num_threads: int = 4
    """DALI's CPU threads."""
    depth: int = 2
    """Batches in flight inside DALI."""
    hw_decoder_load: float = 1.0
    """Share of JPEGs given to the hardware decoder (docs/decisions)."""

    @property
    def torch_device(self) -> torch.device:
        """The same device, as torch names it."""
        import torch

        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)


class Executor(Protocol):
    """A built graph: feed, then collect in the same order."""

    def feed(self, lane: Lane) -> None:
        """Starts the work for one lane of a batch."""

    def collect(self, lane: Lane) -> Any:
        """Waits for the oldest batch fed: a tensor `(n, ...)`, or a list of n tensors of different sizes."""

    def close(self) -> None:
        """Frees what the graph holds."""


class LaneSpec(ABC):
    """A graph's definition. Equal specs share an executor."""

    @abstractmethod
    def merge(self, other: LaneSpec) -> LaneSpec | None:
        """A spec that serves what either of the two serves, or None when they need executors of their own."""

    @abstractmethod
    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the graph."""

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """(step, where it runs), in order, for `explain`."""
