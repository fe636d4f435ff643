"""The walkthrough runs in a Jupyter kernel, twice, and leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "walkthrough.ipynb"

# In a process of its own: the client's threads and sockets are not ours, and a kernel that hangs is ended with it.
CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], as_version=4)
cells = {cell.metadata["tags"][0]: cell for cell in book.cells if cell.cell_type == "code"}
names = list(cells)
for name, source in json.loads(sys.argv[2]).items():
    cells[name] = nbformat.v4.new_code_cell(source)
    book.cells.append(cells[name])
order = [name for asked in sys.argv[3:] for name in (names if asked == "all" else [asked])]
client = NotebookClient(book, timeout=60, kernel_name="python3")
with client.setup_kernel():
    for name in order:
        client.execute_cell(cells[name], book.cells.index(cells[name]))
        told = {}
        for output in cells[name].outputs:
            kinds = output.get("data", {output.output_type: output.get("text")})
            told.update({kind: "there" if kind == "image/png" else value for kind, value in kinds.items()})
        print(json.dumps([name, told]), flush=True)
"""

# The processes below the kernel.
LEFT = """
import gc, time
import psutil
gc.collect()  # a datamodule and its loaders refer to each other
for _ in range(100):
    left = [child.pid for child in psutil.Process().children(recursive=True)]
    if not left:
        break
    time.sleep(0.05)
left
"""
WORKERS = "len(__import__('psutil').Process().children(recursive=True))"


@pytest.fixture
def execute(run_script: Any, tmp_path: Path) -> Callable[..., list[tuple[str, dict[str, str]]]]:
    """`execute("all", "loop")`: runs cells by their tags in one kernel and returns what each has put out."""
    pytest.importorskip("nbclient")
    own = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "TMPDIR")}
    Path(own["TMPDIR"]).mkdir()

    def run(*order: str) -> list[tuple[str, dict[str, str]]]:
        more = json.dumps({"left": LEFT, "workers": WORKERS})
        done = run_script(CLIENT, 100, args=[str(NOTEBOOK), more, *order], env=own)
        assert done.rc == 0, done.stderr[-4000:]
        return [(name, told) for name, told in map(json.loads, done.stdout.splitlines())]

    return run


@pytest.mark.slow
def test_every_cell_runs_and_runs_again_in_any_order(execute: Any) -> None:
    # One kernel for both, since a start of one takes 7 s. Last, the order of a person: the loader's cell twice, loops left
    # open, the datamodule and its classes made anew while workers of the last one live.
    person = [
        "pictures", "classes", "datamodule", "loop", "loop", "workers", "abandoned", "loop", "abandoned", "preview",
        "classes", "datamodule", "loop", "abandoned", "abandoned", "fit", "loop", "close", "loop", "close", "left",
    ]  # fmt: skip
    told = execute("all", "left", "all", "left", *person)
    told, by_person = told[: -len(person)], told[-len(person) :]
    assert len(told) == 2 * len({name for name, _ in told})
    for part in (told[: len(told) // 2], told[len(told) // 2 :]):
        said = dict(part)
        assert "(8, 3, 96, 96)" in said["peek"]["text/plain"]
        assert said["preview"]["image/png"] == "there"
        explained = said["explain"]["stream"]
        assert "2 worker(s)" in explained and "materialised" not in explained
        assert said["loop"]["text/plain"] == "24"
        assert said["abandoned"]["text/plain"] == "(8, 3, 96, 96)"
        assert said["fit"]["text/plain"] == "6"
        assert said["left"]["text/plain"] == "[]"
    assert [out["text/plain"] for name, out in by_person if name == "loop"] == ["24"] * 6
    assert int(dict(by_person)["workers"]["text/plain"]) >= 2  # they are there, so "left" does look at something
    assert dict(by_person)["left"]["text/plain"] == "[]"
