"""`ThroughputMonitor`: a Lightning callback that says how fast data comes and whether training waits for it.

Runs in the rank. It reads what the loaders count anyway (`throughput.Totals`) and starts no thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from lightning_dali.environment import cores, local_world_size
from lightning_dali.loader import Loader
from lightning_dali.throughput import STAGES, Totals, advice

__all__ = ["RankSummary", "ThroughputMonitor"]

logger = logging.getLogger(__name__)

_MB = 1e6


@dataclass(frozen=True)
class RankSummary:
    """One rank's training, over the whole fit."""

    rank: int
    samples_per_second: float
    """While batches were trained on: validation and the starts of epochs not counted."""
    wait_share: float
    """Of that time, how much the model waited for data."""
    queue_depth: float
    """Batches that were ready when one was asked for, on average."""
    start_seconds: float
    """What the first batches of all epochs were waited for: workers and graphs start there."""
    fetch_ms: float
    """Work of a worker on a batch: the dataset and its transforms."""
    pack_ms: float
    """Work of a worker on a batch: planning and packing."""
    decode_ms: float
    """Time of the server's thread for a batch: waiting for DALI, and the tail."""
    bad_samples: int
    device_mb: float
    host_mb: float


class ThroughputMonitor(L.Callback):
    """Logs throughput, waiting, queue depth, stage times, bad samples and memory, and ends a fit with a table.

    Logged every `trainer.log_every_n_steps` steps under these names, each of this rank: ``data/samples_per_second``,
    ``data/wait_share`` (0 to 1), ``data/queue_depth``, ``data/fetch_ms``, ``data/pack_ms``, ``data/decode_ms`` (a batch),
    ``data/bad_samples``; at the end of an epoch ``data/start_seconds``, ``data/device_mb``, ``data/host_mb``.

    Args:
        table: Whether rank 0 prints a table with one sentence of advice at the end of fit.
        nvtx: Whether each step is an NVTX range, for Nsight Systems; needs CUDA.

    Attributes:
        summaries: After fit, a `RankSummary` for each rank.
        advice: After fit, what limits the run and which setting to change, in one sentence.
    """

    def __init__(self, *, table: bool = True, nvtx: bool = False) -> None:
        if nvtx and not torch.cuda.is_available():
            raise ValueError("nvtx is True: NVTX ranges need CUDA, and torch sees no device here; pass nvtx=False.")
        self.table, self.nvtx = table, nvtx
        self.summaries: list[RankSummary] = []
        self.advice = ""
        self._reset()

    def _reset(self) -> None:
        self._clock = 0.0
        self._window_seconds = self._run_seconds = 0.0
        self._window = self._run = Totals()
        self._running = self._paused = False

    # -- the hooks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begins to count."""
        self._reset()
        self._run = self._window = _count(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The clock stands until the first batch is there."""
        self._running = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock at an epoch's first batch."""
        if not self._running:
            self._clock, self._running = time.perf_counter(), True
        if self.nvtx:
            torch.cuda.nvtx.range_push(f"training step {batch_idx}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops the time of a step, and logs now and then."""
        if self.nvtx:
            torch.cuda.nvtx.range_pop()
        self._tick()
        # No public form of "is this a step that the logger gets?" (Lightning 2.5, 2.6); asking is cheaper than logging.
        if trainer._logger_connector.should_update_logs:
            now = _count(trainer)
            self._log(now.since(self._window), self._window_seconds, trainer, pl_module)
            self._window, self._window_seconds = now, 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A validation inside an epoch is no part of its time."""
        self._paused, self._running = self._running, False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Goes on where validation began."""
        self._clock, self._running = time.perf_counter(), self._paused

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Memory is looked at once an epoch: asking the device for it takes longer than a step may."""
        self._running = False
        report = _memory(trainer)
        pl_module.log("data/start_seconds", _count(trainer).since(self._run).start_seconds)
        pl_module.log("data/device_mb", report["device_used"] / _MB)
        pl_module.log("data/host_mb", report["host_resident"] / _MB)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gathers the ranks' numbers; rank 0 prints them."""
        total = _count(trainer).since(self._run)
        mine = self._summary(total, trainer)
        self.summaries = _gather(mine)
        loaders = _loaders(trainer)
        if not loaders:
            logger.warning("ThroughputMonitor saw no loader of lightning_dali: there is nothing to tell.")
            return
        self.advice = advice(
            total,
            wait_share=max(summary.wait_share for summary in self.summaries),
            num_workers=loaders[0].num_workers,
            cores=max(1, cores() // local_world_size(trainer)),
            on_gpu=loaders[0].server.device.index is not None,
        )
        if self.table and trainer.is_global_zero:
            Console().print(table(self.summaries), self.advice)

    # -- numbers

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._window_seconds += now - self._clock
            self._run_seconds += now - self._clock
        self._clock = now

    def _log(self, window: Totals, seconds: float, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not window.batches:
            return
        pl_module.log("data/samples_per_second", window.samples / max(seconds, 1e-9))
        pl_module.log("data/wait_share", min(1.0, window.waited_seconds / max(seconds, 1e-9)))
        pl_module.log("data/queue_depth", window.queued / window.batches)
        for stage in STAGES:
            pl_module.log(f"data/{stage}_ms", 1000 * window.per_batch(stage))
        pl_module.log("data/bad_samples", float(_bad_samples(trainer)))

    def _summary(self, total: Totals, trainer: L.Trainer) -> RankSummary:
        seconds = max(self._run_seconds, 1e-9)
        report = _memory(trainer)
        return RankSummary(
            rank=trainer.global_rank,
            samples_per_second=total.samples / seconds if self._run_seconds else 0.0,
            wait_share=min(1.0, total.waited_seconds / seconds),
            queue_depth=total.queued / max(1, total.batches),
            start_seconds=total.start_seconds,
            fetch_ms=1000 * total.per_batch("fetch"),
            pack_ms=1000 * total.per_batch("pack"),
            decode_ms=1000 * total.per_batch("decode"),
            bad_samples=_bad_samples(trainer),
            device_mb=report["device_used"] / _MB,
            host_mb=report["host_resident"] / _MB,
        )


_ROWS = (
    ("samples a second", lambda one: f"{one.samples_per_second:,.0f}"),
    ("waits for data", lambda one: f"{100 * one.wait_share:.0f} %"),
    ("batches ready", lambda one: f"{one.queue_depth:.1f}"),
    ("starts of epochs, s", lambda one: f"{one.start_seconds:.1f}"),
    ("fetch, ms a batch", lambda one: f"{one.fetch_ms:.1f}"),
    ("pack, ms a batch", lambda one: f"{one.pack_ms:.1f}"),
    ("decode, ms a batch", lambda one: f"{one.decode_ms:.1f}"),
    ("bad samples", lambda one: str(one.bad_samples)),
    ("device memory, MB", lambda one: f"{one.device_mb:,.0f}"),
    ("host memory, MB", lambda one: f"{one.host_mb:,.0f}"),
)


def table(summaries: list[RankSummary]) -> Table:
    """The numbers, a column a rank."""
    shown = Table("data", *(f"rank {one.rank}" for one in summaries))
    for column in shown.columns[1:]:
        column.justify = "right"
    for name, show in _ROWS:
        shown.add_row(name, *map(show, summaries))
    return shown


def _loaders(trainer: L.Trainer) -> list[Loader]:
    """The training loaders that are ours, also inside a list or dict of them."""

    def find(value: Any) -> list[Loader]:
        if isinstance(value, Loader):
            return [value]
        if isinstance(value, Mapping):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            return []
        return [loader for one in value for loader in find(one)]

    return find(trainer.train_dataloader)


def _count(trainer: L.Trainer) -> Totals:
    total = Totals()
    for loader in _loaders(trainer):
        total = total + loader.totals
    return total.copy()


def _bad_samples(trainer: L.Trainer) -> int:
    return len(getattr(getattr(trainer, "datamodule", None), "bad_samples", ()))


def _memory(trainer: L.Trainer) -> dict[str, Any]:
    datamodule: Any = getattr(trainer, "datamodule", None)
    if hasattr(datamodule, "memory_report"):
        return asdict(datamodule.memory_report())
    return {"device_used": 0, "host_resident": 0}


def _gather(mine: RankSummary) -> list[RankSummary]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [mine]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found
