"""The one place that reads where this process runs: ranks, cores, device.

Runs in the rank. Everything else takes these as arguments.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from lightning_dali.sampling import Shard


def shard_of(trainer: Any) -> Shard:
    """This process's share of the data: the trainer's ranks, else torch.distributed's, else everything."""
    if trainer is not None:
        return Shard(int(trainer.global_rank), int(trainer.world_size))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Shard()


def local_world_size(trainer: Any) -> int:
    """How many ranks share this host's cores."""
    if trainer is not None:
        return max(1, int(trainer.num_devices))
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def default_num_workers(trainer: Any) -> int:
    """Half of this rank's cores, from 1 to 8: more only take cores from DALI (docs/decisions)."""
    return max(1, min(8, cores() // local_world_size(trainer) // 2))


def default_num_threads(trainer: Any) -> int:
    """DALI's CPU threads when none are given: a quarter of this rank's cores, from 2 to 8."""
    return max(2, min(8, cores() // local_world_size(trainer) // 4))


def global_seed() -> int:
    """The seed of `lightning.seed_everything`, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def device_index(device: Any, trainer: Any) -> int | None:
    """The CUDA device of this rank; None for the CPU.

    Args:
        device: ``"auto"`` (the trainer's, else the current CUDA device if there is one), ``"cpu"``, ``"cuda"``,
            ``"cuda:1"``, an int or a `torch.device`.
        trainer: The Lightning trainer, if attached.
    """
    if device == "auto":
        if trainer is not None:
            root = trainer.strategy.root_device
            return (root.index or 0) if root.type == "cuda" else None
        return torch.cuda.current_device() if torch.cuda.is_available() else None
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise ValueError(
            f"device is {device!r}: DALI runs on CUDA devices and on the CPU; allowed: 'auto', 'cpu', 'cuda:N'."
        )
    if not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; pass device='cpu' or 'auto'.")
    return torch.cuda.current_device() if wanted.index is None else wanted.index
