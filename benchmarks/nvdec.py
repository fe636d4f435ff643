"""How busy the GPU's video decoders are: what `nvidia-smi dmon -s u` shows, read from the driver's library as that does."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

PERIOD_SECONDS = 0.1
LIBRARY = "libnvidia-ml.so.1"


class Utilisation:
    """Reads it ten times a second while it is entered; where there is no driver it knows nothing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            nvml = ctypes.CDLL(LIBRARY)
        except OSError:  # no driver: `percent` then says None, and nothing is judged
            return
        device, percent, period_us = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
            return
        while not self._stop.wait(PERIOD_SECONDS):
            if nvml.nvmlDeviceGetDecoderUtilization(device, ctypes.byref(percent), ctypes.byref(period_us)) == 0:
                self._samples.append((time.perf_counter(), percent.value))
        nvml.nvmlShutdown()

    def percent(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """The mean over some spans of `time.perf_counter`; None where it was not told."""
        inside = [busy for when, busy in list(self._samples) if any(begin <= when < end for begin, end in spans)]
        return statistics.fmean(inside) if inside else None
