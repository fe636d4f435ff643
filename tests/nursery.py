"""Starts scripts as forks of a process that has imported everything: a fresh interpreter needs seconds of CPU for that, each time.

`Nursery` is the tests' side. The other one, `python -m tests.nursery`, reads one JSON line a script and forks; the child leaves
the loop, runs the script as `__main__` and ends as any interpreter does. Nothing has started a thread there before.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Child:
    """A started script, in a session of its own; as much of `Popen` as the tests use."""

    def __init__(self, nursery: "Nursery", pid: int, script: Path) -> None:
        self.pid, self.returncode, self._nursery, self.args = pid, None, nursery, script

    returncode: int | None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.args), timeout or 0)
            self._nursery.listen(0.1)
        return code

    def send_signal(self, number: int) -> None:
        """To the process, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is pytest's
        )
        assert self._process.stdin and self._process.stdout
        self._orders, self._answers = self._process.stdin, self._process.stdout.fileno()
        self._rest, self._pids, self._codes = b"", list[int](), dict[int, int]()

    def start(
        self, script: Path, args: Sequence[str], *, out: Path, err: Path, env: Mapping[str, str], cwd: Path
    ) -> Child:
        """Runs a script; its stdout and stderr go to files, which may be one.

        Args:
            script: A Python file.
            args: Its `sys.argv[1:]`.
            out: File of its stdout.
            err: File of its stderr.
            env: All of its environment.
            cwd: Where it runs.
        """
        for file in (out, err):
            file.touch()  # who watches them may look before the child has opened them
        order = {"argv": [str(script), *args], "out": str(out), "err": str(err), "env": dict(env), "cwd": str(cwd)}
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        while not self._pids:
            self.listen(60)
        return Child(self, self._pids.pop(), script)

    def ranks(
        self,
        script: Path,
        *args: str,
        log: Path,
        env: Sequence[Mapping[str, str]] | None = None,
        status: int = 0,
    ) -> None:
        """Runs a script on two ranks and waits for them; asserts how both end.

        Args:
            script: It makes a `Trainer(devices=2)`.
            args: Of both.
            log: `log.0` and `log.1` get their output.
            env: What tells each rank who it is; None: what Lightning's own launcher sets.
            status: Exit status of both.
        """
        port = free_port()
        own = [
            {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
            for rank in (0, 1)
        ]
        logs = [Path(f"{log}.{rank}") for rank in (0, 1)]
        plain = {**os.environ, "PYTHONPATH": python_path()}
        both = [
            self.start(script, args, out=file, err=file, env={**plain, **one}, cwd=log.parent)
            for file, one in zip(logs, env or own, strict=True)
        ]
        try:
            codes = [child.wait(360) for child in both]
        finally:
            for child in both:
                child.kill()
        assert codes == [status, status], [file.read_text(errors="replace")[-3000:] for file in logs]

    def status(self, pid: int) -> int | None:
        """How a script ended."""
        self.listen(0)
        return self._codes.get(pid)

    def listen(self, seconds: float) -> None:
        """Takes what the process says, waiting for it so long."""
        if not select.select([self._answers], [], [], seconds)[0]:
            return
        said = os.read(self._answers, 1 << 16)
        assert said, f"the nursery is gone: {self._process.poll()}"
        *lines, self._rest = (self._rest + said).split(b"\n")
        for word, *numbers in map(bytes.split, lines):
            if word == b"pid":
                self._pids.append(int(numbers[0]))
            else:
                self._codes[int(numbers[0])] = int(numbers[1])

    def close(self) -> None:
        """Ends it."""
        self._orders.close()
        self._process.wait(10)
        os.close(self._answers)


def python_path() -> str:
    """`PYTHONPATH` of scripts that import this package and its tests."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


# -- the other side --------------------------------------------------------------------------------------------------


def serve() -> dict[str, Any]:
    """Returns, in a child, the order."""
    children, rest = set[int](), b""
    while True:
        if select.select([0], [], [], 0.01 if children else None)[0]:
            said = os.read(0, 1 << 16)
            if not said:
                sys.exit(0)
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    return dict(json.loads(line))
                children.add(pid)
                print("pid", pid, flush=True)
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                print("rc", pid, os.waitstatus_to_exitcode(status), flush=True)


def become(order: Mapping[str, Any]) -> str:
    """Makes the child what a fresh interpreter would be; returns the script."""
    os.setsid()
    for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        file = os.open(name, flags, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv[:] = order["argv"]
    paths = [str(Path(sys.argv[0]).parent), *order["env"].get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in (*paths, "", str(ROOT)))]
    return sys.argv[0]


if __name__ == "__main__":
    import gc
    import runpy

    import torch

    import lightning_dali.datamodules  # Lightning, torchvision and the rest
    import lightning_dali.testing.fault_run  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a script's way out would look through 400,000 objects of the imports, and copy their pages: a second
    runpy.run_path(become(serve()), run_name="__main__")
