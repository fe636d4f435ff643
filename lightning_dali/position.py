"""Where a loader stands in its epochs, in numbers that mean the same on any number of ranks. Runs in the rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_dali.sampling import BatchPlan

__all__ = ["Position", "load_position", "save_position"]


@dataclass(frozen=True)
class Saved:
    """What a loaded position knows of the run it is from."""

    world_size: int
    """Its number of ranks."""
    batch_size: int
    """Its samples of a rank in a step."""
    done: int
    """How many of its batches an epoch had behind it there."""
    before: int
    """Where the last of them began: a checkpoint written in the middle of a step has it to do again."""


@dataclass
class Position:
    """Of one pass, made before it begins; it outlives the pass."""

    epoch: int = 0
    """Whose order and draws."""
    start: int = 0
    """Where in the epoch the pass begins: global samples (or batches, see `BatchPlan.position_unit`) consumed before."""
    steps: int = 0
    """Batches delivered to this rank since."""
    begun: bool = False
    """Whether a pass took it."""
    indices: tuple[int, ...] = ()
    """Dataset indices of the batch delivered last."""
    saved: Saved | None = None
    """About the run that saved it; None: it was not loaded."""


def save_position(at: Position, plan: BatchPlan, *, seed: int) -> dict[str, Any]:
    """What a checkpoint keeps: plain numbers and words, the same on every rank."""
    samples = plan.position(at.steps, start=at.start)
    return {
        "epoch": at.epoch,
        "samples": samples,
        "before": plan.position(max(0, at.steps - 1), start=at.start),
        "done": len(plan) - plan.num_steps(start=samples),
        "finished": plan.num_steps(start=samples) == 0,
        "world_size": plan.shard.world_size,
        "batch_size": plan.batch_size,
        **_identity(plan, seed),
    }


def load_position(state: dict[str, Any], plan: BatchPlan, *, seed: int, name: str) -> Position:
    """The position that `state` describes, in this run's plan.

    Args:
        state: From `save_position`.
        plan: Of this run; its ranks, batch size and workers may differ from those of the saved one.
        seed: Of this run.
        name: The loader's, for messages.

    Raises:
        ValueError: The state was taken inside an epoch whose order this plan does not have.
    """
    epoch, start = int(state["epoch"]), int(state["samples"])
    now = _identity(plan, seed)
    if start == 0:
        return Position(epoch)
    if state.get("finished") and any(state.get(key, value) != value for key, value in now.items()):
        return Position(epoch + 1)  # between epochs everything may change
    _check(state, now, name)
    done = len(plan) - plan.num_steps(start=start)
    return Position(
        epoch,
        start,
        saved=Saved(
            world_size=int(state.get("world_size", plan.shard.world_size)),
            batch_size=int(state.get("batch_size", plan.batch_size)),
            done=int(state.get("done", done)),
            before=int(state.get("before", start)),
        ),
    )


def _identity(plan: BatchPlan, seed: int) -> dict[str, Any]:
    """What must be the same for a position inside an epoch to mean the same samples."""
    return {
        "num_samples": plan.num_samples,
        "epoch_size": plan.epoch_size,
        "seed": seed,
        "order": plan.order,
        "unit": plan.position_unit,
    }


_ADVICE = {
    "num_samples": "a dataset of {old} samples, this one has {new}. Resume with the same dataset",
    "epoch_size": "epochs of {old} {unit}, these have {new}. Resume with the same sampler",
    "seed": "an order of seed {old}, this run has seed {new}. Pass seed={old} to the datamodule",
    "order": "the order of {old}, this is that of {new}. Resume with the same sampler and shuffle",
    "unit": "{old}, this loader counts {unit}. Resume with the same kind of sampler",
}


def _check(state: dict[str, Any], now: dict[str, Any], name: str) -> None:
    for key, advice in _ADVICE.items():
        old = state.get(key, now[key])
        if old != now[key]:
            words = advice.format(old=old, new=now[key], unit=now["unit"])
            raise ValueError(
                f"the checkpoint's {name} position (epoch {state['epoch']}, {state['samples']} consumed) counts in {words}, "
                "or from a checkpoint of an epoch's end, or load only the weights."
            )
