"""Memory reports read the real counters, and growth is told once, when it is one."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dali import ImageDataModule
from lightning_dali.memory import EPOCHS, GROWTH_BYTES, Growth, measure
from lightning_dali.testing import IndexedImages, make_images

BASE = measure(rank=3, device_index=None, host_slabs=0)


def test_the_process_is_measured() -> None:
    before = measure(rank=0, device_index=None, host_slabs=0).host_resident
    ballast = np.ones(64_000_000, np.uint8)
    after = measure(rank=0, device_index=None, host_slabs=0).host_resident
    assert after - before > 0.9 * ballast.nbytes
    assert "no device memory" in str(BASE) and str(BASE).startswith("rank 3 on cpu")


def test_a_datamodule_counts_its_slabs(tmp_path: Path) -> None:
    images = IndexedImages(make_images(tmp_path, 8, size=96))
    dm = ImageDataModule(train_dataset=images, batch_size=4, num_workers=1, device="cpu")
    assert dm.memory_report().host_slabs == 0
    for _ in dm.train_dataloader():
        pass
    assert dm.memory_report().host_slabs > 0
    dm.close()
    assert dm.memory_report().host_slabs == 0


def reports(values: list[int]) -> list[list[str]]:
    growth = Growth()
    return [growth.note(replace(BASE, device_used=value, host_resident=1)) for value in values]


def test_growth_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        told = reports([n * GROWTH_BYTES for n in range(1, EPOCHS + 5)])
    assert [bool(one) for one in told] == [False] * EPOCHS + [True] + [False] * 3
    assert "device_used of rank 3 rose in each of the last 5 epochs" in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "values",
    [
        [GROWTH_BYTES] * 12,
        [n * 1000 for n in range(12)],  # too little
        [n % 4 * GROWTH_BYTES for n in range(12)],  # up and down
        [n * GROWTH_BYTES for n in range(EPOCHS)] + [(EPOCHS - 1) * GROWTH_BYTES] * 8,  # caches that fill, then stay
    ],
)
def test_no_growth_no_word(values: list[int]) -> None:
    assert not any(reports(values))
