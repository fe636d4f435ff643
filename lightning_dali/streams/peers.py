"""What ranks tell each other about their streams, through the store by which torch.distributed found itself.

Runs in the rank. Not through collectives: a rank that does not take part (it iterates alone, it failed) would leave the others
hanging. Here nothing waits, or it waits for a known time.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import torch

from lightning_dali.sampling import Shard

logger = logging.getLogger(__name__)

WAIT_SECONDS = 120.0
"""How long ranks wait for each other's lengths: datasets are made on each, which may take a while."""
CHECKS = 64
"""After so many batches a rank that has not told its first samples is not asked any more."""


_asked: Counter[str] = Counter()
_passes: Counter[str] = Counter()


def _store() -> Any:
    """The default process group's, None without one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _get_default_store  # no public way to it in torch 2.11 to 2.15

    return _get_default_store()


def gather_lengths(name: str, length: int | None, shard: Shard) -> list[int | None]:
    """The length that each rank's stream has; this rank's alone where ranks cannot be asked.

    Args:
        name: The loader's.
        length: Of this rank.
        shard: The rank.

    Raises:
        RuntimeError: A rank did not say anything in time.
    """
    store = _store()
    if shard.world_size == 1 or store is None:
        return [length]
    _asked[name] += 1  # ranks set up in step
    keys = [f"lightning_dali/length/{name}/{_asked[name]}/{rank}" for rank in range(shard.world_size)]
    store.set(keys[shard.rank], json.dumps(length))
    try:
        store.wait(keys, timedelta(seconds=WAIT_SECONDS))
    except RuntimeError as error:  # torch's DistStoreError is one
        silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RuntimeError(
            f"rank {shard.rank} waited {WAIT_SECONDS:.0f} s for the length of the stream on rank(s) {silent}: every rank has to "
            "call setup() for the same stages."
        ) from error
    return [json.loads(store.get(key)) for key in keys]


class FirstSamples:
    """Compares what the streams of ranks begin with, without waiting for anybody.

    Args:
        name: The loader's.
        epoch: Of the pass.
        shard: The rank.
    """

    def __init__(self, name: str, epoch: int, shard: Shard) -> None:
        self._name, self._shard = name, shard
        _passes[name] += 1  # ranks begin passes in step; where they do not, they find nothing to compare
        self._key = f"lightning_dali/first/{name}/{_passes[name]}/{epoch}"
        self._told = False
        self._open = [rank for rank in range(shard.world_size) if rank != shard.rank]
        self._left = CHECKS

    def compare(self, firsts: dict[int, str]) -> None:
        """Tells the others what the first worker here began with, and looks at what they have told so far.

        Args:
            firsts: Fingerprints of the first samples, by worker.

        Raises:
            ValueError: Another rank has got the same.
        """
        first = firsts.get(0)
        if first is None or not self._open or self._left <= 0:
            return
        store = _store()
        self._left = 0 if store is None else self._left - 1
        twin = None if store is None else self._twin(store, first)
        if twin is not None:
            raise ValueError(
                f"{self._name}: ranks {self._shard.rank} and {twin} got the same first samples: the dataset does not shard itself "
                "over ranks, and each sample would come several times. Let its __iter__ give each rank a share "
                "(torch.distributed.get_rank(), or the variables RANK and WORLD_SIZE), or tell it (Hugging Face's "
                "split_dataset_by_node)."
            )

    def _twin(self, store: Any, first: str) -> int | None:
        try:
            if not self._told:
                store.set(f"{self._key}/{self._shard.rank}", first)
                self._told = True
            for rank in [rank for rank in self._open if store.check([f"{self._key}/{rank}"])]:
                self._open.remove(rank)
                if store.get(f"{self._key}/{rank}").decode() == first:
                    return rank
        except RuntimeError as error:  # the store's process has ended: that a run ends is no reason to fail
            logger.debug("ranks were not compared: %s", error)
            self._left = 0
        return None
