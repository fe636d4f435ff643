"""`ThroughputMonitor` against an independent stopwatch: a slow model, a slow loader; cost, names, advice, table."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torchvision.transforms import v2

from lightning_dali import ImageDataModule, ThroughputMonitor
from lightning_dali.loader import LoaderPass
from lightning_dali.monitor import table
from lightning_dali.testing import IndexedImages, make_images
from lightning_dali.throughput import Totals, advice

NAMES = {"samples_per_second", "wait_share", "queue_depth", "fetch_ms", "pack_ms", "decode_ms", "bad_samples"}
ENDS = {"start_seconds", "device_mb", "host_mb"}


class SlowImages(IndexedImages):
    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Model(L.LightningModule):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(batch[0].float().mean((2, 3))).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stopwatch:
    """Times every `next` from outside, and the loop around them, knowing nothing of the monitor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited, self.starts, self.last = 0.0, [], 0.0
        original, watch = LoaderPass.__next__, self

        def timed(one: LoaderPass) -> Any:
            start = time.monotonic()
            batch = original(one)
            if watch.starts:
                watch.waited += time.monotonic() - start
            watch.starts.append(time.monotonic())
            return batch

        monkeypatch.setattr(LoaderPass, "__next__", timed)

    def share(self, ended: float) -> float:
        return self.waited / (ended - self.starts[0])


class Bell(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        self.rung = time.monotonic()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> SlowImages:
    return SlowImages(make_images(tmp_path_factory.mktemp("images"), 96, size=32), transform=v2.ToImage())


def fit(images: SlowImages, monitor: ThroughputMonitor | None, model: Model, **options: Any) -> L.Trainer:
    workers, val = options.pop("num_workers", 1), options.pop("val", None)
    dm = ImageDataModule(
        train_dataset=images, val_dataset=val, batch_size=4, num_workers=workers, device="cpu", prefetch=1
    )
    options = {"logger": False, "max_epochs": 1, "log_every_n_steps": 4, **options}
    callbacks = [*options.pop("callbacks", []), *([monitor] if monitor else [])]
    trainer = L.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    try:
        trainer.fit(model, dm)
    finally:
        dm.close()
    return trainer


@pytest.mark.parametrize(("model_seconds", "sample_seconds"), [(0.05, 0.0), (0.01, 0.02), (0.06, 0.02)])
def test_wait_share_agrees_with_a_stopwatch(
    images: SlowImages, monkeypatch: pytest.MonkeyPatch, model_seconds: float, sample_seconds: float
) -> None:
    monkeypatch.setattr(SlowImages, "seconds", sample_seconds)
    monitor, watch, bell = ThroughputMonitor(table=False), Stopwatch(monkeypatch), Bell()
    fit(images, monitor, Model(model_seconds), callbacks=[bell])
    measured, told = watch.share(bell.rung), monitor.summaries[0].wait_share
    assert told == pytest.approx(measured, rel=0.1, abs=0.01)
    if sample_seconds == 0:
        assert told < 0.1 and "The model is the limit" in monitor.advice
    elif model_seconds == 0.01:
        assert told > 0.6 and "worker" in monitor.advice


def test_names_values_and_validation_is_not_counted(
    images: SlowImages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = ThroughputMonitor()
    val = IndexedImages(images.paths[:16], transform=v2.ToImage())
    logger = CSVLogger(tmp_path)
    options: Any = {"val_check_interval": 8, "num_sanity_val_steps": 1}
    fit(images, monitor, Model(0.03), val=val, logger=logger, **options)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    logged = {name for name in header.split(",") if name.startswith("data/")}
    assert logged == {f"data/{name}" for name in NAMES | ENDS}
    one = monitor.summaries[0]
    assert one.samples_per_second == pytest.approx(4 / 0.03, rel=0.35)
    assert one.fetch_ms > 0 and one.decode_ms > 0 and one.bad_samples == 0 and one.host_mb > 50
    printed = capsys.readouterr().out
    assert "samples a second" in printed and "The model is the limit" in " ".join(printed.split())


def test_bad_samples_are_counted(images: SlowImages, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"")
    monitor = ThroughputMonitor(table=False)
    dm = ImageDataModule(
        train_dataset=IndexedImages([broken, *images.paths[:7]], transform=v2.ToImage()),
        batch_size=4,
        num_workers=0,
        device="cpu",
        on_bad_sample="replace",
    )
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[monitor],
    )  # fmt: skip
    trainer.fit(Model(), dm)
    assert monitor.summaries[0].bad_samples == 1
    assert "1" in [str(cell) for column in table(monitor.summaries).columns for cell in column.cells]


def test_costs_less_than_half_a_percent(images: SlowImages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time, hook by hook, against steps of 50 ms, logging as often as Lightning does by default.

    A comparison of two runs would measure noise.
    """
    spent = 0.0
    monitor = ThroughputMonitor(table=False)

    def timed(hook: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                spent += time.thread_time() - start

        return call

    for name in ("on_train_batch_start", "on_train_batch_end"):
        monkeypatch.setattr(monitor, name, timed(getattr(monitor, name)))
    steps = 96
    fit(images, monitor, Model(), log_every_n_steps=50, num_workers=0, max_epochs=4)
    assert 0 < spent < 0.005 * 0.05 * steps, f"{1e6 * spent / steps:.0f} us a step"


def test_a_loader_that_is_not_ours_is_told(images: SlowImages, caplog: pytest.LogCaptureFixture) -> None:
    monitor = ThroughputMonitor()
    loader = torch.utils.data.DataLoader([(torch.zeros(3, 2, 2), 0)] * 4, batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[monitor],
    )  # fmt: skip
    trainer.fit(Model(), loader)
    assert "saw no loader of lightning_dali" in caplog.text and monitor.advice == ""


# -- advice ----------------------------------------------------------------------------------------------------------


def totals(**seconds: float) -> Totals:
    return Totals(batches=10, samples=40, seconds={"fetch": 0.0, "pack": 0.0, "decode": 0.0, **seconds})


def said(wait_share: float, counted: Totals, num_workers: int = 2, cores: int = 16, *, on_gpu: bool = True) -> str:
    return advice(counted, wait_share=wait_share, num_workers=num_workers, cores=cores, on_gpu=on_gpu)


def test_advice_names_the_limit_and_the_setting() -> None:
    assert "The model is the limit" in said(0.01, totals(fetch=9.0))
    assert "set num_workers=8" in said(0.5, totals(fetch=1.0), num_workers=0)
    assert "raise num_workers" in said(0.5, totals(fetch=9.0, decode=1.0))
    assert "explain()" in said(0.5, totals(fetch=9.0, decode=1.0), num_workers=4, cores=4)
    assert "hw_decoder_load" in said(0.5, totals(fetch=1.0, decode=9.0))
    assert "num_threads" in said(0.5, totals(fetch=1.0, decode=9.0), on_gpu=False)
    assert "No batch came" in said(0.5, Totals())


def test_totals_subtract_and_add() -> None:
    one = Totals()
    facts: dict[str, Any] = {"samples": 4, "queued": 1, "nbytes": 10, "seconds": {"fetch": 0.5, "decode": 0.25}}
    one.add(waited_seconds=2.0, first=True, **facts)
    before = one.copy()
    one.add(waited_seconds=1.0, first=False, **facts)
    since = one.since(before)
    assert (since.batches, since.samples, since.waited_seconds, since.start_seconds, since.passes) == (1, 4, 1.0, 0, 0)
    assert (one.start_seconds, one.passes, since.per_batch("fetch")) == (2.0, 1, 0.5)
    assert (before + since) == one
