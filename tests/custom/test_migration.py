"""The ports under examples/migration: they run, they are small, and docs/migration.md shows them as they are."""

import difflib
import runpy
import sys
from pathlib import Path

import pytest

from lightning_dali.testing import make_images

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "migration"
PORTS = {
    "resnet50": ["--arch", "shufflenet_v2_x0_5", "--batch-size", "4", "--crop", "32", "--epochs", "1", "--workers", "1"],
    "autoaugment": ["--arch", "shufflenet_v2_x0_5", "--batch-size", "4", "--crop", "32", "--epochs", "1", "--workers", "1"],
    "lightning_loop": ["--batch-size", "4", "--epochs", "1"],
}  # fmt: skip


def diff(name: str) -> list[str]:
    before, after = ((EXAMPLES / side / f"{name}.py").read_text().splitlines() for side in ("before", "after"))
    return list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]


@pytest.mark.parametrize("name", PORTS)
def test_the_port_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_images(tmp_path / "data", 8, format="jpeg", classes=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "data"), *PORTS[name]])
    runpy.run_path(str(EXAMPLES / "after" / f"{name}.py"), run_name="__main__")
    assert name == "lightning_loop" or "epoch 0: loss" in capsys.readouterr().out


@pytest.mark.parametrize("name", PORTS)
def test_the_port_is_small_and_shown(name: str) -> None:
    lines = diff(name)
    assert sum(line.startswith("+") and line != "+" for line in lines) <= LIMIT
    assert (
        "\n".join(line for line in lines if not line.startswith("@@")) in (ROOT / "docs" / "migration.md").read_text()
    )


LIMIT = 9
"""Lines that a port adds at most; what goes away is not counted."""
