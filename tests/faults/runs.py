"""Fault runs that begin in the nursery."""

import os
from collections.abc import Callable
from pathlib import Path

from tests.nursery import Child, Nursery, python_path

SCRIPT = """
import json, sys
from lightning_dali.testing.fault_run import run

if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
"""


def warm(nursery: Nursery, **env: str) -> Callable[[str, Path, Path], Child]:
    """What `play` takes as `start`; Lightning starts ranks above 0 with the same script, as fresh interpreters."""

    def start(arguments: str, out: Path, err: Path) -> Child:
        script = out.with_name("run.py")
        script.write_text(SCRIPT)
        own = {**os.environ, "PYTHONPATH": python_path(), **env}
        return nursery.start(script, [arguments], out=out, err=err, env=own, cwd=Path.cwd())

    return start
