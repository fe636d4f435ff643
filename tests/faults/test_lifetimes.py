"""Passes that end in odd ways, what is said about long waits, and memory: it is bounded, kept as long as it is held, given back."""

import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dali import ImageDataModule
from lightning_dali.testing import no_leaks
from lightning_dali.workers import OUTSTANDING_PER_WORKER
from tests.faults.test_bad_samples import Quiet
from tests.pairs import all_ids, each_once, ids, images, module

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ImageDataModule]]:
    """`make(n, **options)`: a datamodule of n pictures, closed at the end."""
    made: list[ImageDataModule] = []

    def datamodule(n: int, **options: Any) -> ImageDataModule:
        made.append(module(tmp_path / str(len(made)), n, **options))
        return made[-1]

    yield datamodule
    for one in made:
        one.close()


def server_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning_dali_server"]


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_in_a_cycle_ends_when_it_is_collected(workers: int, make: Any) -> None:
    dm = make(64, num_workers=workers, persistent_workers=False)
    loader = dm.train_dataloader()
    with no_leaks(checks=("threads", "children", "memfds")):
        for _ in range(3):
            holder: dict[str, Any] = {"pass": iter(loader)}
            holder["self"] = holder
            ids(next(holder["pass"]))
            del holder
            gc.collect()
            assert not server_threads()
    each_once(all_ids(loader), 64)


def test_a_pass_can_be_collected_in_a_thread_of_another_pass(make: Any) -> None:
    """The garbage collector runs where it likes; here in the server's thread of a pass, which then ends another one."""
    dm = make(64, num_workers=1, on_bad_sample="drop", shuffle=False)
    other = make(64, num_workers=1)
    holder: dict[str, Any] = {"pass": iter(other.train_dataloader())}
    holder["self"] = holder
    next(holder["pass"])
    dm.train_dataloader().dataset.paths[9].write_bytes(b"")
    loader = dm.train_dataloader()
    collected = []

    def collect(sample: Any) -> None:
        collected.append(threading.current_thread().name)
        gc.collect()

    loader.server.on_bad = collect
    del holder
    assert len(all_ids(loader)) == 63
    assert collected == ["lightning_dali_server"]
    deadline = time.monotonic() + 5
    while server_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not server_threads()


def test_a_pass_ends_while_its_thread_waits_for_a_worker(make: Any) -> None:
    dm = make(64, num_workers=1, shuffle=False)
    loader = dm.train_dataloader()
    loader.fetcher.dataset = Slow(loader.fetcher.dataset, 8, 30.0)
    one = iter(loader)
    next(one), next(one)
    start = time.monotonic()
    one.close()
    dm.close()
    assert time.monotonic() - start < 5
    assert not server_threads()


class Slow:
    """A dataset in which one sample takes its time."""

    def __init__(self, dataset: Any, slow: int, seconds: float) -> None:
        self.dataset, self.slow, self.seconds = dataset, slow, seconds

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        if index == self.slow:
            time.sleep(self.seconds)
        return self.dataset[index]


def test_a_long_wait_says_who_waits_for_what(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    dm = make(16, num_workers=2, shuffle=False, watchdog_seconds=0.3)
    loader = dm.train_dataloader()
    loader.fetcher.dataset = Slow(loader.fetcher.dataset, 6, 2.5)
    each_once(all_ids(loader), 16)
    words = [record.getMessage() for record in caplog.records if "waiting for a batch" in record.getMessage()]
    assert len(words) == 1
    assert any(f"(pid {pid}) has dataset indices [4, 5, 6, 7" in words[0] for pid in loader.worker_pids)


# -- memory on the host ----------------------------------------------------------------------------------------------


def digest(batch: Any) -> str:
    return hashlib.sha256(b"".join(leaf.cpu().numpy().tobytes() for leaf in batch)).hexdigest()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_in_your_hands_are_not_overwritten(workers: int, device: str, make: Any) -> None:
    dm = make(128, num_workers=workers, device=device)
    one = iter(dm.train_dataloader())
    kept = [next(one) for _ in range(5)]
    before = [digest(batch) for batch in kept]
    for _ in range(20):
        ids(next(one))
    assert [digest(batch) for batch in kept] == before
    dm.release()
    assert [digest(batch) for batch in kept] == before
    dm.close()
    del one
    gc.collect()
    assert [digest(batch) for batch in kept] == before and len(set(before)) == 5


def test_shared_memory_is_bounded_however_slow_the_model_is(tmp_path: Path) -> None:
    """What is under way is counted in batches, and the same slabs serve the next epochs."""
    dataset = images(tmp_path, 256, format="jpeg", size=96)
    dm = ImageDataModule(train_dataset=dataset, batch_size=8, num_workers=2, device="cpu", prefetch=2, depth=2)
    loader = dm.train_dataloader()
    largest = max(path.stat().st_size for path in dataset.paths)
    # A task that a worker holds, a batch that came too early, those in DALI, and the one that is given back.
    batches = loader.ahead + OUTSTANDING_PER_WORKER * loader.num_workers + loader.server.device.depth + 1
    seen = []
    for _ in range(3):
        for number, _batch in enumerate(loader):
            if number % 8 == 0:
                time.sleep(0.1)  # everything that may work ahead does
            seen.append(loader.slab_bytes)
    assert 0 < max(seen) <= batches * 2 * 8 * (largest + 4096)
    assert max(seen[64:]) == max(seen[32:]), "it still grows in the third epoch"
    assert dm.memory_report().host_slabs == seen[-1]
    dm.close()
    assert dm.memory_report().host_slabs == 0


# -- what is released when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "after_pass", "after_fit"), [("never", 1, 1), ("stage", 1, 0), ("epoch", 0, 0)])
@pytest.mark.parametrize("workers", [0, 2])
def test_graphs_are_freed_when_it_was_asked_for(
    release: str, after_pass: bool, after_fit: bool, workers: int, make: Any
) -> None:
    dm = make(16, num_workers=workers, release_memory=release)
    loader = dm.train_dataloader()
    each_once(all_ids(loader), 16)
    assert loader.server.built == after_pass
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    L.Trainer(accelerator="cpu", max_epochs=2, **quiet).fit(Quiet(), dm)
    (loader,) = dm.stage_loaders("train")
    assert loader.server.built == after_fit
    each_once(all_ids(loader), 16)


@pytest.mark.parametrize("workers", [0, 2])
def test_released_in_the_middle_and_used_again(workers: int, make: Any) -> None:
    dm = make(32, num_workers=workers)
    loader = dm.train_dataloader()
    for _ in range(2):
        one = iter(loader)
        batch = next(one)
        before = digest(batch)
        dm.release()
        assert not loader.server.built and not server_threads()
        assert list(one) == []
        assert digest(batch) == before
    each_once(all_ids(loader), 32)


def test_cpu_pipelines_touch_no_cuda(make: Any) -> None:
    dm = make(8, num_workers=0)
    all_ids(dm.train_dataloader())
    dm.release()
    assert not torch.cuda.is_initialized()


def test_an_exception_in_the_report_of_a_bad_sample_ends_the_run(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("No space left on device")

    dm = make(16, num_workers=2, on_bad_sample="drop", shuffle=False)
    dm.train_dataloader().dataset.paths[5].write_bytes(b"")
    logger, handler = logging.getLogger("lightning_dali.failures"), Full()
    logger.addHandler(handler)
    try:
        with pytest.raises(OSError, match="No space left"):
            list(dm.train_dataloader())
    finally:
        logger.removeHandler(handler)
    assert not server_threads()
