"""The fixtures and hooks of tests/conftest.py keep their word."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_pytest(tmp_path: Path, run_warm: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Runs a test file under our conftest.py and settings; returns pytest's output."""
    root = Path(__file__).parents[2]
    shutil.copy(root / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "nursery.py"):
        shutil.copy(root / "tests" / name, tmp_path / "tests")

    def run(code: str, **env: str) -> str:
        (tmp_path / "tests/test_it.py").write_text(code)
        start = "import pytest, sys; sys.exit(pytest.main(['-p', 'no:cacheprovider']))"
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        return run_warm(start, 60, env={"PYTHONPATH": path, **env})[1]

    return run


@pytest.mark.slow
def test_police_judges_every_test_but_those_that_failed_or_are_allowed(run_pytest: Callable[..., str]) -> None:
    output = run_pytest(
        """
import os, threading, time, pytest
def test_leaks(): os.environ["A"] = "1"
def test_fails(): os.environ["B"] = "1"; assert False
@pytest.mark.leaks_allowed("shows it")
def test_allowed(): os.environ["C"] = "1"
@pytest.mark.leaks_allowed
def test_no_reason(): pass
def test_clean(): pass
"""
    )
    assert "environment: A was set" in output
    assert "B was set" not in output
    assert "C was set" not in output
    assert "leaks_allowed needs a reason" in output
    assert "1 failed, 3 passed, 2 errors" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promised", "ends"), [("", "3 skipped"), ("1", "2 skipped, 1 error"), ("2", "1 skipped, 2 errors")]
)
def test_gpu_tests_are_skipped_unless_promised(run_pytest: Callable[..., str], promised: str, ends: str) -> None:
    code = """
import pytest
@pytest.mark.gpu
def test_one(): pass
@pytest.mark.multi_gpu
def test_two(): pass
@pytest.mark.multi_gpu(n=4)
def test_four(): pass
"""
    output = run_pytest(code, CUDA_VISIBLE_DEVICES="", LIGHTNING_DALI_REQUIRE_GPU=promised)
    assert ends in output
    assert f"LIGHTNING_DALI_REQUIRE_GPU={promised} promised" in output or not promised


@pytest.mark.slow
def test_soak_is_a_tenth_unless_asked(run_pytest: Callable[..., str]) -> None:
    code = "def test_it(soak): assert (soak(200), soak(3)) == {}"
    assert "1 passed" in run_pytest(code.format("(20, 1)"), LIGHTNING_DALI_SOAK="")
    assert "1 passed" in run_pytest(code.format("(200, 3)"), LIGHTNING_DALI_SOAK="1")


def test_run_script_returns_how_it_ended(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import sys, os; print(sys.argv[1], os.environ['A']); print('oh', file=sys.stderr); sys.exit(3)"
    assert run_script(code, args=("x",), env={"A": "y"}) == (3, "x y\n", "oh\n")
    assert run_script("import lightning_dali.testing")[0] == 0


def test_run_script_can_interrupt(run_script: Callable[..., tuple[int, str, str]]) -> None:
    def interrupt(process: "subprocess.Popen[bytes]", printed: Callable[[], str]) -> None:
        while "ready" not in printed():
            time.sleep(0.02)
        process.send_signal(2)

    rc, _, stderr = run_script("import time; print('ready', flush=True); time.sleep(60)", 10, meanwhile=interrupt)
    assert rc == -2 or rc == 130
    assert "KeyboardInterrupt" in stderr


def test_run_script_fails_a_hang_and_shows_where(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import threading\ndef stuck_here(): threading.Lock().acquire(); threading.Event().wait()\nstuck_here()"
    with pytest.raises(pytest.fail.Exception, match="still running after 1 s") as caught:
        run_script(code, 1)
    assert "stuck_here" in str(caught.value)


def test_run_script_fails_and_ends_orphans(run_script: Callable[..., tuple[int, str, str]]) -> None:
    sleep = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True)"
    with pytest.raises(pytest.fail.Exception, match=r"left processes behind: \['\d+ .*sleep\(60\)") as caught:
        run_script(code, grace_seconds=0.5)
    pid = int(re.findall(r"behind: \['(\d+)", str(caught.value))[0])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_run_warm_is_run_script_with_everything_imported(run_warm: Callable[..., tuple[int, str, str]]) -> None:
    code = """
import os, sys
assert "lightning_dali.datamodules" in sys.modules and os.getsid(0) == os.getpid()
print(__name__, os.path.basename(os.getcwd()), *sys.argv[1:], os.environ["A"])
sys.exit("oh")
"""
    rc, stdout, stderr = run_warm(code, args=("x",), env={"A": "y"})
    assert (rc, stdout.split()[0], stdout.split()[2:], stderr) == (1, "__main__", ["x", "y"], "oh\n")


def test_run_warm_ends_a_hang_and_its_forks(run_warm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code = f"""
import os, time
pid = os.fork()
if pid:
    open({str(tmp_path / "pid")!r}, "w").write(str(pid))
def stuck_here(): time.sleep(60)
stuck_here()
"""
    with pytest.raises(pytest.fail.Exception, match=r"still running after 1 s[\s\S]*stuck_here"):
        run_warm(code, 1)
    pid, deadline = (tmp_path / "pid").read_text(), time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
