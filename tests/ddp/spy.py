"""A module that writes down which samples it saw, and the data for it. Used by tests in this process and by scripts."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torchvision.transforms import v2

from lightning_dali import ImageDataModule
from lightning_dali.testing import IndexedImages, make_photos

SIZES = ((40, 52), (52, 40), (44, 44))
TRANSFORM = v2.Compose(
    [v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4), v2.ToDtype(torch.float32, scale=True)]
)
PLAIN = v2.Compose([v2.Resize((24, 24)), v2.ToDtype(torch.float32, scale=True)])


class Seen(NamedTuple):
    """One batch."""

    stage: str
    epoch: int
    step: int
    loader: int
    rank: int
    ids: list[int]
    digests: list[str]
    """One a sample, of its pixels: two are equal if the augmentation was."""


def digests(images: torch.Tensor) -> list[str]:
    return [hashlib.sha1(image.cpu().numpy().tobytes()).hexdigest()[:12] for image in images]


class Spy(L.LightningModule):
    def __init__(
        self, *, one_cycle: bool = False, on_step: Callable[[Spy], None] | None = None, dump_to: Path | None = None
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.one_cycle, self.on_step, self.dump_to = one_cycle, on_step, dump_to
        self.seen: list[Seen] = []

    def note(self, stage: str, batch: Any, step: int, loader: int = 0) -> torch.Tensor:
        images, ids = batch
        row = Seen(stage, self.current_epoch, step, loader, self.global_rank, ids.tolist(), digests(images))
        self.seen.append(row)
        return self.layer(images.mean((1, 2, 3))[:, None]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.note("train", batch, batch_idx)
        if self.on_step is not None:
            self.on_step(self)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.note("sanity" if self.trainer.sanity_checking else "val", batch, batch_idx, dataloader_idx)
        self.log("val", loss, batch_size=len(batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        self.note("predict", batch, batch_idx, dataloader_idx)
        return batch[1].tolist()

    def on_fit_end(self) -> None:
        if self.dump_to is not None:
            dump(f"{self.dump_to}.{self.global_rank}.json", self.seen)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if not self.one_cycle:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def rows(self, stage: str = "train", epoch: int | None = None) -> list[Seen]:
        return [row for row in self.seen if row.stage == stage and epoch in (None, row.epoch)]


def ids(rows: Iterable[Seen]) -> list[int]:
    return [index for row in rows for index in row.ids]


def drawn(rows: Iterable[Seen]) -> dict[tuple[int, int], str]:
    """From (epoch, dataset index) to what came out."""
    return {(row.epoch, index): what for row in rows for index, what in zip(row.ids, row.digests, strict=True)}


def photos(folder: Path, n: int) -> IndexedImages:
    return IndexedImages(make_photos(folder, n, format="png", sizes=SIZES), TRANSFORM)


def datamodule(dataset: Any, **options: Any) -> ImageDataModule:
    settings = {"batch_size": 4, "num_workers": 0, "num_threads": 1, "seed": 7, **options}
    return ImageDataModule(train_dataset=dataset, **settings)


def trainer(root: Path | str, *callbacks: Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "default_root_dir": root,
        "callbacks": list(callbacks),
        **options,
    }
    return L.Trainer(**settings)


class SaveAt(Callback):
    """Saves a checkpoint when so many optimizer or training batches are done, and may stop there."""

    def __init__(self, path: Path | str, batches: int, *, stop: bool = True) -> None:
        self.path, self.batches, self.stop = path, batches, stop

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)
            if self.stop:
                trainer.should_stop = True
                trainer.fit_loop.min_epochs = None


@contextmanager
def warnings_of_lightning() -> Iterator[list[str]]:
    """The texts of Lightning's warnings in the block."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [text for one in caught if "LeafSpec" not in (text := str(one.message))]  # that is Lightning's and torch's


def dump(path: Path | str, rows: Sequence[Seen]) -> None:
    Path(path).write_text(json.dumps(rows))


def load(*paths: Path | str) -> list[Seen]:
    return [Seen(*row) for path in paths for row in json.loads(Path(path).read_text())]


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
