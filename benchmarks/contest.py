"""Several contenders in one process, by turns: what a noisy machine does to one of them it does to all.

A contender whose turn it is not stands still: its worker processes are stopped (SIGSTOP) and its threads have finished what they had
in hand, so that none refills its queues on the cores of another. One that fails, or gives nothing for too long, is left out with a
sentence. Every figure is printed when it is there, and SIGTERM (`timeout`) ends the measuring, not the printing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from ends import TOLD, Guard, Notice
from rates import Meter, Rate, judged, measure

LIMIT_SECONDS = 25.0
"""A turn that takes so much longer than it should is given up."""
ENTRY_SECONDS = 1.0
"""Of running that is not counted when a contender enters, after its first batch: caches fill, clocks rise."""
SETTLE_SECONDS, SETTLE_PERIOD, IDLE_CORES = 1.0, 0.1, 0.5
"""Between turns, at most; how long this process must be idle, and the cores that it may still use then (a thread that polls)."""
GRACE_SECONDS = 2.0
"""For the batch that is being made when SIGTERM comes."""

_abandoned: list[Any] = []
"""Contenders that are not to end by themselves: the process does."""

Batches = Generator[Any, None, None]


@dataclass(frozen=True)
class Contender:
    """Somebody who makes batches."""

    name: str
    batches: Callable[[], Batches]
    """Makes its generator of batches on the device, which never ends; closing it ends the contender."""
    batch_size: int
    """Samples a batch."""
    slices: int = 1
    """Slices a turn: more of them for a contender whose steadiness is judged."""
    warm_up_seconds: float | None = None
    """Of a turn, not counted; None: the contest's. Longer for one that holds many batches, or finds its pace again."""
    stands_still: bool = True
    """Whether its workers are stopped outside of its turns. Not one that times them: it would count the pauses."""


@dataclass
class Entry:
    """A contender in a contest, and what was measured of it."""

    contender: Contender
    slices: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When its turns were measured, by `time.perf_counter`."""
    cpu_seconds: float = 0.0
    """Spent in those turns by this process and the contender's workers."""
    samples: int = 0
    """Made in those turns."""
    failure: str | None = None
    batches: Batches | None = None
    workers: set[psutil.Process] = field(default_factory=set)

    @property
    def rate(self) -> Rate:
        """Samples a second."""
        return Rate(tuple(self.slices))

    @property
    def cpu_seconds_per_1000(self) -> float:
        """CPU seconds that 1,000 samples cost, over all processes."""
        return 1000 * self.cpu_seconds / self.samples if self.samples else 0.0


