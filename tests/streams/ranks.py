"""Two ranks of one host over streams: `python -c "... main(ROOT)"`. Each writes what it saw to ROOT/PHASE.RANK.json.

Both are forks of one process, with the variables that torchrun sets, so everything is imported once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.utils.data import get_worker_info

from lightning_dali.testing import make_images
from tests.ddp.spy import TRANSFORM, SaveAt, Spy, datamodule, dump, trainer
from tests.streams.datasets import Pictures, Placed, Sized

BATCH = 4


class Reducing(Spy):
    """Ranks talk at every step: one that took fewer would leave the other waiting."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.distributed.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        torch.distributed.all_reduce(torch.ones(1))
        super().validation_step(batch, batch_idx, dataloader_idx)


class OnWorkersOnly(Pictures):
    """Asks which worker it is and forgets that there are ranks."""

    def __iter__(self) -> Iterator[Any]:
        import PIL.Image

        info = get_worker_info()
        assert info is not None
        for index, path in list(enumerate(self.paths))[info.id :: info.num_workers]:
            yield self.transform(PIL.Image.open(path)), index


def fit(root: Path, phase: str, dm: Any, *callbacks: Any, path: Any = None, **options: Any) -> Spy:
    """Both ranks train and validate; what they saw, or how it ended, is written down."""
    spy = Reducing()
    settings = {"devices": 2, "strategy": "ddp", "max_epochs": 2, "num_sanity_val_steps": 0, **options}
    error = ""
    try:
        trainer(root / phase, *callbacks, **settings).fit(spy, datamodule=dm, ckpt_path=path)
    except (ValueError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    rank = int(os.environ["RANK"])
    dump(root / f"{phase}.{rank}.json", spy.seen)
    (root / f"{phase}.{rank}.txt").write_text(error)
    return spy


def rank_main(rank: int, root: Path, port: int) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    paths = sorted((root / "images").iterdir())

    def data(kind: Any, n: int, **options: Any) -> Any:
        return datamodule(kind(paths[:n], TRANSFORM, shuffle=True), num_workers=1, batch_size=BATCH, **options)

    # 17 and 16 samples: 4 and 4 batches in training; 9 and 8 in validation: 3 and 2 batches, so one rank begins again.
    fit(root, "lengths", data(Sized, 33, val_dataset=Sized(paths[:17], TRANSFORM)))
    # No length, and a limit beyond what there is.
    fit(root, "limit", data(Pictures, 17, drop_last=False), limit_train_batches=5)
    fit(root, "neither", data(Pictures, 17))
    fit(root, "val", data(Sized, 17, val_dataset=Pictures(paths[:17], TRANSFORM)), limit_train_batches=2)
    # Stopped in epoch 1, and on again: rank 0 wrote the checkpoint, which says nothing of rank 1's place.
    fit(root, "whole", data(Placed, 41))
    fit(root, "stopped", data(Placed, 41), SaveAt(root / "stop.ckpt", 7))
    fit(root, "resumed", data(Placed, 41), path=root / "stop.ckpt")
    # The first rank that notices ends, and with it the other one, wherever it is.
    fit(root, "same", data(OnWorkersOnly, 33), limit_train_batches=4)


def main(root: Path) -> None:
    make_images(root / "images", 41)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    mp.start_processes(rank_main, (root, port), nprocs=2, start_method="fork")
