"""How a benchmark ends before its time: what `timeout` and schedulers send, and stopped workers that nobody would wake any more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

TOLD = 128 + signal.SIGTERM
"""Exit status of a benchmark that was told to end."""


class Notice:
    """Takes note of SIGTERM instead of ending at once, so that what was measured is printed; a context manager.

    Args:
        then: Called when it comes.
    """

    AWAITED_SECONDS = 0.3

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.given, self._then, self._before = False, then, signal.getsignal(signal.SIGTERM)

    def __enter__(self) -> Notice:
        self.listen()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.given:
            signal.signal(signal.SIGTERM, self._before)

    def listen(self) -> None:
        """Listens, also where somebody else has begun to meanwhile."""
        signal.signal(signal.SIGTERM, self._come)

    def _come(self, *_: Any) -> None:
        if not self.given:
            self.given = True
            # The signal is for all processes of the command. Where DataLoader's workers die of it, its own handler raises, here.
            signal.signal(signal.SIGCHLD, lambda *_: None)
            self._then()

    def awaited(self) -> bool:
        """Whether it has come, or comes in a moment: something failed, perhaps because a worker was told first."""
        end = time.perf_counter() + self.AWAITED_SECONDS
        while not self.given and time.perf_counter() < end:
            time.sleep(0.01)
        return self.given

    def __str__(self) -> str:
        return "time ran out (SIGTERM): what follows was measured until then"


class Guard:
    """A process that kills stopped workers when this one is gone: they cannot notice it themselves, however it ended.

    One that has ended meanwhile (OSError) needs nothing.
    """

    SCRIPT = (
        "import os, signal, sys\n"
        "numbers = {int(number) for line in sys.stdin for number in line.split()}\n"
        "for number in numbers:\n"
        "    try:\n        os.kill(number, signal.SIGKILL)\n"
        "    except OSError:\n        pass\n"
    )

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its own."""
        return self._process.pid

    def watch(self, workers: Iterable[psutil.Process]) -> None:
        """These are to go with this process."""
        assert self._process.stdin is not None
        print(*(one.pid for one in workers), file=self._process.stdin, flush=True)

    def close(self) -> None:
        """All of them have ended: nothing is left to guard."""
        self._process.kill()
        self._process.wait()
