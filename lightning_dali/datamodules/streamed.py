"""What a datamodule does about a dataset that is iterated instead of indexed. Runs in the rank."""

from __future__ import annotations

from typing import Any

from lightning_dali import environment
from lightning_dali.sampling import Shard, StreamPlan, stream_plan
from lightning_dali.streams import gather_lengths, is_stream, length_of


def size_of(dataset: Any, *, batch_size: int, num_workers: int) -> int | None:
    """How many samples a dataset has, of a stream this rank's share; None where it does not say."""
    return length_of(dataset, batch_size=batch_size, num_workers=num_workers) if is_stream(dataset) else len(dataset)


def plan_of_stream(
    dataset: Any,
    trainer: Any,
    *,
    name: str,
    batch_size: int,
    shard: Shard,
    num_workers: int,
    drop_last: bool,
    own_order: bool,
) -> StreamPlan:
    """The plan of a dataset that is iterated; ranks agree on how many batches each takes.

    Args:
        dataset: The user's.
        trainer: Whose limits count; None: there is none.
        name: The loader's: "train", "val/0".
        batch_size: Samples of a batch.
        shard: The rank.
        num_workers: Processes that iterate on this rank.
        drop_last: Whether training leaves out what does not fill a batch; evaluation never does.
        own_order: Whether a sampler is to decide on the order.

    Raises:
        ValueError: A stream cannot be sampled; or see `stream_plan`.
    """
    stage = name.split("/")[0]
    train = stage == "train"
    if train and own_order:
        raise ValueError(
            f"{name}_dataset is a stream ({type(dataset).__name__}), which has its own order, so there can be no sampler or "
            "batch_sampler, and no sorting by length, beside it. Drop that, or pass a dataset with __getitem__ and __len__."
        )
    length = size_of(dataset, batch_size=batch_size, num_workers=num_workers)
    return stream_plan(
        gather_lengths(name, length, shard),
        name=name,
        batch_size=batch_size,
        shard=shard,
        num_workers=num_workers,
        drop_last=train and drop_last,
        limit=environment.batch_limit(trainer, stage),
        fixed_order=train and environment.overfits(trainer),
    )
