"""Starts and ends: `python benchmarks/lifecycle.py FOLDER`, FOLDER/images/<class>/*.jpg (media.py makes them).

Seconds from `fit` to the first batch, in a process that has used neither CUDA nor DALI, and once more; from the last step of an
epoch to the first one of the next; from the last step to the end of `fit` and of the workers. And what the loader costs the
training thread: its CPU time in `next` and in the transfer, waiting not counted.

A step sleeps for as long as ResNet-50 takes for the batch, so that data is ready when the model wants it: what then remains of an
epoch's start is the loader's own.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rates import judged, wait_for_device
from torch import nn
from work import image_folder, recipe

from lightning_dali import ImageDataModule

GPU = torch.cuda.is_available()
BATCH_SIZE, STEP_SECONDS = (256, 0.055) if GPU else (16, 0.08)
STEPS, EPOCHS = 20, 6
FIRST, GAP, END, PYTHON_MS = 6.0, 0.1, 1.0, 1.0
"""Targets, at most: seconds to the first batch, between epochs, to the end; milliseconds of the training thread."""


class Clock(Callback):
    """Notes when steps begin and end."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.ended = 0.0
        self.gaps: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        elif batch_idx == 0:
            self.gaps.append(now - self.ended)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        wait_for_device()
        self.ended = time.perf_counter()


class Timed:
    """A loader whose batches cost the caller so much CPU time each; in all else it is the loader."""

    def __init__(self, loader: Any, spent: list[float]) -> None:
        self._loader, self._spent = loader, spent

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            start = time.thread_time()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._spent.append(time.thread_time() - start)
            yield batch


class Data(ImageDataModule):
    """`ImageDataModule`, which counts what it costs the training thread."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spent: list[float] = []

    def train_dataloader(self) -> Any:
        return Timed(super().train_dataloader(), self.spent)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        start = time.thread_time()
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        self.spent[-1] += time.thread_time() - start
        return moved


class Sleeper(L.LightningModule):
    """A model that costs no core."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__()
        self.layer, self.step_seconds = nn.Linear(1, 1), step_seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_seconds)
        loss: torch.Tensor = self.layer(batch[0][:1, :1, 0, 0].float()).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(dm: Data, options: argparse.Namespace) -> tuple[Clock, float, float]:
    """Trains; returns the clock, and when `fit` began and ended."""
    clock = Clock()
    trainer = L.Trainer(
        devices=1, max_epochs=options.epochs, callbacks=[clock], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    begin = time.perf_counter()
    trainer.fit(Sleeper(options.step_seconds), datamodule=dm)
    return clock, begin, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")  # hints for users: of logging, of workers
    dm = Data(
        train_dataset=image_folder(options.folder, options.batch_size, num_batches=STEPS, transform=recipe("imagenet")),
        batch_size=options.batch_size, num_workers=options.workers,
    )  # fmt: skip
    for words in ("seconds from fit to the first batch", "the same, in a second fit"):
        clock, begin, end = fit(dm, options)
        assert clock.first is not None
        print(judged(words, clock.first - begin, at_most=FIRST), flush=True)
        for words, value in (("median", statistics.median(clock.gaps)), ("longest", max(clock.gaps))):
            print(judged(f"seconds to a new epoch, {words} of {len(clock.gaps)}", value, at_most=GAP), flush=True)
        print(judged("seconds from the last step to the end of fit", end - clock.ended), flush=True)
    begin = time.perf_counter()
    dm.close()
    closing = time.perf_counter() - begin
    print(judged("seconds until graphs and workers are gone", closing), flush=True)
    print(judged("seconds to shut down", end - clock.ended + closing, at_most=END), flush=True)
    milliseconds = sorted(1000 * seconds for seconds in dm.spent)
    print(judged("ms of the training thread a batch, median", statistics.median(milliseconds), at_most=PYTHON_MS))
    print(judged("ms of the training thread a batch, 90th percentile", milliseconds[9 * len(milliseconds) // 10]))


if __name__ == "__main__":
    main()
