"""Where a loader stands in its epochs, in numbers that mean the same on any number of ranks. Runs in the rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_dali.sampling import Plan, StreamPlan, Trail

__all__ = ["Position", "load_position", "save_position"]

TRAILS = 3
"""Lightning takes a batch ahead where a loader has no length, and a checkpoint may be written in the middle of a step."""


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
    """Where in the epoch the pass begins: global samples (or batches, see `Plan.position_unit`) consumed before."""
    steps: int = 0
    """Batches delivered to this rank since."""
    begun: bool = False
    """Whether a pass took it."""
    indices: tuple[int, ...] = ()
    """Dataset indices of the batch delivered last."""
    ended: bool = False
    """Whether the pass gave all that there was."""
    trails: list[tuple[int, Trail]] = field(default_factory=list)
    """Of a stream: the last positions, with what lies behind each. Several, as a trainer may be some batches behind."""
    saved: Saved | None = None
    """About the run that saved it; None: it was not loaded."""

    def note(self, position: int, trail: Any) -> None:
        """Remembers what a stream has behind it at a position."""
        if isinstance(trail, Trail):
            self.trails = [*self.trails[1 - TRAILS :], (position, trail)]

    def trail(self) -> Trail | None:
        """What a stream has behind it where the pass begins."""
        return dict(self.trails).get(self.start)


def save_position(at: Position, plan: Plan, *, seed: int) -> dict[str, Any]:
    """What a checkpoint keeps: plain numbers and words, the same on every rank."""
    samples = plan.position(at.steps, start=at.start)
    state = {
        "epoch": at.epoch,
        "samples": samples,
        "before": plan.position(max(0, at.steps - 1), start=at.start),
        "done": plan.done(samples),
        "finished": at.ended or plan.is_over(samples),
        "world_size": plan.shard.world_size,
        "batch_size": plan.batch_size,
        **_identity(plan, seed),
    }
    if at.trails:
        positions = [(position, asdict(trail)) for position, trail in at.trails]
        state["trails"] = {"rank": plan.shard.rank, "positions": positions}
    return state


def load_position(state: dict[str, Any], plan: Plan, *, seed: int, name: str) -> Position:
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
    done = plan.done(start)
    return Position(
        epoch,
        start,
        ended=bool(state.get("finished")) and isinstance(plan, StreamPlan),
        trails=_trails(state.get("trails"), plan),
        saved=Saved(
            world_size=int(state.get("world_size", plan.shard.world_size)),
            batch_size=int(state.get("batch_size", plan.batch_size)),
            done=int(state.get("done", done)),
            before=int(state.get("before", start)),
        ),
    )


def _trails(saved: dict[str, Any] | None, plan: Plan) -> list[tuple[int, Trail]]:
    """A checkpoint is written by one rank: the others have to find their way by themselves."""
    if saved is None or saved["rank"] != plan.shard.rank:
        return []
    return [(int(position), Trail(**trail)) for position, trail in saved["positions"]]


def _identity(plan: Plan, seed: int) -> dict[str, Any]:
    """What must be the same for a position inside an epoch to mean the same samples."""
    return {**plan.identity(), "seed": seed}


_ADVICE = {
    "num_samples": "a dataset of {old} samples, this one has {new}. Resume with the same dataset",
    "epoch_size": "epochs of {old} {unit}, these have {new}. Resume with the same sampler",
    "seed": "an order of seed {old}, this run has seed {new}. Pass seed={old} to the datamodule",
    "order": "the order of {old}, this is that of {new}. Resume with the same sampler and shuffle",
    "unit": "{old}, this loader counts {unit}. Resume with the same kind of dataset and sampler",
    "shares": "shares of a stream for {old}, this run has {new}. Resume with the same devices, num_workers and batch_size",
}


def _check(state: dict[str, Any], now: dict[str, Any], name: str) -> None:
    for key, advice in _ADVICE.items():
        old = state.get(key, now.get(key))
        if key in now and old != now[key]:
            words = advice.format(old=old, new=now[key], unit=now["unit"])
            raise ValueError(
                f"the checkpoint's {name} position (epoch {state['epoch']}, {state['samples']} consumed) counts in {words}, "
                "or from a checkpoint of an epoch's end, or load only the weights."
            )