class Contest:
    """Measures contenders by turns; a context manager that ends them all.

    Args:
        rounds: How often each has its turn.
        slice_seconds: Length of a slice.
        warm_up_seconds: Of a turn, not counted: what was ready before the turn is consumed.
    """

    def __init__(self, *, rounds: int = 5, slice_seconds: float = 1.0, warm_up_seconds: float = 0.25) -> None:
        self.rounds, self.slice_seconds, self.warm_up_seconds = rounds, slice_seconds, warm_up_seconds
        self.entries: list[Entry] = []
        self._elsewhere = set(psutil.Process().children(recursive=True))
        self._stuck, self._settled_seconds = False, 0.0
        self._guard = Guard()
        self._notice = Notice(lambda: signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS))

    def __enter__(self) -> Contest:
        # The default action of SIGTERM would leave stopped workers behind; that of SIGALRM ends the process between turns.
        signal.signal(signal.SIGALRM, lambda *_: None)
        self._notice.__enter__()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._notice.given or (kind is not None and self._notice.awaited()):
            self._abandon()
        for entry in self.entries:
            self._close(entry)
        self._guard.close()
        if self._stuck:  # its threads would keep the interpreter from ending
            _leave(1)
        self._notice.__exit__()
        if self._notice.given:
            sys.exit(TOLD)

    def _abandon(self) -> None:
        """Ends the process, without the ends of contenders whose workers are gone: they take time and print tracebacks."""
        _abandoned.extend(self.entries)
        mine = {one for one in psutil.Process().children(recursive=True) if one.pid != self._guard.pid}
        _send(mine - self._elsewhere, signal.SIGKILL)
        self._guard.close()
        # Before the interpreter waits for threads. What surrounds this contest cleans up first.
        threading._register_atexit(_leave, TOLD)  # type: ignore[attr-defined]  # private: not in the stubs
        sys.exit(TOLD)

    def enter(self, contender: Contender) -> Entry:
        """Starts a contender and lets it run until it is warm."""
        entry, start = Entry(contender), time.perf_counter()
        self.entries.append(entry)
        with self._turn(entry, ENTRY_SECONDS):
            entry.batches = contender.batches()
            next(entry.batches)
            print(f"{contender.name}: first batch after {time.perf_counter() - start:.1f} s", flush=True)
            measure(entry.batches, contender.batch_size, seconds=ENTRY_SECONDS, warm_up_seconds=0)
        if self._notice.given:
            print("time ran out (SIGTERM) before the first round: nothing was measured", flush=True)
            sys.exit(TOLD)
        return entry

    def run(self) -> None:
        """Lets all have their turns, or as many as SIGTERM leaves time for, then prints a line for each."""
        try:
            for number in range(self.rounds):
                for entry in self.entries:
                    if entry.failure is None and not self._notice.given:
                        self._measure(entry, f"round {number + 1}/{self.rounds}")
        except Exception:  # DataLoader's handler of a worker's death raises wherever this process is
            if not self._notice.awaited():
                raise
        print(f"\n{self._notice}" if self._notice.given else "", flush=True)
        for entry in self.entries:
            print(f"{entry.contender.name:<44} {entry.failure or entry.rate}", flush=True)
        print(judged("seconds until contenders stood still, all turns", self._settled_seconds), flush=True)

    def _measure(self, entry: Entry, words: str) -> None:
        contender, seconds = entry.contender, entry.contender.slices * self.slice_seconds
        warm_up = self.warm_up_seconds if contender.warm_up_seconds is None else contender.warm_up_seconds
        meter = Meter(
            contender.batch_size, seconds=seconds, warm_up_seconds=warm_up, slice_seconds=self.slice_seconds
        )  # fmt: skip
        with self._turn(entry, warm_up + seconds):
            assert entry.batches is not None
            begin, end, cpu = 0.0, 0.0, 0.0
            for _ in entry.batches:
                if self._notice.given:
                    break
                begun, done, end = meter.begun, meter.tick(), time.perf_counter()
                if meter.begun and not begun:
                    begin, cpu = end, _cpu_seconds(entry.workers)
                if done:
                    entry.cpu_seconds += _cpu_seconds(entry.workers) - cpu
                    entry.samples += meter.samples
                    break
        if entry.failure is None and meter.rate.slices:
            entry.spans.append((begin, end))
            entry.slices += meter.rate.slices
            print(f"{words}  {contender.name}: {' '.join(f'{one:.0f}' for one in meter.rate.slices)} /s", flush=True)

    @contextlib.contextmanager
    def _turn(self, entry: Entry, seconds: float) -> Iterator[None]:
        """The contender's processes run within, and stand still outside; a failure in here ends it."""
        _send(entry.workers, signal.SIGCONT)
        try:
            with limited(seconds + LIMIT_SECONDS):
                yield
        except Exception as error:
            if not self._notice.awaited():
                entry.failure = f"left out: {type(error).__name__}: {error}".partition("\n")[0]
                print(f"{entry.contender.name}: {entry.failure}", flush=True)
                self._close(entry)
        if self._notice.given:
            return
        if entry.failure is None:
            entry.workers = self._workers_of(entry)
            if entry.contender.stands_still:
                self._guard.watch(entry.workers)
                _send(entry.workers, signal.SIGSTOP)
        begin = time.perf_counter()
        _settle(() if entry.contender.stands_still else entry.workers)
        self._settled_seconds += time.perf_counter() - begin

    def _workers_of(self, entry: Entry) -> set[psutil.Process]:
        """Those without children: what starts processes for others (a fork server) is not to stand still."""
        known = self._elsewhere.union(*(other.workers for other in self.entries if other is not entry))
        own = {one for one in psutil.Process().children(recursive=True) if one.pid != self._guard.pid} - known
        parents = set()
        for one in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                parents.add(one.ppid())
        return {one for one in own if one.pid not in parents}

    def _close(self, entry: Entry) -> None:
        _send(entry.workers, signal.SIGCONT)
        batches, entry.batches = entry.batches, None
        if batches is None:
            return
        try:
            with limited(LIMIT_SECONDS):
                batches.close()
        except Exception as error:
            print(f"{entry.contender.name} does not end: {type(error).__name__}: {error}", flush=True)
            self._stuck = True


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread when the time is up, and ends the process where that does not help."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"nothing came of it in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + LIMIT_SECONDS, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


def versus(one: Entry, other: Entry, **target: float) -> None:
    """Prints the ratio of two contenders' medians, and the percent of its target; nothing if one of them has none."""
    if one.slices and other.slices:
        ratio = one.rate.median / other.rate.median
        print(judged(f"{one.contender.name} / {other.contender.name}", ratio, **target), flush=True)


def add_arguments(parser: argparse.ArgumentParser, *, seconds: float = 1.0, peers: bool = True) -> None:
    """The options that all contests have."""
    if peers:
        parser.add_argument("--peers", action="store_true", help="also what one would pick instead, by turns with ours")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--seconds", type=float, default=seconds, help="length of a slice")


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def _settle(workers: Iterable[psutil.Process]) -> None:
    """Waits until this process and those have done what they had in hand: it is not to be done in the turn of another."""
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        before = _cpu_seconds(workers)
        time.sleep(SETTLE_PERIOD)
        if _cpu_seconds(workers) - before < IDLE_CORES * SETTLE_PERIOD:
            return


def _leave(status: int) -> None:
    """Ends the process here."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _cpu_seconds(workers: Iterable[psutil.Process]) -> float:
    """Of this process and those workers, so far."""
    seconds = time.process_time()
    for one in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            seconds += times.user + times.system
    return seconds
