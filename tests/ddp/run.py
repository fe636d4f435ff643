"""A script of two ranks: everything that needs a process group, in one start of it. See test_ddp.py.

`run.py ROOT MODE`; what each rank saw is written to ROOT/MODE.<phase>.<rank>.json.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from lightning_dali.testing import IndexedImages
from tests.ddp.spy import PLAIN, SaveAt, Spy, datamodule, dump, trainer

ROOT = Path(sys.argv[1])
MODE = sys.argv[2]


def pictures(n: int, *, plain: bool = False) -> IndexedImages:
    """The first `n` of the pictures that the test wrote."""
    from tests.ddp.spy import TRANSFORM

    return IndexedImages(sorted((ROOT / "photos").iterdir())[:n], PLAIN if plain else TRANSFORM)


class Metric(Spy):
    """A module whose validation all-reduces at every step: a rank with fewer steps would hang the others."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        torch.distributed.all_reduce(torch.ones(1))


def ranks(name: str, *callbacks: Any, **options: Any) -> Any:
    strategy = options.pop("strategy", "ddp")
    return trainer(ROOT / name, *callbacks, **{"devices": 2, "strategy": strategy, **options})


def finish(phase: str, spy: Spy) -> None:
    dump(ROOT / f"{MODE}.{phase}.{spy.global_rank}.json", spy.seen)


def several() -> None:
    # 61 samples on two ranks, and twice as many loaders, two epochs.
    spy = Metric()
    dm = datamodule(pictures(61), val_dataset={"all": pictures(61), "three": pictures(3)}, num_workers=1)
    ranks("all", max_epochs=2, num_sanity_val_steps=0).fit(spy, datamodule=dm)
    finish("fit", spy)
    # The same ranks: train a little, save inside epoch 1, go on from there on two ranks.
    spy = Spy()
    dm = datamodule(pictures(61), num_workers=1)
    ranks("stop", SaveAt(ROOT / "two.ckpt", 10), max_epochs=3).fit(spy, datamodule=dm)
    finish("stopped", spy)
    # One rank saved this (the test did, before): go on with two.
    spy = Spy()
    dm = datamodule(pictures(61), batch_size=4, num_workers=0)
    ranks("resumed", SaveAt(ROOT / "again.ckpt", 21), max_epochs=3).fit(spy, datamodule=dm, ckpt_path=ROOT / "one.ckpt")
    finish("resumed", spy)
    # Evaluation and prediction; lists of loaders.
    spy = Metric()
    dm = datamodule(None, val_dataset=[pictures(61)], test_dataset=[pictures(61), pictures(5)],
                    predict_dataset=pictures(61), num_workers=0)  # fmt: skip
    one = ranks("evaluate")
    one.validate(spy, datamodule=dm, verbose=False)
    one.test(spy, datamodule=dm, verbose=False)
    found = one.predict(spy, datamodule=dm)
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, found)
    steps = [index for step in zip(*gathered, strict=True) for rank in step for index in rank]
    assert steps == list(range(61)), steps
    finish("evaluated", spy)
    # Samplers of the user's own, dealt to the ranks or not.
    for phase, deal, sampler in (
        ("weighted", True, WeightedRandomSampler([1.0] * 30 + [0.0] * 31, 40)),
        ("distributed", True, lambda dataset: DistributedSampler(dataset, seed=3)),
        ("own", False, list(range(int(os.environ["LOCAL_RANK"]), 61, 2))[:30]),
    ):
        spy = Spy()
        dm = datamodule(pictures(61, plain=True), sampler=sampler)
        ranks(phase, use_distributed_sampler=deal, max_epochs=2).fit(spy, datamodule=dm)
        finish(phase, spy)
    # Three samples, one a step.
    spy = Metric()
    dm = datamodule(pictures(3), val_dataset=pictures(3), batch_size=1)
    ranks("three", max_epochs=2, num_sanity_val_steps=0, use_distributed_sampler=False).fit(spy, datamodule=dm)
    finish("three", spy)


