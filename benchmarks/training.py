"""What data costs a training: `python benchmarks/training.py FOLDER`, FOLDER/images/<class>/*.jpg (media.py makes them).

ResNet-50 in bf16-mixed and channels_last under a Lightning Trainer, by turns on live data and on one batch again and again, in one
run. Without a GPU it is ResNet-18 in float32 with small batches, where decoding takes the cores from the model: no target then.
SIGTERM (`timeout`) ends the training, and what was measured is printed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from ends import TOLD, Notice
from lightning.pytorch.callbacks import Callback
from rates import Rate, endless, judged, wait_for_device
from torch import nn
from torchvision import models
from work import image_folder, recipe

from lightning_dali import ImageDataModule

GPU = torch.cuda.is_available()
TARGET: dict[str, float] = {"at_least": 0.99} if GPU else {}
"""Of images a second on live data over those on a cached batch."""
MODEL, BATCH_SIZE, PRECISION = ("resnet50", 256, "bf16-mixed") if GPU else ("resnet18", 8, "32-true")
WARM_UP_SECONDS, FIRST_SECONDS = (0.5, 3.0) if GPU else (1.0, 1.0)
"""Not counted: after each change of kinds, when ready batches are consumed, and after the first step, whose end cuDNN delays."""
KINDS = ("live", "cached")


class Turns(Callback):
    """Says whose turn it is, and counts; the device is waited for at the ends of slices only.

    The order is live, cached, cached, live, live, ...: a drift falls on both, and every second turn needs no warm-up.

    Args:
        batch_size: Samples a step.
        rounds: Turns of each kind.
        slice_seconds: Length of a turn after its warm-up.
        notice: Ends the training.
    """

    def __init__(self, batch_size: int, *, rounds: int, slice_seconds: float, notice: Notice) -> None:
        self.batch_size, self.rounds, self.slice_seconds, self.notice = batch_size, rounds, slice_seconds, notice
        self.slices: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.kind = KINDS[0]
        self._begin: float | None = None
        self._mark: float | None = None
        self._warm_up_seconds = FIRST_SECONDS
        self._steps = 0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.notice.listen()  # Lightning does too, and would end the process

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        if self.notice.given:
            trainer.should_stop = True
            return
        if self._begin is None:
            self._begin = now
        if self._mark is None:
            if now - self._begin >= self._warm_up_seconds:
                wait_for_device()
                self._mark, self._steps = time.perf_counter(), 0
            return
        self._steps += 1
        if now - self._mark >= self.slice_seconds:
            wait_for_device()
            self._note(self.batch_size * self._steps / (time.perf_counter() - self._mark))
            trainer.should_stop = all(len(slices) == self.rounds for slices in self.slices.values())

    def _note(self, rate: float) -> None:
        mine = self.slices[self.kind]
        mine.append(rate)
        print(f"round {len(mine)}/{self.rounds}  {self.kind}: {rate:.0f} /s", flush=True)
        before, turn = self.kind, sum(map(len, self.slices.values()))
        self.kind = KINDS[(turn + 1) // 2 % 2]
        self._begin, self._mark = time.perf_counter(), None
        self._warm_up_seconds = 0.0 if self.kind == before else WARM_UP_SECONDS


class Alternating:
    """The loader's batches, or its first one again, as `turns` says."""

    def __init__(self, loader: Any, turns: Turns) -> None:
        self.loader, self.turns = loader, turns

    def __len__(self) -> int:
        return (
            1_000_000  # known, so that Lightning asks for a batch when it needs it, as it does with the loader itself
        )

    def __iter__(self) -> Iterator[Any]:
        live = endless(self.loader)
        images, labels = next(live)
        cached = images.clone(memory_format=torch.preserve_format), labels
        while True:
            yield next(live) if self.turns.kind == "live" else cached


class Data(ImageDataModule):
    """`ImageDataModule`, whose training loader takes turns with a cached batch."""

    turns: Turns

    def train_dataloader(self) -> Any:
        return Alternating(super().train_dataloader(), self.turns)


class Classifier(L.LightningModule):
    """A torchvision model without weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = models.get_model(name).to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--model", default=MODEL, help="a classifier of torchvision")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--precision", default=PRECISION)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a slice")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")  # hints for users: of logging, of workers
    dm = Data(
        train_dataset=image_folder(options.folder, options.batch_size, transform=recipe("imagenet")),
        batch_size=options.batch_size, num_workers=options.workers, channels_last=True,
    )  # fmt: skip
    notice = Notice()
    dm.turns = turns = Turns(
        options.batch_size, rounds=options.rounds, slice_seconds=options.seconds, notice=notice
    )  # fmt: skip
    trainer = L.Trainer(
        devices=1, max_epochs=1, precision=options.precision, benchmark=GPU, callbacks=[turns], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with notice:
        trainer.fit(Classifier(options.model), datamodule=dm)
        dm.close()
        print(f"\n{notice}" if notice.given else "", flush=True)
        rates = {kind: Rate(tuple(slices)) for kind, slices in turns.slices.items()}
        for kind, rate in rates.items():
            print(f"{options.model} {options.precision} {kind:<24} {rate}")
        if all(turns.slices.values()):
            print(judged("live / cached", rates["live"].median / rates["cached"].median, **TARGET))
    if notice.given:
        sys.exit(TOLD)


if __name__ == "__main__":
    main()
