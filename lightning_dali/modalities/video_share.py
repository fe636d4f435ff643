"""Which clips of a batch a worker decodes itself, so that neither it nor NVDEC idles.

Runs in the worker. The estimate of the worker's own speed is measured as it goes; that of NVDEC was measured once
(docs/decisions/0004). The choice decides only where a clip is decoded, never which frames it has.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

from lightning_dali.media import VideoError

logger = logging.getLogger(__name__)

SECONDS_A_FRAME = 66e-6
"""NVDEC, all decoders of an H200 together: per decoded frame, whatever its size."""
SECONDS_A_PIXEL = {"h264": 1.3e-10, "hevc": 0.6e-10}
"""And per pixel of it."""
CPU_SECONDS_A_PIXEL = 6e-9
"""One core with PyAV, before anything was measured."""
SMOOTHING = 0.1
"""Weight of the latest measurement."""


class Share:
    """Divides clips between the device and this worker.

    Args:
        num_workers: Workers that decode beside each other.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.cpu_seconds_a_pixel = CPU_SECONDS_A_PIXEL

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of_this_worker(num_workers: int) -> Share:
        """The one that has measured this process so far."""
        return Share(num_workers)

    def choose(self, items: Sequence[Any]) -> list[Any]:
        """The clips that the worker had better decode, and decodes here: those that cost it least beside the device.

        All workers together make `num_workers` batches in the time that one takes for its own, so the batch is balanced
        when the worker's part takes `num_workers` times as long as the device's.

        Args:
            items: Each with a `job` (`graph.video.ClipJob`) and a `source` (`VideoSource`).
        """
        hardware = sum(self._hardware_seconds(item) for item in items)
        own = 0.0
        chosen = []
        for item in sorted(items, key=lambda item: self._cpu_seconds(item) / self._hardware_seconds(item)):
            device, cpu = self._hardware_seconds(item), self._cpu_seconds(item)
            if own + cpu > self.num_workers * (hardware - device):
                break
            start = time.perf_counter()
            try:
                item.source.frames()
            except VideoError as error:  # the device has the last word, and says which sample it was
                logger.debug("left to the device: %s", error)
                continue
            self._learn(item, time.perf_counter() - start)
            own, hardware = own + cpu, hardware - device
            chosen.append(item)
        return chosen

    def _learn(self, item: Any, seconds: float) -> None:
        measured = seconds / self._pixels(item)
        self.cpu_seconds_a_pixel += SMOOTHING * (measured - self.cpu_seconds_a_pixel)

    def _pixels(self, item: Any) -> int:
        return int(item.job.num_frames * item.job.width * item.job.height)

    def _cpu_seconds(self, item: Any) -> float:
        return self._pixels(item) * self.cpu_seconds_a_pixel

    def _hardware_seconds(self, item: Any) -> float:
        per_pixel = SECONDS_A_PIXEL.get(item.job.codec, SECONDS_A_PIXEL["h264"])
        return float(item.job.num_frames * SECONDS_A_FRAME + self._pixels(item) * per_pixel)
