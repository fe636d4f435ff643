"""What every test gets: a leak check, GPU rules, a tenth of the soak, and a way to run scripts that cannot hang."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

# Before torch is imported, here and in the scripts: two cores, and a forked child of many OpenMP threads may hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # scripts of two ranks with two threads each spin for cores

from lightning_dali.testing import no_leaks
from tests.nursery import Child, Nursery, python_path

SOAK = os.environ.get("LIGHTNING_DALI_SOAK", "") not in ("", "0")
PROMISED_GPUS = int(os.environ.get("LIGHTNING_DALI_REQUIRE_GPU") or 0)
LEAK_CHECKS = ("threads", "children", "shared_memory", "memfds", "environment")

# Variables that our dependencies set and leave.
UPSTREAM_ENVIRONMENT = (
    "CUDA_MODULE_LOADING",  # torch.cuda's start
    "CUBLAS_WORKSPACE_CONFIG",  # Trainer(deterministic=True)
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn
    "KMP_INIT_AT_FORK",  # scikit-learn
    "PL_GLOBAL_SEED",  # lightning.seed_everything
    "PL_SEED_WORKERS",  # lightning.seed_everything
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # import lightning
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile
    "TRITON_CACHE_DIR",  # torch.compile
)

# -- leaks -----------------------------------------------------------------------------------------------------------

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a child, shared memory or an environment variable behind.

    Not one that failed by itself: its traceback keeps things alive.
    """
    allowed = request.node.get_closest_marker("leaks_allowed")
    if allowed is not None:
        if not (allowed.args or allowed.kwargs.get("reason")):
            pytest.fail("leaks_allowed needs a reason: @pytest.mark.leaks_allowed('why')")
        yield
        return
    police = no_leaks(checks=LEAK_CHECKS, allowed_environment=UPSTREAM_ENVIRONMENT)
    police.__enter__()
    yield
    if not request.node.stash.get(_failed, False):
        police.__exit__(None, None, None)


# -- GPUs and soak ---------------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that need more GPUs than there are; fails them where LIGHTNING_DALI_REQUIRE_GPU promised as many."""
    several = item.get_closest_marker("multi_gpu")
    if several is None and item.get_closest_marker("gpu") is None:
        return
    needed = 1 if several is None else int(several.kwargs.get("n", several.args[0] if several.args else 2))
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        words = f"needs {needed} CUDA device(s), found {found}"
        if needed <= PROMISED_GPUS:
            pytest.fail(f"{words}, and LIGHTNING_DALI_REQUIRE_GPU={PROMISED_GPUS} promised them", pytrace=False)
        pytest.skip(words)


@pytest.fixture(scope="session")
def soak() -> Callable[[int], int]:
    """`soak(n)`: how often to repeat, `n` with LIGHTNING_DALI_SOAK=1 and a tenth of it otherwise."""
    return lambda n: n if SOAK else max(1, n // 10)


# -- scripts ---------------------------------------------------------------------------------------------------------


class ScriptResult(NamedTuple):
    """How a script ended."""

    rc: int
    """Its exit status; minus the signal's number if one ended it."""
    stdout: str
    stderr: str


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., ScriptResult]:
    """`run_script(code, timeout=60)`: runs Python code in a process of its own and returns `(rc, stdout, stderr)`.

    The test fails if it is still running after `timeout` seconds (with the stacks of all threads), or if it leaves a
    process behind. Either way nothing of it survives.

    Keyword arguments: `args` (its `sys.argv[1:]`), `env` (more variables), `cwd` (default: the test's `tmp_path`),
    `grace_seconds` (for what outlives it), and `meanwhile`, called with the `Popen` and a function that reads what it has printed so far, for instance to send a
    signal at the right moment.
    """

    def run(
        code: str,
        timeout: float = 60,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path = tmp_path,
        grace_seconds: float = 5,
        meanwhile: Callable[["subprocess.Popen[bytes] | Child", Callable[[], str]], None] | None = None,
        start: Callable[..., "subprocess.Popen[bytes] | Child"] = _start,
    ) -> ScriptResult:
        mark = f"run-script-{uuid.uuid4().hex}"
        files = [tmp_path / f"{mark}.{ending}" for ending in ("py", "out", "err")]
        files[0].write_text(code)
        own = {**os.environ, "PYTHONPATH": python_path(), **(env or {}), "LIGHTNING_DALI_TEST_RUN": mark}
        process = start(files[0], args, out=files[1], err=files[2], env=own, cwd=cwd)
        hangs = False
        try:
            if meanwhile is not None:
                meanwhile(process, files[1].read_text)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            hangs = True
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler says where it hangs
            time.sleep(0.5)
        finally:
            orphans = _end(
                mark, process.pid, grace_seconds=grace_seconds if process.poll() is not None and not hangs else 0
            )
            process.wait(10)
        stdout, stderr = files[1].read_text(errors="replace"), files[2].read_text(errors="replace")
        if hangs or orphans:
            fault = f"still running after {timeout} s" if hangs else f"left processes behind: {orphans}"
            stderr = re.sub(r",? ?Extension modules: [^\n]*", "", stderr)  # thousands of letters behind the stacks
            pytest.fail(f"{fault}\n{stdout[-4000:]}\n{stderr[-8000:]}", pytrace=False)
        return ScriptResult(process.returncode, stdout, stderr)

    return run


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks scripts from a process that has imported the package."""
    one = Nursery()
    yield one
    one.close()


@pytest.fixture
def run_warm(run_script: Callable[..., ScriptResult], nursery: Nursery) -> Callable[..., ScriptResult]:
    """`run_script` without the seconds of imports, for what does not look at how an interpreter starts."""
    return functools.partial(run_script, start=nursery.start)


def _start(
    script: Path, args: Sequence[str], *, out: Path, err: Path, env: Mapping[str, str], cwd: Path
) -> "subprocess.Popen[bytes]":
    """A fresh interpreter."""
    # Files, not pipes: an orphan that holds a pipe would look like a script that does not end.
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), *args],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _end(mark: str, session: int, *, grace_seconds: float) -> list[str]:
    """Ends the processes that belong to the script and outlive the grace; returns what they were.

    By the environment that they were started with, since an orphan has another parent and may have left the session; by the
    session too, since a fork from the nursery has the nursery's environment for all to see.
    """
    deadline = time.monotonic() + grace_seconds
    while (found := _belonging(mark, session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return [f"{pid} {command}" for pid, command in found.items()]


def _belonging(mark: str, session: int) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of_process = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX" and (
                    int(of_process) == session or mark.encode() in (entry / "environ").read_bytes()
                ):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = command[:200]
            except OSError:  # gone, or another user's
                continue
    return found
