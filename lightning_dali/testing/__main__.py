"""`python -m lightning_dali.testing faults module:function`: the fault table on your own datamodule.

The function takes no arguments and makes the datamodule. Exit status 1 if some fault did not end as it should.
"""

from __future__ import annotations

import argparse
import os
import sys

from lightning_dali.testing.faults import FAULTS, Outcome, play_all

SUBSET = ("training_step", "validation_step", "dataset", "worker_killed", "sigint", "sigint_twice", "sigterm", "exit")
"""What differs from one datamodule to another; `--all` runs the rest too."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the table and prints it."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_dali.testing", description=(__doc__ or "").split("\n\n")[1]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    faults = commands.add_parser("faults", help="fail in many ways, and see how the run ends")
    faults.add_argument("target", help="module:function; the function makes the datamodule")
    faults.add_argument("--all", action="store_true", help="every fault, not the short list")
    faults.add_argument("--fault", action="append", choices=list(FAULTS), help="this one only; may be repeated")
    faults.add_argument("--stage", default="fit", choices=("fit", "validate"))
    faults.add_argument("--devices", type=int, default=1, help="ranks")
    faults.add_argument("--accelerator", default="auto", help="Lightning's")
    chosen = parser.parse_args(arguments)
    module, separator, function = chosen.target.partition(":")
    if not (module and separator and function):
        parser.error(f"target is {chosen.target!r}: expected module:function, such as my_project.data:make_datamodule")
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))

    def told(outcome: Outcome) -> None:
        print(outcome, flush=True)  # noqa: T201
        if outcome.problems:
            print("     | " + outcome.stderr.strip()[-1500:].replace("\n", "\n     | "), flush=True)  # noqa: T201

    outcomes = play_all(
        chosen.target,
        faults=chosen.fault or (list(FAULTS) if chosen.all else SUBSET),
        told=told,
        stage=chosen.stage,
        devices=chosen.devices,
        accelerator=chosen.accelerator,
    )
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
