"""`python -m lightning_dali.testing faults`: the table on somebody's own datamodule, and that it sees what is wrong."""

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_dali.testing.__main__ import main
from lightning_dali.testing.faults import FAULTS, play
from tests.faults.runs import warm
from tests.nursery import Nursery, python_path

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

HANGS_SECONDS = 8
"""Enough to come to the failure, from a process that has imported everything; all of it is waited for."""
MINE = """
import threading, time
from lightning_dali import ImageDataModule
from lightning_dali.testing import IndexedImages, made_up
from torchvision.transforms import v2

def make():
    paths = made_up("images", 96, folder="pictures", size=16)
    dataset = IndexedImages(paths, v2.ToImage())
    return ImageDataModule(train_dataset=dataset, val_dataset=dataset, batch_size=4, num_workers=1, device="cpu")

def hanging():
    datamodule = make()
    datamodule.on_exception = lambda exception: threading.Thread(target=time.sleep, args=(60,)).start()
    return datamodule
"""


def test_a_datamodule_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nursery: Nursery
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    assert main(["faults", "mine:make", "--fault", "worker_killed", "--accelerator", "cpu"]) == 0
    assert "ok   worker_killed: ended" in capsys.readouterr().out
    path = os.pathsep.join([str(tmp_path), python_path()])
    start = warm(nursery, PYTHONPATH=path)
    outcome = play("training_step", "mine:hanging", accelerator="cpu", timeout=HANGS_SECONDS, start=start)
    assert outcome.rc is None
    assert any(f"still running after {HANGS_SECONDS} s" in problem for problem in outcome.problems)
    assert any("still alive after the failure: worker" in problem for problem in outcome.problems)
    assert str(outcome).startswith("FAIL training_step")


def test_what_is_asked_for_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["faults", "mine"])
    assert "expected module:function" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'training_step'"):
        play("training", "mine:make")


def test_the_table_is_complete() -> None:
    wanted: list[Any] = [
        "training_step",
        "validation_step",
        "callback",
        "dataset",
        "transform",
        "collate",
        "worker_killed",
    ]
    wanted += [
        "server_build",
        "server_run",
        "two_at_once",
        "sigint",
        "sigint_twice",
        "sanity_sigint",
        "sigterm",
        "exit",
    ]
    assert set(wanted) <= set(FAULTS)
