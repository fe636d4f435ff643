"""The leak check finds what a block leaves behind, and names it."""

import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_dali.testing import (
    no_leaks,
)


@contextmanager
def a_thread() -> Iterator[str]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    yield r"threads: forgotten \(daemon\)"
    end.set()
    thread.join()


@contextmanager
def a_child() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield rf"children: {process.pid} .*sleep\(60\)"
        process.kill()


@contextmanager
def a_grandchild() -> Iterator[str]:
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True); input()"
    )
    sleep = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, sleep], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        yield rf"children: {grandchild} "
        os.kill(grandchild, 9)
        process.kill()


@contextmanager
def a_descriptor() -> Iterator[str]:
    with open(__file__) as file:
        yield f"descriptors: {re.escape(os.path.realpath(file.name))}"


@contextmanager
def a_shared_memory_file() -> Iterator[str]:
    path = Path(f"/dev/shm/lightning_dali_test_{os.getpid()}")
    path.touch()
    yield f"shared memory: {path.name}"
    path.unlink()


@contextmanager
def a_memfd() -> Iterator[str]:
    number = os.memfd_create("forgotten")
    os.ftruncate(number, 4096)
    mapped = mmap.mmap(number, 4096)
    os.close(number)
    yield "memfds: /memfd:forgotten"
    mapped.close()


@contextmanager
def a_variable() -> Iterator[str]:
    os.environ["LIGHTNING_DALI_FORGOTTEN"] = "1"
    yield "environment: LIGHTNING_DALI_FORGOTTEN was set"
    del os.environ["LIGHTNING_DALI_FORGOTTEN"]


LEAKS = [a_thread, a_child, a_grandchild, a_descriptor, a_shared_memory_file, a_memfd, a_variable]


@pytest.mark.parametrize("leak", LEAKS)
def test_each_kind_of_leak_is_found_and_named(leak: Callable[[], "contextmanager[str]"]) -> None:
    context = leak()
    with pytest.raises(AssertionError, match="left behind, 0.1 s later") as caught, no_leaks(grace_seconds=0.1):
        pattern = context.__enter__()
    found = str(caught.value)
    context.__exit__(None, None, None)
    assert re.search(pattern, found), found
    with no_leaks(), leak():  # and nothing is said about what ends in time
        pass


@pytest.mark.parametrize("leak", LEAKS)
def test_what_was_there_before_is_not_a_leak(leak: Callable[[], "contextmanager[str]"]) -> None:
    with leak(), no_leaks(grace_seconds=0):
        pass


def test_unset_and_changed_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DALI_A", "1")
    monkeypatch.setenv("LIGHTNING_DALI_B", "1")
    with pytest.raises(AssertionError) as caught, no_leaks(checks=["environment"], grace_seconds=0):  # noqa: PT012
        del os.environ["LIGHTNING_DALI_A"]
        os.environ["LIGHTNING_DALI_B"] = "2"
    assert "LIGHTNING_DALI_A was unset" in str(caught.value)
    assert "LIGHTNING_DALI_B was changed" in str(caught.value)
    with no_leaks(checks=["environment"], grace_seconds=0, allowed_environment=["LIGHTNING_DALI_B"]):
        os.environ["LIGHTNING_DALI_B"] = "3"


def test_what_ends_within_the_grace_is_not_a_leak() -> None:
    start = time.monotonic()
    with no_leaks(grace_seconds=5):
        threading.Thread(target=time.sleep, args=(0.3,)).start()
    assert time.monotonic() - start < 3


def test_another_process_own_shared_memory_is_not_ours() -> None:
    """Detached from us by an intermediate that ends, as a stranger on the same machine would be."""
    name, hold = f"lightning_dali_stranger_{os.getpid()}", "import time; f = open({!r}, 'w'); time.sleep(60)"
    path = Path("/dev/shm", name)
    hold = hold.format(str(path))
    code = f"import subprocess as s, sys; print(s.Popen([sys.executable, '-c', {hold!r}], stdout=-3).pid)"
    with no_leaks(checks=["shared_memory", "children"]):
        output = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, timeout=30, check=True).stdout
        while not path.exists():
            time.sleep(0.02)
    os.kill(int(output), 9)
    path.unlink()


def test_a_block_that_raises_is_not_judged() -> None:
    with pytest.raises(KeyError, match="mine"), no_leaks(grace_seconds=0):  # noqa: PT012
        os.environ["LIGHTNING_DALI_FORGOTTEN"] = "1"
        raise KeyError("mine")
    del os.environ["LIGHTNING_DALI_FORGOTTEN"]


def test_unknown_check_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="checks: got 'thread'; allowed: 'threads', .*do: .*'threads'"),
        no_leaks(checks=["thread"]),
    ):
        pass
