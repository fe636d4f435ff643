"""Who holds memory in this rank, whether it grows from epoch to epoch, and how what nobody uses goes back. Runs in the rank."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
from collections import deque
from dataclasses import dataclass

import torch

__all__ = ["Growth", "MemoryReport", "give_back", "measure"]

logger = logging.getLogger(__name__)

_MB = 1e6
EPOCHS = 5
"""So many reports in a row must rise before a warning: caches fill in the first epochs."""
GROWTH = 0.05
"""What they must rise by together, as a share of the first."""
GROWTH_BYTES = 64_000_000
"""And in bytes."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank, in bytes; print it."""

    rank: int
    device: str
    device_total: int
    """All of the device's memory; the device's numbers are 0 on the CPU."""
    device_used: int
    """Used on the device, by every process there."""
    torch_allocated: int
    """Held by torch tensors of this process."""
    torch_reserved: int
    """Kept by torch's allocator, the allocated included."""
    host_resident: int
    """Of this process in host memory; workers not counted."""
    host_slabs: int
    """Shared memory in which batches come from workers."""

    @property
    def dali_and_other(self) -> int:
        """Used on the device but not torch's: DALI, CUDA itself, other processes. DALI does not tell its own share."""
        return max(0, self.device_used - self.torch_reserved)

    def __str__(self) -> str:
        device = (
            f"{self.device_used / _MB:.0f} of {self.device_total / _MB:.0f} MB used: torch {self.torch_reserved / _MB:.0f} "
            f"(allocated {self.torch_allocated / _MB:.0f}), DALI and others {self.dali_and_other / _MB:.0f}"
        )
        return (
            f"rank {self.rank} on {self.device}: {device if self.device_total else 'no device memory'}; host: process "
            f"{self.host_resident / _MB:.0f} MB, slabs {self.host_slabs / _MB:.0f} MB"
        )


def measure(*, rank: int, device_index: int | None, host_slabs: int) -> MemoryReport:
    """Reads the counters, now.

    Args:
        rank: For the report.
        device_index: The CUDA device; None for the CPU.
        host_slabs: What the loaders' worker pools hold.
    """
    total = used = allocated = reserved = 0
    if device_index is not None:
        free, total = torch.cuda.mem_get_info(device_index)
        used = total - free
        allocated = torch.cuda.memory_allocated(device_index)
        reserved = torch.cuda.memory_reserved(device_index)
    return MemoryReport(
        rank=rank,
        device="cpu" if device_index is None else f"cuda:{device_index}",
        device_total=total,
        device_used=used,
        torch_allocated=allocated,
        torch_reserved=reserved,
        host_resident=_resident_bytes(),
        host_slabs=host_slabs,
    )


def _resident_bytes() -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back(device_index: int | None) -> None:
    """Gives device memory that nothing uses back to the device: DALI's pool, and what torch's allocator keeps.

    Call it when passes are stopped and graphs are closed; tensors in use stay where they are.

    Args:
        device_index: The CUDA device; nothing is done for the CPU (None), nor where CUDA or DALI was never used.
    """
    if device_index is None:
        return
    gc.collect()  # closed pipelines and their outputs may be part of cycles
    backend = sys.modules.get("nvidia.dali.backend")
    if backend is not None:
        backend.ReleaseUnusedMemory()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Growth:
    """Warns, once for each kind of memory, when it has risen in every one of the last reports."""

    KINDS = ("device_used", "host_resident", "host_slabs")

    def __init__(self) -> None:
        self._seen: dict[str, deque[int]] = {kind: deque(maxlen=EPOCHS + 1) for kind in self.KINDS}
        self._warned: set[str] = set()

    def note(self, report: MemoryReport) -> list[str]:
        """Takes one report, an epoch's say; returns what it warned of."""
        warnings = []
        for kind, seen in self._seen.items():
            seen.append(getattr(report, kind))
            values = list(seen)
            rose = values[-1] - values[0]
            rises = all(late > early for early, late in itertools.pairwise(values))
            enough = rose > max(GROWTH * values[0], GROWTH_BYTES)
            if len(values) <= EPOCHS or not rises or not enough or kind in self._warned:
                continue
            self._warned.add(kind)
            warnings.append(
                f"{kind} of rank {report.rank} rose in each of the last {EPOCHS} epochs, by {rose / _MB:.0f} MB to "
                f"{values[-1] / _MB:.0f} MB: something keeps batches or their graph alive (a list of losses that are not "
                "detached?), or sizes differ so much that pools still grow; release_memory='epoch' gives DALI's back."
            )
        for warning in warnings:
            logger.warning(warning)
        return warnings
