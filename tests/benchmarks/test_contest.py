"""What the benchmarks measure with: figures, and contenders by turns. In a process of its own: a contest rings SIGALRM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rates import Rate, judged

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPT = """
import subprocess, sys, time
import contest
from contest import Contender, Contest, versus

contest.LIMIT_SECONDS, contest.ENTRY_SECONDS = 1.0, 0.1

class Batches:
    def __init__(self, seconds):
        self.seconds, self.process = seconds, None
    def __call__(self):
        self.process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            while True:
                time.sleep(self.seconds)
                yield
        finally:
            self.process.kill()
            self.process.wait()
    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / 100

def breaks():
    yield
    raise OSError("no such file")

def hangs():
    yield
    while True:
        time.sleep(60)

slow, fast = Batches(0.02), Batches(0.01)
with Contest(rounds=2, slice_seconds=0.2, warm_up_seconds=0.05) as one:
    entries = [one.enter(Contender(*arguments)) for arguments in (
        ("slow", slow, 10), ("fast", fast, 10, 2), ("breaks", breaks, 1), ("hangs", hangs, 1))]
    before = slow.cpu_seconds()
    time.sleep(0.5)
    print("stands still:", slow.cpu_seconds() == before)
    one.run()
    versus(entries[1], entries[0], at_least=1.1)
    versus(entries[2], entries[0])
    print("slices:", [len(entry.slices) for entry in entries], [len(entry.spans) for entry in entries])
    print("CPU:", all(entry.cpu_seconds > 0.1 for entry in entries[:2]))
"""


def test_a_rate_is_the_median_of_its_slices() -> None:
    rate = Rate((5.0, 1.0, 3.0, 4.0, 2.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0))
    assert (rate.median, rate.tenth_percentile) == (6.0, 2.0)
    assert str(Rate(())) == "too short to measure"


def test_a_target_is_judged_from_both_sides() -> None:
    assert judged("ratio", 1.2, at_least=1.0).endswith(" 120 % of at least 1: reached")
    assert judged("ratio", 0.9, at_least=1.0).endswith("  90 % of at least 1: missed")
    assert judged("seconds", 3.0, at_most=6.0).endswith("  50 % of at most 6: reached")
    assert judged("seconds", 9.0, at_most=6.0).endswith(" 150 % of at most 6: missed")


def test_contenders_take_turns_and_those_that_fail_are_left_out(run_script: Callable[..., Any]) -> None:
    run = run_script(SCRIPT, 60, env={"PYTHONPATH": str(BENCHMARKS)})  # 8 s, most of them asleep
    assert run.rc == 0, run.stdout + run.stderr
    assert "stands still: True" in run.stdout, run.stdout
    assert "slices: [2, 4, 0, 0] [2, 2, 0, 0]" in run.stdout, run.stdout
    assert "breaks: left out: OSError: no such file" in run.stdout
    assert "hangs: left out: TimeoutError: nothing came of it in 1 s" in run.stdout
    assert "fast / slow" in run.stdout and "breaks / slow" not in run.stdout
    assert "CPU: True" in run.stdout


KILLED = """
import subprocess, sys, time
from contest import Contender, Contest

def batches():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print("worker", process.pid, flush=True)
    while True:
        time.sleep(0.01)
        yield

with Contest(rounds=1) as one:
    one.enter(Contender("one", batches, 1))
    print("stopped", flush=True)
    time.sleep(100)
"""


def test_stopped_workers_go_with_a_contest_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        lines = []
        while "stopped" not in lines:
            lines.append(run.stdout.readline().strip())
        run.kill()
    worker = int(next(line for line in lines if line.startswith("worker")).split()[1])
    end = time.monotonic() + 10
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the worker is still there, stopped for good"
        time.sleep(0.05)


TOLD = """
import tempfile, time
import contest
from contest import Contender, Contest, versus
from torch.utils.data import DataLoader, Dataset

contest.ENTRY_SECONDS = 0.1

class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.002)
        return index

def loaded():
    yield from DataLoader(Slow(), 2, num_workers=2)

def plain():
    while True:
        time.sleep(0.01)
        yield

with tempfile.TemporaryDirectory() as folder:
    print("folder", folder)
    with Contest(rounds=1000, slice_seconds=0.2, warm_up_seconds=0.05) as one:
        entries = [one.enter(Contender(*arguments)) for arguments in (("loaded", loaded, 2), ("plain", plain, 1))]
        one.run()
        versus(*entries)
    print("not reached")
"""


def test_what_was_measured_is_printed_when_all_processes_are_told_to_end(run_script: Callable[..., Any]) -> None:
    """As `timeout` does: the peer's workers die of it too, which is no failure of the peer's."""

    def tell(process: Any, said: Callable[[], str]) -> None:
        end = time.monotonic() + 40
        while "round 2/1000  plain" not in said():
            assert time.monotonic() < end, said()
            time.sleep(0.02)
        time.sleep(0.1)  # into the turn of the one with workers
        os.killpg(process.pid, signal.SIGTERM)

    run = run_script(TOLD, 60, env={"PYTHONPATH": str(BENCHMARKS)}, meanwhile=tell)  # 5 s
    assert run.rc == 128 + signal.SIGTERM and "Traceback" not in run.stderr, run.stdout + run.stderr
    _, _, summary = run.stdout.partition("time ran out (SIGTERM)")
    lines = {line.split()[0]: line for line in summary.splitlines()[1:]}
    assert {"loaded", "plain"} <= set(lines) and "n 2)" in lines["plain"], run.stdout
    assert "loaded / plain" in lines["loaded"], run.stdout  # the last one of the name: the ratio
    assert "left out" not in run.stdout and "not reached" not in run.stdout
    folder = next(line for line in run.stdout.splitlines() if line.startswith("folder")).split()[1]
    assert not Path(folder).exists()
