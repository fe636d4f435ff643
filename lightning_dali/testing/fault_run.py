"""One fault in a process of its own: `python -m lightning_dali.testing.fault_run '{"fault": ..., "target": ...}'`.

Runs a Lightning Trainer over the datamodule that `target` makes, and fails where it is told to. `faults.py` starts it and
judges how it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning as L
import torch

STEP = 1
"""The fault comes at this batch, from 0: something has been delivered, and something is under way."""
NUM_BATCHES = 24
"""More than can be under way when the fault comes."""
PATIENCE_SECONDS = 45.0
"""How long a process that is to be interrupted does nothing."""


class FaultError(Exception):
    """What is raised on purpose."""


def say(word: str, value: object) -> None:
    """Tells the process that started this one."""
    print(word, value, flush=True)  # noqa: T201


def strike(fault: str) -> None:
    """Raises, and says when."""
    say("now", time.time())
    raise FaultError(f"injected: {fault}")


def wait_for_a_signal() -> None:
    """Says that it may come, and waits in small steps, as training does."""
    say("now", time.time())
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        time.sleep(0.05)


def is_last(trainer: L.Trainer) -> bool:
    """Whether this rank is the one that fails."""
    return trainer.global_rank == trainer.world_size - 1


class Module(L.LightningModule):
    """Takes any batch, and fails where it is told to, on the last rank."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Fails from the second batch on."""
        if batch_idx >= STEP and is_last(self.trainer):
            misbehave(self.fault, "training_step")
        loss: torch.Tensor = self.layer(torch.ones(1, 1, device=self.device)).sum()
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Fails from the second batch on; in the sanity check from the first."""
        self.log("score", 0.0, sync_dist=True)  # as metrics do: ranks wait for each other
        if not is_last(self.trainer):
            return
        if self.trainer.sanity_checking:
            misbehave(self.fault.removeprefix("sanity_") if self.fault.startswith("sanity_") else "", "")
        elif batch_idx >= STEP:
            fits = self.trainer.state.fn == "fit"
            misbehave("" if fits and self.fault != "validation_step" else self.fault, "validation_step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def misbehave(fault: str, here: str) -> None:
    """Does what the fault asks of a step: raises, waits for a signal, or kills workers."""
    if fault == here or (fault == "two_at_once" and here == "training_step"):
        if fault == "two_at_once":
            time.sleep(1.0)  # the other one is waiting by then
        strike(here)
    elif fault in ("sigint", "sigint_twice"):
        wait_for_a_signal()
    elif fault == "sigterm":
        say("now", time.time())
        time.sleep(0.5)  # Lightning's handler only takes note, and looks at the note after the step
    elif fault == "worker_killed":
        kill_workers()


def kill_workers() -> None:
    """As the system does when memory runs out; the next batches show it."""
    pids = [pid for loader in _LOADERS for pid in loader.worker_pids]
    if pids:
        say("now", time.time())
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the last step's work
            os.kill(pid, signal.SIGKILL)


_LOADERS: list[Any] = []


class Inject(L.Callback):
    """Puts the fault into the datamodule's loaders once it has made them."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """After the datamodule's own."""
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it, undeclared
        for name in ("train", "val"):
            for loader in datamodule._loaders.get(name, []):
                _LOADERS.append(loader)
                if is_last(trainer) and (name == "train") == (stage == "fit"):
                    inject(loader, self.fault)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Fails."""
        if self.fault == "callback":
            strike(self.fault)

    on_validation_start = on_fit_start


def inject(loader: Any, fault: str) -> None:
    """Makes a loader fail: in its dataset, transform, collate function, or in the server's thread."""
    fetcher = loader.fetcher
    if fault in ("dataset", "stuck_sigint", "two_at_once"):
        loader.fetcher = replace(fetcher, dataset=FailingDataset(fetcher.dataset, fault, 2 * loader.batch_size))
    elif fault == "transform":
        loader.fetcher = replace(fetcher, transform=Failing(fault))
    elif fault == "collate":
        loader.fetcher = replace(fetcher, collate_fn=Failing(fault))
    elif fault in ("server_build", "server_run"):
        loader.server.borrow = _borrow_broken(loader.server.borrow, fault)


class FailingDataset:
    """A dataset of which later samples fail, or never come."""

    def __init__(self, dataset: Any, fault: str, after: int) -> None:
        self.dataset, self.fault, self.left = dataset, fault, after

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left < 0:
            if self.fault == "stuck_sigint":
                wait_for_a_signal()
            elif self.fault == "two_at_once":
                raise FaultError("injected: the first of two")
            strike(self.fault)
        return self.dataset[index]


class Failing:
    """A function that fails."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, *values: Any) -> Any:
        strike(self.fault)


def _borrow_broken(borrow: Callable[[], Any], fault: str) -> Callable[[], Any]:
    def broken_borrow() -> Any:
        executors = borrow()
        build = executors._build

        def broken_build(spec: Any) -> Any:
            if fault == "server_build":
                strike(fault)
            executor = build(spec)
            executor.collect = Failing(fault)
            return executor

        executors._build = broken_build
        return executors

    return broken_borrow


def run(
    fault: str,
    target: str,
    *,
    stage: str = "fit",
    options: Mapping[str, Any] | None = None,
    devices: int = 1,
    accelerator: str = "auto",
) -> None:
    """Runs one fault. Returns only if nothing fails."""
    module_name, _, function = target.partition(":")
    datamodule = getattr(importlib.import_module(module_name), function)(**(options or {}))
    if fault == "exit":
        live = iter(datamodule.stage_loaders("train" if stage == "fit" else "val")[0])
        next(live)
        globals()["_live"] = live  # until the interpreter ends
        say("now", time.time())
        return
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        limit_train_batches=NUM_BATCHES,
        limit_val_batches=NUM_BATCHES,
        num_sanity_val_steps=2 if fault.startswith("sanity") else 0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Inject(fault)],
    )
    try:
        getattr(trainer, stage)(Module(fault), datamodule=datamodule)
    except BaseException:
        say("left", json.dumps(_left(datamodule)))
        raise
    say("done", time.time())


def _left(datamodule: Any) -> list[str]:
    """What still lives although the run has failed: it must not take the end of the process to end it."""
    threads = [one.name for one in threading.enumerate() if one.name.startswith("lightning_dali")]
    return threads + [f"worker {pid}" for loader in _LOADERS for pid in loader.worker_pids]


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
