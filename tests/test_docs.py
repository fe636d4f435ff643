"""The pages build without a warning, their Python is Python, and what they name is there."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_dali
from lightning_dali.cli import app
from lightning_dali.monitor import ThroughputMonitor

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install -e '.[docs]'")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ImageDataModule" in (tmp_path / "site" / "reference" / "datamodules" / "index.html").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_pages_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lightning_dali"):
                home = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(home, alias.name)]
                assert not missing, f"{page.name} imports {missing} from {node.module}"


def test_groups_and_commands_in_the_pages_are_those_that_exist() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for folder in (path for path in (ROOT / "configs").iterdir() if path.is_dir()):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{folder.name}` |"))
        assert set(re.findall(r"`([\w]+)`", row)) == {folder.name, *(file.stem for file in folder.glob("*.yaml"))}
    commands = {str(command.name) for command in app.registered_commands}
    assert set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "command.md").read_text(), re.MULTILINE)) == commands


def test_defaults_and_names_in_the_tuning_page_are_the_codes() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text()
    parameters = inspect.signature(lightning_dali.ImageDataModule).parameters
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.split("## What chooses itself")[1], re.MULTILINE)
    told = {name: value.strip().strip("`") for name, value in rows}
    assert len(told) == 6
    for name, value in told.items():
        default = parameters[name].default
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert value.startswith("three quarters of") if default is None else value == shown, (name, value, default)
    logged = set(re.findall(r"`(data/\w+)`", text))
    assert logged == set(re.findall(r"data/\w+", inspect.getdoc(ThroughputMonitor) or ""))
