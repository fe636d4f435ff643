"""Starts fault runs from a process that has imported everything: a fresh interpreter would need seconds for that, each time.

Runs between pytest and the runs: it reads one JSON line a run, forks, and writes its pid and later its exit status. The
child leaves the loop, fails, and ends as any interpreter does. Neither torch nor DALI has started a thread here.
"""

import json
import os
import sys

import lightning_dali.datamodules  # noqa: F401  # Lightning, torchvision and the rest
from lightning_dali.testing import fault_run


def serve() -> str:
    """Returns, in a child, the arguments of the run."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
                os.dup2(os.open(name, os.O_WRONLY if number else os.O_RDONLY), number)
            return str(order["arguments"])
        print("pid", pid, flush=True)
        status = os.waitpid(pid, 0)[1]
        print("rc", os.waitstatus_to_exitcode(status), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    fault_run.run(**json.loads(serve()))
