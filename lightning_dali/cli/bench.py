"""`lightning-dali bench`: how fast the loader is, what a plain DataLoader does, and how much of the model's ideal is reached.

Runs in the rank.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_dali.cli.reference import PlainDataset, PlainStream
from lightning_dali.environment import cores
from lightning_dali.loader import Loader
from lightning_dali.streams import is_stream
from lightning_dali.structure import map_leaves
from lightning_dali.throughput import Totals, advice

__all__ = ["Bench", "Rate", "bench"]

CACHED = 4
"""Batches that the model sees again and again for its ideal speed."""


@dataclass(frozen=True)
class Rate:
    """One measurement."""

    samples_per_second: float
    batches: int
    seconds: float
    wait_share: float = 0.0
    """Of the time, how much was spent waiting for batches."""


@dataclass(frozen=True)
class Bench:
    """What was measured; None where it could not be, or was not asked for."""

    loader: Rate
    totals: Totals
    """Of the loader alone."""
    plain: Rate | None
    cached: Rate | None
    """The model on batches that are there already: the ideal."""
    live: Rate | None
    """The model on the loader's batches."""
    notes: tuple[str, ...]
    advice: str

    @property
    def of_ideal(self) -> float | None:
        """Share of the ideal that is reached."""
        if self.cached is None or self.live is None:
            return None
        return self.live.samples_per_second / self.cached.samples_per_second


def bench(
    loader: Loader,
    *,
    model: Any = None,
    seconds: float = 10.0,
    plain: bool = True,
    on_phase: Callable[[str], None] = lambda name: None,
) -> Bench:
    """Measures, each for `seconds` after a warm-up.

    Args:
        loader: Of training, as it is set.
        model: A `LightningModule`, or any module with `training_step(batch, batch_idx)`; None: the loader alone.
        seconds: Of each measurement; the warm-up is a third of it, two batches at least.
        plain: Whether to measure `torch.utils.data.DataLoader` on the same dataset with as many workers.
        on_phase: Called with the name of what is measured next.
    """
    device = loader.server.device.torch_device
    notes: list[str] = []
    on_phase("the loader alone")
    before = loader.totals.copy()
    alone = _rate(_cycle(loader), lambda batch: None, seconds, device, count=lambda: loader.totals.samples)
    totals = loader.totals.since(before)
    other = None
    if plain:
        on_phase("torch's DataLoader")
        try:
            other = _plain(loader, seconds, device)
        except Exception as error:
            notes.append(f"torch's DataLoader could not run this dataset: {type(error).__name__}: {error}")
    cached = live = None
    if model is not None:
        step = _Step(model, device)
        on_phase("the model on cached batches")
        batches = [batch for batch, _ in zip(_cycle(loader), range(CACHED), strict=False)]
        sizes = itertools.cycle([loader.batch_size])
        cached = _rate(itertools.cycle(batches), step, seconds, device, sizes=sizes)
        on_phase("the model on live batches")
        before = loader.totals.copy()
        live = _rate(_cycle(loader), step, seconds, device, count=lambda: loader.totals.samples)
        totals_live = loader.totals.since(before)
    judged, share = (totals, None) if live is None else (totals_live, live.wait_share)
    words = advice(
        judged, wait_share=share, num_workers=loader.num_workers, cores=cores(), on_gpu=device.type == "cuda"
    )
    return Bench(alone, totals, other, cached, live, tuple(notes), words)


def _cycle(loader: Any) -> Iterator[Any]:
    """Batches without end, pass after pass."""
    while True:
        one = iter(loader)
        empty = True
        try:
            for batch in one:
                empty = False
                yield batch
        finally:
            if hasattr(one, "close"):
                one.close()
        if empty:
            raise ValueError("the loader gives no batch: the dataset is smaller than a batch and drop_last is True.")


def _rate(
    batches: Generator[Any, None, None] | Iterator[Any],
    step: Callable[[Any], Any],
    seconds: float,
    device: torch.device,
    *,
    count: Callable[[], int] | None = None,
    sizes: Iterator[int] | None = None,
) -> Rate:
    """Runs for about `seconds`. Samples are counted by `count()`, or are those of `sizes`."""
    with contextlib.closing(batches) if isinstance(batches, Generator) else contextlib.nullcontext():
        end = time.perf_counter() + seconds / 3
        for number, batch in enumerate(batches):
            step(batch)
            if number >= 1 and time.perf_counter() > end:
                break
        _wait_for(device)
        done, samples, waited = 0, 0, 0.0
        first = count() if count else 0
        start = asked = time.perf_counter()
        for batch in batches:
            now = time.perf_counter()
            waited += now - asked
            step(batch)
            done += 1
            samples += next(sizes) if sizes else 0
            asked = time.perf_counter()
            if asked - start > seconds:
                break
        _wait_for(device)
        took = time.perf_counter() - start
        samples = count() - first if count else samples
    return Rate(samples / took, done, took, min(1.0, waited / took))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _plain(loader: Loader, seconds: float, device: torch.device) -> Rate:
    fetcher = loader.fetcher
    stream = is_stream(fetcher.dataset)
    dataset: Any = (PlainStream if stream else PlainDataset)(fetcher.dataset, fetcher.transform)
    seen = 0

    def to_device(batch: Any) -> None:
        nonlocal seen
        seen += loader.batch_size
        map_leaves(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own advice on the number of workers: the same number is the point
        # What samples of different sizes need: a list, which costs less than stacking, so it does not flatter us.
        collate = fetcher.collate_fn or (None if _stacks(dataset) else list)
        other: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=loader.batch_size,
            shuffle=not stream,
            drop_last=True,
            num_workers=loader.num_workers,
            persistent_workers=loader.num_workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=collate,
        )
        return _rate(_cycle(other), to_device, seconds, device, count=lambda: seen)


def _stacks(dataset: Any) -> bool:
    first = (
        itertools.islice(iter(dataset), 2) if is_stream(dataset) else (dataset[0], dataset[min(1, len(dataset) - 1)])
    )
    try:
        torch.utils.data.default_collate(list(first))
    except (RuntimeError, TypeError):
        return False
    return True


class _Step:
    """A training step without a trainer."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.optimizer = _optimizer(model)
        self.number = 0

    def __call__(self, batch: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # self.log() without a trainer
            output = self.model.training_step(batch, self.number)
        self.number += 1
        loss = output["loss"] if isinstance(output, dict) else output
        if self.optimizer is not None and isinstance(loss, torch.Tensor) and loss.requires_grad:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def _optimizer(model: Any) -> torch.optim.Optimizer | None:
    """The model's own, where it can be had without a trainer; else SGD, which costs about as much."""
    try:
        given = model.configure_optimizers()
    except Exception:
        given = None
    for one in given if isinstance(given, (list, tuple)) else [given]:
        one = one.get("optimizer") if isinstance(one, dict) else one
        if isinstance(one, list):
            one = one[0]
        if isinstance(one, torch.optim.Optimizer):
            return one
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=0.0) if parameters else None
