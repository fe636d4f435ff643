"""The fault table: wherever a run fails, it ends at once, says why last, and leaves nothing behind."""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_dali.testing.faults import FAULTS, play
from tests.conftest import SOAK

pytestmark = [pytest.mark.faults, pytest.mark.timeout(150)]

TARGET = "tests.faults.targets:pictures"
ROOT = Path(__file__).resolve().parents[2]


class Zygote:
    """Starts runs quickly; see `zygote.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.faults.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        self.pid, self._rc = 0, None

    def start(self, arguments: str, out: Path, err: Path) -> "Zygote":
        out.touch()
        err.touch()
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"arguments": arguments, "out": str(out), "err": str(err)}) + "\n")
        word, number = self._process.stdout.readline().split()
        assert word == "pid"
        self.pid, self._rc = int(number), None
        return self

    def poll(self) -> int | None:
        if self._rc is None and self._selector.select(0):
            assert self._process.stdout
            self._rc = int(self._process.stdout.readline().split()[1])
        return self._rc

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._selector.close()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    one = Zygote()
    yield one
    one.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("pictures"))


def rows() -> list[Any]:
    """(fault, stage, workers); the ones that differ most unless LIGHTNING_DALI_SOAK=1."""
    table = [(fault, stage, workers) for fault in FAULTS for stage in ("fit", "validate") for workers in (0, 2)]
    impossible = {("worker_killed", 0), ("training_step", "validate"), ("two_at_once", "validate")}
    table = [
        (fault, stage, workers)
        for fault, stage, workers in table
        if not {(fault, stage), (fault, workers)} & impossible and not (fault.startswith("sanity") and stage != "fit")
    ]
    if SOAK:
        return table
    inline = ("dataset", "sigint", "server_run", "exit")
    other = ("validation_step", "worker_killed", "collate")
    return [
        (fault, stage, workers)
        for fault, stage, workers in table
        if (stage == "fit" and (workers == 2 or fault in inline))
        or (stage == "validate" and fault in other and workers)
    ]


@pytest.mark.parametrize(("fault", "stage", "workers"), rows())
def test_one_rank(fault: str, stage: str, workers: int, zygote: Zygote, folder: str) -> None:
    options = {"folder": folder, "num_workers": workers}
    outcome = play(fault, TARGET, stage=stage, options=options, accelerator="cpu", timeout=60, start=zygote.start)
    assert not outcome.problems, f"{outcome}\n{outcome.stderr[-4000:]}"


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS] if SOAK else ["dataset", "sigint"])
def test_two_ranks(fault: str, folder: str) -> None:
    if fault == "exit":
        pytest.skip("has no ranks")
    if fault == "sigterm":
        pytest.skip("Lightning 2.6 broadcasts in its handler and hangs, with torch's DataLoader too (docs/failures.md)")
    options = {"folder": folder, "num_workers": 1}
    outcome = play(fault, TARGET, options=options, accelerator="cpu", devices=2)
    assert not outcome.problems, f"{outcome}\n{outcome.stderr[-4000:]}"
