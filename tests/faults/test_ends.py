"""The fault table: wherever a run fails, it ends at once, says why last, and leaves nothing behind."""

from typing import Any

import pytest

from lightning_dali.testing.faults import FAULTS, play
from tests.conftest import SOAK
from tests.faults.runs import warm
from tests.nursery import Nursery

pytestmark = [pytest.mark.faults, pytest.mark.timeout(150)]

TARGET = "tests.faults.targets:pictures"


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
def test_one_rank(fault: str, stage: str, workers: int, nursery: Nursery, folder: str) -> None:
    options = {"folder": folder, "num_workers": workers}
    outcome = play(fault, TARGET, stage=stage, options=options, accelerator="cpu", timeout=60, start=warm(nursery))
    assert not outcome.problems and not outcome.remark, f"{outcome}\n{outcome.stderr[-4000:]}"


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS] if SOAK else ["dataset", "sigint"])
def test_two_ranks(fault: str, nursery: Nursery, folder: str) -> None:
    if fault == "exit":
        pytest.skip("has no ranks")
    if fault == "sigterm":
        pytest.skip("Lightning 2.6 broadcasts in its handler and hangs, with torch's DataLoader too (docs/failures.md)")
    options = {"folder": folder, "num_workers": 1}
    outcome = play(fault, TARGET, options=options, accelerator="cpu", devices=2, start=warm(nursery))
    assert not outcome.problems and not outcome.remark, f"{outcome}\n{outcome.stderr[-4000:]}"