def once() -> None:
    """One short fit, for other ways to start ranks, and one that fails on rank 1."""
    options: dict[str, Any] = {
        "spawn": {"strategy": "ddp_spawn"},
        "nodes": {"devices": 1, "num_nodes": 2},
        "slurm": {"devices": 2},
        "fsdp": {"strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)},
        "crash": {},
    }[MODE]
    module = Sharded if MODE == "fsdp" else Spy
    spy = module(dump_to=ROOT / MODE, on_step=crash if MODE == "crash" else None)
    # "fork": a spawned rank's platform default is to spawn its workers too, four more imports here
    dm = datamodule(pictures(61), val_dataset=pictures(61), num_workers=1, multiprocessing_context="fork")
    ranks(MODE, **{"num_sanity_val_steps": 0, **options}).fit(spy, datamodule=dm)


class Sharded(Spy):
    """A module whose parameters are spread over the ranks by torch's FSDP2."""

    def configure_model(self) -> None:
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        assert all(isinstance(parameter, DTensor) for parameter in self.parameters())


def in_ray() -> None:
    """The same fit in each of two of Ray's workers."""
    import ray  # only where Ray is
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def fit() -> None:
        from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

        spy = Spy(dump_to=ROOT / MODE)
        dm = datamodule(pictures(61), val_dataset=pictures(61), num_workers=1, multiprocessing_context="fork")
        options = {"devices": "auto", "strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]}
        ranks(MODE, num_sanity_val_steps=0, **options).fit(spy, datamodule=dm)

    # Its own folder and not pytest's: the paths of Ray's sockets would be too long there.
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,  # a worker's exception comes anyway, and is not lost among Ray's own lines
            object_store_memory=100 << 20,  # a container may have little shared memory
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            config = RunConfig(storage_path=str(ROOT / "ray"))
            TorchTrainer(fit, scaling_config=ScalingConfig(num_workers=2), run_config=config).fit()
        finally:
            ray.shutdown()


def crash(spy: Spy) -> None:
    if spy.global_rank == 1 and len(spy.seen) == 3:
        raise ValueError("rank 1 has had enough")


def contexts() -> list[int]:
    """CUDA devices on which this process has a context, as the driver says."""
    cuda = ctypes.CDLL("libcuda.so.1")
    found = []
    for device in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found += [device] * active.value
    return found


def gpus(devices: Any) -> None:
    """Fits on GPUs; each rank says where its batches were and which devices it touched."""

    def check(spy: Spy) -> None:
        if len(spy.seen) == 5:
            print("rank", spy.global_rank, "batch", where[-1], "module", spy.device, "contexts", contexts(), flush=True)

    where: list[Any] = []

    class Place(Spy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            where.append(batch[0].device)
            return super().training_step(batch, batch_idx)

    options = {"accelerator": "gpu", "devices": devices, "strategy": "ddp" if devices == 2 else "auto"}
    trainer(ROOT / "gpus", **options).fit(Place(on_step=check), datamodule=datamodule(pictures(61), num_workers=1))


def soak(times: int) -> None:
    """Starts and stops passes, each with fresh workers: forks beside DALI's and gloo's threads."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{ROOT}/store", rank=rank, world_size=2)
    dm = datamodule(pictures(61), val_dataset=pictures(61), num_workers=1, persistent_workers=False)
    for number in range(times):
        loader = dm.train_dataloader() if number % 3 else dm.val_dataloader()
        for step, (images, _) in enumerate(loader):
            total = images.mean()[None]
            torch.distributed.all_reduce(total)
            if step == number % 4:
                break
        faulthandler.dump_traceback_later(60, exit=True)  # of the next round
    faulthandler.cancel_dump_traceback_later()
    dm.close()
    torch.distributed.destroy_process_group()
    print("rounds", times)


if __name__ == "__main__":
    if MODE == "several":
        several()
    elif MODE == "soak":
        soak(int(sys.argv[3]))
    elif MODE == "gpus":
        gpus(2 if sys.argv[3] == "both" else [1])
    elif MODE == "ray":
        in_ray()
    else:
        once()
