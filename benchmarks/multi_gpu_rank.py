"""What each rank of `multi_gpu.py` runs: `multi_gpu_rank.py PHASE RANKS ROOT [OPTIONS]`; Lightning starts ranks above 0.

Each rank writes what it saw to ROOT/PHASE.<rank>.json; `multi_gpu.py` judges it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rates import Meter, endless, measure
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2
from work import FRAMES, KINDS, RATE, SIZE, STARTS, STRIDE, Utterances, Videos, recipe, videos_in

from lightning_dali import ClipSampler, ImageDataModule, SpeechDataModule, VideoDataModule
from lightning_dali.testing import IndexedImages

BATCH, SEED, EVALUATED = 4, 7, 61
"""Samples of a rank in a step of the checks, the seed of their order, and how many samples are evaluated."""
STOP = 6
"""Batches of a rank after which training stops: epochs have 4, so in the middle of epoch 1."""
BATCH_SIZES = {"images": 256, "speech": 64, "video": 16}
"""Of a rank, for throughput, as in the benchmarks of one GPU."""
CHANNELS = {"images": 3, "speech": 1, "video": 3}
AGREE = 8
"""Steps between two questions whether all ranks are done: each is a collective."""


def trainer(options: argparse.Namespace, *callbacks: Callback, **more: Any) -> L.Trainer:
    """DDP over the first `ranks` GPUs (NCCL), or over CPU processes (gloo)."""
    return L.Trainer(
        accelerator="cpu" if options.cpu else "gpu", devices=options.ranks, strategy="ddp", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        default_root_dir=options.root, callbacks=list(callbacks), **more,
    )  # fmt: skip


# -- checks ----------------------------------------------------------------------------------------------------------


def processes_on_gpus() -> dict[int, list[str]]:
    """From a pid to the UUIDs of the GPUs that nvidia-smi lists it on."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    found: dict[int, list[str]] = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines():
        pid, _, uuid = line.partition(",")
        if pid.strip().isdigit():
            found.setdefault(int(pid), []).append(uuid.strip())
    return found


def contexts() -> list[str]:
    """UUIDs of the GPUs on which this process has a context, as the driver says."""
    cuda, found = ctypes.CDLL("libcuda.so.1"), []
    for device in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += [uuid_of(device)] * active.value
    return found


