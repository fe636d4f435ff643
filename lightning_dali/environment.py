"""The one place that reads where this process runs: ranks, cores, device.

Runs in the rank. Everything else takes these as arguments.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from lightning_dali.sampling import Shard

logger = logging.getLogger(__name__)

RANKS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Pairs of variables that launchers (torchrun, srun) set: a rank and the number of ranks."""


def shard_of(trainer: Any) -> Shard:
    """This process's share of the data: the trainer's ranks, else torch.distributed's, else torchrun's, else everything.

    Raises:
        RuntimeError: What the launcher set, torch.distributed and the trainer say contradicts itself.
    """
    launched = _launched(os.environ)
    group = _group()
    if trainer is None:
        return group or launched or Shard()
    rank, world_size = int(trainer.global_rank), int(trainer.world_size)
    if not 0 <= rank < world_size:
        raise _contradiction(f"the trainer has global_rank={rank} and world_size={world_size}")
    if world_size > 1 and group not in (None, Shard(rank, world_size)):
        raise _contradiction(
            f"the trainer has global_rank={rank} and world_size={world_size}, torch.distributed {group}"
        )
    if world_size == 1 and group is None and launched is not None and launched.world_size > 1:
        _warn_of_lone_ranks(launched.world_size)
    # ranks that share one sample's work (tensor parallelism) get the same data: the strategy knows how many others there are
    of_data = getattr(trainer, "distributed_sampler_kwargs", None) if world_size > 1 else None
    if isinstance(of_data, dict) and {"rank", "num_replicas"} <= of_data.keys():
        return Shard(int(of_data["rank"]), int(of_data["num_replicas"]))
    return Shard(rank, world_size)


@functools.cache  # once: it is asked for at every stage
def _warn_of_lone_ranks(launched: int) -> None:
    logger.warning(
        "the launcher started %d processes, but the trainer has world_size=1: each process trains on every sample. "
        "If that is not intended, set Trainer(devices=..., num_nodes=...) to what was launched.",
        launched,
    )


def _group() -> Shard | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return None


def _launched(environ: Mapping[str, str]) -> Shard | None:
    """What torchrun says about this process; every launcher's variables are checked."""
    for names in RANKS:
        if not all(name in environ for name in names):
            continue  # Lightning's own launcher sets WORLD_SIZE alone, an interactive SLURM session SLURM_NTASKS
        try:
            rank, world_size = (int(environ[name]) for name in names)
        except ValueError:
            raise _contradiction(f"{names[0]} and {names[1]} must be integers") from None
        if not 0 <= rank < world_size:
            raise _contradiction(f"{names[0]} must be in [0, {names[1]})")
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Shard(int(environ["RANK"]), int(environ["WORLD_SIZE"]))
    return None


def _contradiction(what: str) -> RuntimeError:
    names = [name for pair in RANKS for name in pair]
    shown = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "none of them"
    return RuntimeError(
        f"The ranks contradict each other: {what}. The launcher's variables are: {shown}. Start all processes with one "
        "launcher, and unset variables that an earlier one left."
    )


def deals_samplers(trainer: Any) -> bool:
    """Whether a user's sampler is dealt to the ranks: Lightning's `use_distributed_sampler`."""
    connector = getattr(trainer, "_accelerator_connector", None)
    return bool(getattr(connector, "use_distributed_sampler", True))


def overfits(trainer: Any) -> bool:
    """Whether the trainer wants the same few batches again and again: Lightning's `overfit_batches`."""
    return bool(getattr(trainer, "overfit_batches", 0))


def batch_limit(trainer: Any, stage: str) -> int | None:
    """How many batches of a stage the trainer takes at most, where it was told a number: `limit_train_batches` and so on."""
    limit = getattr(trainer, f"limit_{stage}_batches", None)
    return limit if isinstance(limit, int) and not isinstance(limit, bool) else None


def local_world_size(trainer: Any) -> int:
    """How many ranks share this host's cores."""
    if trainer is not None:
        return max(1, int(trainer.num_devices))
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def limit_torch_threads(number: int) -> None:
    """Lets torch use so many threads for what the calling thread computes; other threads, also later ones, keep theirs.

    torch keeps the number for its thread and, for threads still to come, the one that was set last.
    """
    everywhere = torch.get_num_threads()
    torch.set_num_threads(number)
    thread = threading.Thread(target=torch.set_num_threads, args=(everywhere,))
    thread.start()
    thread.join()


def default_num_workers(trainer: Any, *, gpu: bool, decoding: bool = False) -> int:
    """Processes that fetch, when no number is given.

    Three quarters of this rank's cores, from 1 to 12, where a GPU decodes (docs/benchmarks.md); half, from 2 to 8, where DALI
    needs the others itself; one a core, up to 8, where the processes do the `decoding`. Never more than cores.
    """
    mine = cores() // local_world_size(trainer)
    if decoding:
        return max(1, min(8, mine))
    return max(1, min(12, mine * 3 // 4) if gpu else min(8, mine, max(2, mine // 2)))


def default_num_threads(trainer: Any) -> int:
    """DALI's CPU threads when none are given: a quarter of this rank's cores, from 2 to 8."""
    return max(2, min(8, cores() // local_world_size(trainer) // 4))


def default_decoding(trainer: Any) -> tuple[int, int]:
    """(processes that fetch, DALI's CPU threads) where the threads decode and the processes only read files, as for audio.

    Three eighths of this rank's cores, from 1 to 8, and three quarters, from 2 to 24: readers wait half of the time
    (docs/benchmarks.md).
    """
    mine = cores() // local_world_size(trainer)
    return max(1, min(8, mine * 3 // 8)), max(2, min(24, mine * 3 // 4))


def default_prefetch() -> int:
    """Finished batches that wait when no number is given: one for the model, one being made; more only takes memory."""
    return 2


def default_hw_decoder_load() -> float:
    """The hardware decoder's share of JPEGs when none is given: all of them (docs/benchmarks.md).

    The engines are not asked for: without any, or on the CPU, DALI decodes as if it were 0.
    """
    return 1.0


def global_seed() -> int:
    """The seed of `lightning.seed_everything`, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def device_index(device: Any, trainer: Any) -> int | None:
    """The CUDA device of this rank; None for the CPU. Makes no CUDA context.

    Args:
        device: ``"auto"`` (the trainer's, else the current CUDA device if there is one), ``"cpu"``, ``"cuda"``,
            ``"cuda:1"``, an int or a `torch.device`.
        trainer: The Lightning trainer, if attached.
    """
    if device == "auto":
        if trainer is not None:
            root = trainer.strategy.root_device
            return (root.index or 0) if root.type == "cuda" else None
        return _current_device() if torch.cuda.is_available() else None
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise ValueError(
            f"device is {device!r}: DALI runs on CUDA devices and on the CPU; allowed: 'auto', 'cpu', 'cuda:N'."
        )
    if not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch sees no CUDA device here; pass device='cpu' or 'auto'.")
    return _current_device() if wanted.index is None else wanted.index


def _current_device() -> int:
    """The device that was made current, else torchrun's local rank: asking CUDA first would start it on device 0."""
    if torch.cuda.is_initialized():
        return torch.cuda.current_device()
    return int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
