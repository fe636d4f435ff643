"""What the benchmarks measure with: figures, and contenders by turns. In a process of its own: a contest rings SIGALRM."""

from __future__ import annotations

import os
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
