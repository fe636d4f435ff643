"""What an executor is made from: a value that says which graph to build.

Written in the worker, read in the rank. Imports no DALI until something is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    channels_last: bool = False
    """Whether image batches lie in memory as (B, H, W, C); their shape stays (B, C, H, W)."""
    outputs_on_cpu: bool = False
    """Whether batches are delivered in host memory."""
    pipelines: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Users' own pipelines (`graph.custom.PipelineEntry`) by the name that lanes carry; they never leave the rank."""

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
        """Waits for the oldest batch fed: a tensor `(n, ...)`, or a list of n tensors of different sizes.

        A graph with several outputs gives something with `[row]` and `stack_rows(rows)` instead (`graph.custom.Outputs`).
        """

    def close(self) -> None:
        """Frees what the graph holds."""


class LaneSpec(ABC):
    """A graph's definition. Equal specs share an executor."""

    @abstractmethod
    def merge(self, other: LaneSpec) -> LaneSpec | None:
        """A spec that serves what either of the two serves, or None when they need executors of their own."""

    def in_epoch(self, epoch: int) -> LaneSpec:
        """The spec for a batch of that epoch: this one, unless the graph has random state of its own."""
        return self

    @abstractmethod
    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the graph."""

    @abstractmethod
    def describe(self) -> list[tuple[str, str]]:
        """(step, where it runs), in order, for `explain`."""
