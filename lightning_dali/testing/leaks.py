"""A check that a block of code leaves nothing behind. Runs in the process that is judged; reads Linux's `/proc`."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_dali.failures import check_choice

_KEPT_OPEN = ("/dev/nvidia", "/dev/null", "/dev/urandom", "/proc/", "/sys/")
"""What drivers and random generators open once and keep."""


@contextmanager
def no_leaks(
    *,
    checks: Collection[str] = ("threads", "children", "descriptors", "shared_memory", "memfds", "environment"),
    grace_seconds: float = 5.0,
    allowed_environment: Collection[str] = (),
) -> Iterator[None]:
    """Raises if the block leaves something behind that was not there before it; a block that raises is not judged.

    Args:
        checks: "threads" (Python's), "children" (with their children), "descriptors" (open files, sockets, pipes),
            "shared_memory" (files in /dev/shm), "memfds" (mapped ones), "environment" (variables set, changed, unset).
        grace_seconds: How long the rest may take to go away by itself; ends early when it has.
        allowed_environment: Variables that may change.

    Raises:
        AssertionError: It lists all that is left.
    """
    makers: dict[str, Callable[[], Callable[[], list[str]]]] = {
        "threads": lambda: _growth(_threads),
        "children": lambda: _growth(_children),
        "descriptors": lambda: _growth(_descriptors),
        "shared_memory": _shared_memory,
        "memfds": lambda: _growth(_memfds),
        "environment": lambda: _environment({"PYTEST_CURRENT_TEST", *allowed_environment}),
    }
    lookers = {name: makers[check_choice("checks", name, makers)]() for name in checks}
    yield
    left = _what_stays(lookers, time.monotonic() + grace_seconds)
    if not left:
        return
    lines = [f"  {name.replace('_', ' ')}: {item}" for name, found in left.items() for item in found]
    raise AssertionError("\n".join([f"left behind, {grace_seconds:g} s later:", *lines]))


def _what_stays(lookers: dict[str, Callable[[], list[str]]], deadline: float) -> dict[str, list[str]]:
    while left := {name: found for name, look in lookers.items() if (found := look())}:
        if time.monotonic() > deadline or left.keys() == {"environment"}:  # no variable goes away by itself
            break
        gc.collect()  # only now: it takes a tenth of a second in a process that has imported torch
        multiprocessing.active_children()  # waits for those that have ended
        time.sleep(0.05)
    return left


def _growth(look: Callable[[], dict[Hashable, str]]) -> Callable[[], list[str]]:
    """What `look` finds later and did not find now, by its keys."""
    before = look()
    return lambda: sorted(words for key, words in look().items() if key not in before)


def _threads() -> dict[Hashable, str]:
    # tqdm's monitor, which Lightning's progress bar starts, lives as long as the process.
    threads = [one for one in threading.enumerate() if type(one).__name__ != "TMonitor"]
    return {one: f"{one.name}{' (daemon)' if one.daemon else ''}" for one in threads}


def _keepers(*names: str) -> set[int]:
    """Attributes of the two processes that multiprocessing starts once and keeps until the interpreter ends."""
    from multiprocessing import forkserver, resource_tracker

    owners = (getattr(forkserver, "_forkserver", None), getattr(resource_tracker, "_resource_tracker", None))
    return {value for owner in owners for name in names if isinstance(value := getattr(owner, name, None), int)}


def _family() -> dict[int, str]:
    """Process ids and commands of this process and all that descend from it."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                parents[int(name)] = int(_read(f"/proc/{name}/stat").rpartition(b")")[2].split()[1])
    family, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return {pid: _command(pid) for pid in family}


def _command(pid: int) -> str:
    try:
        command = _read(f"/proc/{pid}/cmdline")
    except OSError:
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace")[:120].strip() or "(zombie)"


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _children() -> dict[Hashable, str]:
    ignored = {os.getpid(), *_keepers("_forkserver_pid", "_pid")}
    return {pid: f"{pid} {command}" for pid, command in _family().items() if pid not in ignored}


def _descriptors() -> dict[Hashable, str]:
    ignored, found = _keepers("_forkserver_alive_fd", "_fd"), Counter[str]()
    for number, target in _links("/proc/self/fd").items():
        if number not in ignored and not target.startswith(_KEPT_OPEN):
            found[target] += 1
    return {(target, n): target for target, count in found.items() for n in range(count)}


def _links(folder: str) -> dict[int, str]:
    links = {}
    for name in os.listdir(folder):
        try:
            links[int(name)] = os.readlink(f"{folder}/{name}")
        except OSError:  # closed meanwhile, such as the listing's own
            continue
    return links


def _memfds() -> dict[Hashable, str]:
    with open("/proc/self/maps") as maps:
        fields = [line.split(maxsplit=5) for line in maps if "/memfd:" in line]
    return {(address, inode): f"{name.strip()}, inode {inode}" for address, _, _, _, inode, name in fields}


def _shared_memory() -> Callable[[], list[str]]:
    before = set(os.listdir("/dev/shm"))

    def look() -> list[str]:
        new = set(os.listdir("/dev/shm")) - before
        return sorted(new - _held_by_others() if new else new)

    return look


def _held_by_others() -> set[str]:
    """Names in /dev/shm that a process outside the family has mapped or open: the machine is not ours alone."""
    family, held = _family(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in family:
            try:
                text = (entry / "maps").read_text() + "\n".join(_links(f"{entry}/fd").values())
            except OSError:  # gone, or another user's
                continue
            held |= {line.partition("/dev/shm/")[2].split(" ")[0] for line in text.splitlines() if "/dev/shm/" in line}
    return held


def _environment(allowed: Collection[str]) -> Callable[[], list[str]]:
    before = dict(os.environ)

    def look() -> list[str]:
        now, verbs = dict(os.environ), {(False, True): "set", (True, False): "unset", (True, True): "changed"}
        changed = [name for name in {*before, *now} if before.get(name) != now.get(name) and name not in allowed]
        return sorted(f"{name} was {verbs[name in before, name in now]}" for name in changed)

    return look