def uuid_of(device: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class Checked(L.LightningModule):
    """Writes down which samples it saw; all-reduces at every step, so that a rank with fewer would hang the others."""

    def __init__(self, options: argparse.Namespace, *, raises: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.options, self.raises = options, raises
        self.seen: dict[str, list[list[Any]]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, ids = batch
        self.seen["train"].append([self.current_epoch, batch_idx, ids.tolist()])
        if self.raises and len(self.seen["train"]) == 3:
            self.fail()
        return self.layer(images.mean((1, 2, 3))[:, None]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["val"].append([0, batch_idx, batch[1].tolist()])
        torch.distributed.all_reduce(torch.ones(1, device=self.device))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def fail(self) -> None:
        """Raises on the last rank, when all have written down which processes there are."""
        workers = [pid for loader in self.trainer.datamodule.stage_loaders() for pid in loader.worker_pids]
        write(self.options, "pids", self.global_rank, [os.getpid(), *workers])
        torch.distributed.barrier()
        if self.global_rank == self.trainer.world_size - 1:
            write(self.options, "raised", 0, time.time())
            raise ValueError(f"rank {self.global_rank} has had enough")


class Stop(Callback):
    """Saves a checkpoint in the middle of an epoch, looks at the GPUs, and stops."""

    def __init__(self, path: Path) -> None:
        self.path, self.gpus = path, {}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx + 1 != STOP:
            return
        if module.device.type == "cuda":
            workers = [pid for loader in trainer.datamodule.stage_loaders() for pid in loader.worker_pids]
            listed = processes_on_gpus()
            self.gpus = {
                "own": uuid_of(module.device.index),
                "listed": listed.get(os.getpid(), []),
                "contexts": contexts(),
                "workers": [uuid for pid in workers for uuid in listed.get(pid, [])],
            }
        trainer.save_checkpoint(self.path)  # a barrier too: nobody leaves before all have looked
        trainer.should_stop, trainer.fit_loop.min_epochs = True, None


def train_size(ranks: int) -> int:
    """Samples of the checks' training: 4 steps an epoch on all ranks, and 5 samples that fill none."""
    return 4 * BATCH * ranks + 5


def check_data(options: argparse.Namespace) -> ImageDataModule:
    scaled = v2.ToDtype(torch.float32, scale=True)
    paths = sorted(Path(options.root, "photos").iterdir())
    train = IndexedImages(paths[: train_size(options.trained_on)], v2.Compose([v2.RandomResizedCrop(32), scaled]))
    val = IndexedImages(paths[:EVALUATED], v2.Compose([v2.Resize((32, 32)), scaled]))
    return ImageDataModule(train_dataset=train, val_dataset=val, batch_size=BATCH, seed=SEED, num_workers=1)


def check(options: argparse.Namespace) -> None:
    """Evaluation, training that stops in the middle of an epoch, and an exception on the last rank."""
    module, stop = Checked(options), Stop(Path(options.root, "stopped.ckpt"))
    trainer(options).validate(module, datamodule=check_data(options), verbose=False)
    trainer(options, stop, max_epochs=3, limit_val_batches=0).fit(module, datamodule=check_data(options))
    write(options, "check", module.global_rank, {**module.seen, "gpus": stop.gpus})
    trainer(options, max_epochs=3, limit_val_batches=0).fit(
        Checked(options, raises=True), datamodule=check_data(options)
    )


def resume(options: argparse.Namespace) -> None:
    """The rest of the epoch on other ranks."""
    module, path = Checked(options), Path(options.root, "stopped.ckpt")
    trainer(options, max_epochs=2, limit_val_batches=0).fit(module, datamodule=check_data(options), ckpt_path=path)
    write(options, "resume", module.global_rank, module.seen)


# -- throughput ------------------------------------------------------------------------------------------------------


class Again(Dataset[Any]):
    """A dataset again and again, so that an epoch is no shorter than a measurement."""

    def __init__(self, dataset: Any, num_samples: int) -> None:
        self.dataset, self.num_samples = dataset, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


def rate_data(options: argparse.Namespace) -> Any:
    """The datamodule of a kind, with the library's own numbers of workers and threads."""
    folder, kind = options.folder, options.kind
    common: dict[str, Any] = {"batch_size": options.batch_size or BATCH_SIZES[kind]}
    num_samples = common["batch_size"] * options.ranks * 400
    if kind == "images":
        paths = sorted(Path(folder, "images").glob("*/*.jpg"))
        return ImageDataModule(train_dataset=Again(IndexedImages(paths, recipe("imagenet")), num_samples), **common)
    if kind == "speech":
        return SpeechDataModule(train_dataset=Again(Utterances(folder), num_samples), **common)
    paths = [path for name in KINDS for path in videos_in(folder, name)]
    clip = ClipSampler(FRAMES, stride=STRIDE, end_seconds=(STARTS + (FRAMES - 1) * STRIDE) / RATE)
    transform = v2.Compose([v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, scale=True)])
    return VideoDataModule(
        train_dataset=Again(Videos(paths), num_samples), train_transform=transform, clip=clip, **common
    )


class Net(L.LightningModule):
    """Two convolutions: enough to be a training, too little to be what is waited for."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 7, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
        self.channels = channels

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data = getattr(batch[0], "data", batch[0]) if isinstance(batch[0], tuple) else batch[0]  # Padded is a tuple
        return self.layers(data.reshape(-1, self.channels, *data.shape[-2:])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rates(Callback):
    """Measures the loader alone before training begins, then training itself."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.found = options, {}
        self.meter: Meter | None = None

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        datamodule: Any = trainer.datamodule
        loader = datamodule.stage_loaders()[0]
        self.found = {"workers": loader.num_workers, "cores": len(os.sched_getaffinity(0))}
        trainer.strategy.barrier()
        alone = measure(endless(loader), loader.batch_size, seconds=self.options.seconds)
        trainer.strategy.barrier()
        loader.stop()
        self.found["alone"] = alone.median
        self.meter = Meter(loader.batch_size, seconds=self.options.seconds)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.meter is not None
        self.meter.tick()
        if batch_idx % AGREE == AGREE - 1 and trainer.strategy.reduce_boolean_decision(self.meter.done, all=False):
            self.found["training"] = self.meter.rate.median
            trainer.should_stop, trainer.fit_loop.min_epochs = True, None


def rate(options: argparse.Namespace) -> None:
    rates = Rates(options)
    one = trainer(options, rates, max_epochs=-1)
    one.fit(Net(CHANNELS[options.kind]), datamodule=rate_data(options))
    write(options, "rate", one.global_rank, rates.found)


# -- a process -------------------------------------------------------------------------------------------------------


def write(options: argparse.Namespace, phase: str, rank: int, what: Any) -> None:
    Path(options.root, f"{phase}.{rank}.json").write_text(json.dumps(what))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=["check", "resume", "rate"])
    parser.add_argument("ranks", type=int)
    parser.add_argument("root")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--trained-on", type=int, help="ranks of the training that is resumed")
    parser.add_argument("--kind", choices=list(BATCH_SIZES))
    parser.add_argument("--folder")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")  # hints for users: logging, workers of the validation
    {"check": check, "resume": resume, "rate": rate}[options.phase](options)


if __name__ == "__main__":
    main()
