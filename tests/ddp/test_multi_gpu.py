"""The checks of `benchmarks/multi_gpu.py`, on two CPU ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.ddp,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]  # two starts of ranks: 26 s of CPU, 75 s on two busy cores

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_checks_on_two_cpu_ranks(run_warm: Callable[..., Any]) -> None:
    path = str(BENCHMARKS / "multi_gpu.py")
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); runpy.run_path({path!r}, run_name='__main__')"
    )
    run = run_warm(script, 220, args=["--cpu-ranks", "2", "--checks-only"], env={"OMP_NUM_THREADS": "1"})
    assert "own GPU: ok: skipped: CPU ranks" in run.stdout, run.stdout + run.stderr
    assert "evaluation: ok: 61 samples, each once over 2 rank(s)" in run.stdout
    assert "resume: ok: 2 ranks took 16 samples of epoch 1, 1 went on with the next 20" in run.stdout
    # That every process ends is asserted. That they do within 5 s is the script's to say: two busy cores do not keep to it
    # (END_SECONDS there says why), and then the script must say so and exit with 1.
    ended = re.search(r"exception: (ok:|FAILED: all) \d+ processes", run.stdout)
    assert ended, run.stdout
    assert run.rc == ("exception: ok" not in run.stdout), run.stdout + run.stderr
