"""How busy the GPU's video decoders are, as `nvidia-smi` says."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

PERIOD_MS = 100


class Utilisation:
    """Asks ten times a second, in a process of its own, while it is entered; asks nobody where the program is missing."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Utilisation:
        program = shutil.which("nvidia-smi")
        if program is not None:
            query = [
                "--query-gpu=utilization.decoder",
                "--format=csv,noheader,nounits",
                f"--loop-ms={PERIOD_MS}",
                "--id=0",
            ]
            self._process = subprocess.Popen(
                [program, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]"
                self._samples.append((time.perf_counter(), float(line)))

    def __exit__(self, *_: Any) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def percent(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """The mean over some spans of `time.perf_counter`; None where it was not told."""
        inside = [busy for when, busy in list(self._samples) if any(begin <= when < end for begin, end in spans)]
        return statistics.fmean(inside) if inside else None
