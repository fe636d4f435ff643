"""The fault table: where a run may fail, and how it must end. `python -m lightning_dali.testing faults module:function`.

Runs in a process beside the ones that are judged: each fault gets a process of its own (`fault_run.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lightning_dali.failures import check_choice
from lightning_dali.testing import leaks

__all__ = ["FAULTS", "Outcome", "play", "play_all"]

FAULTS: dict[str, str] = {
    "training_step": "FaultError: injected: training_step",
    "validation_step": "FaultError: injected: validation_step",
    "callback": "FaultError: injected: callback",
    "dataset": "FaultError: injected: dataset",
    "transform": "FaultError: injected: transform",
    "collate": "FaultError: injected: collate",
    "server_build": "FaultError: injected: server_build",
    "server_run": "FaultError: injected: server_run",
    "two_at_once": "FaultError: injected: training_step",
    "worker_killed": "WorkerError: worker ",
    "sigint": "",
    "sigint_twice": "",
    "stuck_sigint": "",
    "sanity_sigint": "",
    "sigterm": "",
    "exit": "",
}
"""Where it fails, and what the last line of stderr must say (nothing in particular where a signal ends it).

`server_build` and `server_run` fail in the server's thread; `two_at_once` in the dataset and then in `training_step`; `stuck_sigint` is Ctrl-C while the dataset does not answer,
`sanity_sigint` while Lightning checks validation; `exit` ends the interpreter with a pass that is still running.
"""
END_SECONDS = 5.0
"""From the fault to the end of the process."""
RANKS_END_SECONDS = 15.0
"""The same where several ranks are started by Lightning, which looks after its children every 5 s."""
_NO_WORKER_NEEDED = "no worker was needed any more, since all batches were under way: a longer dataset shows the error"
_SIGNALS = {
    "sigint": (signal.SIGINT,),
    "sigint_twice": (signal.SIGINT, signal.SIGINT),
    "stuck_sigint": (signal.SIGINT,),
    "sanity_sigint": (signal.SIGINT,),
    "sigterm": (signal.SIGTERM,),
}
_SIGNAL_GAP_SECONDS = 0.2


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended."""

    fault: str
    rc: int | None
    """Exit status; None where it had to be killed."""
    seconds: float | None
    """From the fault to the end; None where the fault did not happen."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with that; empty when all is well."""
    stderr: str = ""
    remark: str = ""
    """What makes a good end say less than it should."""

    def __str__(self) -> str:
        took = "did not happen" if self.seconds is None else f"ended {self.seconds:.1f} s later with {self.rc}"
        return f"{'ok  ' if not self.problems else 'FAIL'} {self.fault}: {took}" + "".join(
            f"\n     {line}" for line in (*self.problems, *filter(None, [self.remark]))
        )


class Process(Protocol):
    """A session of its own that was started."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""


Start = Callable[[str, Path, Path], Process]
"""Starts `fault_run` with a JSON argument, stdout and stderr in files, in a session of its own."""


def start(arguments: str, out: Path, err: Path) -> Process:
    """A fresh interpreter."""
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "lightning_dali.testing.fault_run", arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def play(
    fault: str,
    target: str,
    *,
    stage: str = "fit",
    options: Mapping[str, Any] | None = None,
    devices: int = 1,
    accelerator: str = "auto",
    timeout: float = 120.0,
    start: Start = start,
) -> Outcome:
    """Runs one fault on a datamodule and judges how it ends.

    Args:
        fault: One of `FAULTS`.
        target: ``"module:function"``: the function makes the datamodule.
        stage: "fit" or "validate".
        options: Keyword arguments of the function.
        devices: How many ranks; the fault happens on the last one.
        accelerator: Lightning's.
        timeout: Seconds until it is killed.
        start: How the process is started.
    """
    check_choice("fault", fault, FAULTS)
    check_choice("stage", stage, ("fit", "validate"))
    settings = {"stage": stage, "options": dict(options or {}), "devices": devices, "accelerator": accelerator}
    arguments = json.dumps({"fault": fault, "target": target, **settings})
    shared_memory = leaks._shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(arguments, out, err)
        rc = _watch(process, out, _SIGNALS.get(fault, ()), timeout)
        ended = time.time()
        left = _end_session(process.pid, grace_seconds=0.0 if rc is None else 1.0 if devices == 1 else 8.0)
        _reap(process)
        said, stderr = _said(out), err.read_text(errors="replace")
    problems = [f"still running after {timeout:g} s"] if rc is None else []
    problems += [f"left a process: {one}" for one in left]
    problems += [f"left in /dev/shm: {one}" for one in shared_memory()]
    problems += [f"still alive after the failure: {one}" for one in json.loads(said.get("left", "[]"))]
    seconds = ended - float(said["now"]) if "now" in said else None
    limit = (END_SECONDS if devices == 1 else RANKS_END_SECONDS) * _crowding()
    if seconds is None:
        problems.append("the fault did not happen: the datamodule has too few batches, or something else failed before")
    elif rc is not None and seconds > limit:
        problems.append(f"took {seconds:.1f} s to end, more than {limit:g} s")
    if fault == "worker_killed" and "done" in said and rc == 0:
        return Outcome(fault, rc, seconds, problems, stderr, _NO_WORKER_NEEDED)
    if "done" in said:
        problems.append("went on to the end as if nothing had happened")
    if rc is not None and fault != "sigterm" and (rc == 0) != (fault == "exit"):  # Lightning's word for SIGTERM is 0
        problems.append(f"ended with exit status {rc}")
    lines = stderr.strip().splitlines() or [""]
    if FAULTS[fault] not in (lines[-1] if devices == 1 else stderr):
        problems.append(f"the last line of stderr is {lines[-1]!r}, expected {FAULTS[fault]!r}")
    return Outcome(fault, rc, seconds, problems, stderr)


def _crowding() -> float:
    """By how much a machine with more to do than it has cores is slower than one for itself."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def play_all(
    target: str,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    told: Callable[[Outcome], None] = lambda one: None,
    **how: Any,
) -> list[Outcome]:
    """Runs several faults, one after the other; see `play`."""
    outcomes = []
    for fault in faults:
        outcomes.append(play(fault, target, **how))
        told(outcomes[-1])
    return outcomes


def _watch(process: Process, out: Path, signals: Sequence[int], timeout: float) -> int | None:
    """Waits for the end; sends the signals to the whole session when the process says that it is ready for them."""
    deadline, due = time.monotonic() + timeout, list(signals)
    while (rc := process.poll()) is None and time.monotonic() < deadline:
        if due and "now" in _said(out):
            try:
                os.killpg(process.pid, due.pop(0))
            except ProcessLookupError:
                due.clear()
            time.sleep(_SIGNAL_GAP_SECONDS if due else 0.0)
            continue
        time.sleep(0.02)
    return rc


def _reap(process: Process) -> None:
    """Takes note of the end of a process that was killed."""
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _said(out: Path) -> dict[str, str]:
    """What the process printed, the first of each word."""
    said: dict[str, str] = {}
    for line in out.read_text(errors="replace").splitlines():
        word, _, value = line.partition(" ")
        said.setdefault(word, value)
    return said


def _end_session(session: int, *, grace_seconds: float) -> list[str]:
    """Kills what is left of a session after the grace; returns what that was."""
    deadline = time.monotonic() + grace_seconds
    while (left := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [f"{pid} {command}" for pid, command in left.items()]


def _members(session: int) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except OSError:  # it ended meanwhile
            continue
    return found
