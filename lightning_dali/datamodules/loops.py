"""What Lightning's loops need to be told by a loader that can begin inside an epoch.

Runs in the rank. Uses attributes of Lightning's loops that have no public form; they are the same in 2.5 and 2.6.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

from lightning_dali.loader import Loader
from lightning_dali.sampling import StreamPlan

logger = logging.getLogger(__name__)


def align_progress(trainer: Any, loader: Loader) -> None:
    """Makes a resumed epoch's two counts agree: the loader's, of what it delivered, and Lightning's, of what it trained on.

    - A checkpoint that a signal's handler writes in the middle of a step has a batch that was delivered and not trained
      on. It comes again.
    - Lightning remembers how many *steps* of the epoch are done, and ends it after `len(loader)`. With another world size
      or batch size a step is another share of the epoch: 4 of 8 steps on two ranks are 8 of 16 on one.
    """
    at, plan = loader.at, loader.plan
    if at.begun or at.saved is None:
        return
    saved, at.saved = at.saved, None
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    if isinstance(plan, StreamPlan):  # counts batches too; without a length Lightning takes one ahead
        if progress.processed < at.start:
            at.start, at.ended = progress.processed, False
        return
    if saved.done == progress.processed + 1:
        at.start = saved.before
    before, now = (saved.world_size, saved.batch_size), (plan.shard.world_size, plan.batch_size)
    if before == now:
        return
    done = plan.done(at.start)
    logger.info(
        "resumed in epoch %d after %d %s: saved with (world_size, batch_size) = %s, now %s; %d of %d step(s) count as done.",
        *(at.epoch, at.start, plan.position_unit, before, now, done, len(plan)),
    )
    difference = done - progress.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(progress, name, getattr(progress, name) + difference)


def restart_evaluation(trainer: Any) -> None:
    """Lets a validation that was cut short by a checkpoint run again from its beginning.

    Lightning 2.6 would count its batches as done, and then end the new validation, which does begin at the beginning,
    that many batches early. What had been accumulated is not in the checkpoint, so all of it has to run.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop.restarted_mid_evaluation:
        loop.batch_progress.reset_on_run()


class SeenIndices(_IndexBatchSamplerWrapper):
    """Tells Lightning's prediction writers which dataset indices the current batch has."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def seen_batch_indices(self) -> Any:
        """Answers `[batch_idx]` for the batch delivered last: Lightning asks right after each."""
        return _LastIndices(self._loader)

    @seen_batch_indices.setter
    def seen_batch_indices(self, value: Any) -> None: ...


class _LastIndices:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getitem__(self, batch_idx: int) -> list[int]:
        return list(self._loader.at.indices)
