"""Every transform of `torchvision.transforms.v2` through the real engine, against torchvision itself on the same draws.

Tolerances, in 255ths on smooth pictures. Pixel operators: mean below 0.5, since a last rounding may go the other way.
Interpolating ones: mean below 1 and 99th percentile below 4, since DALI's and Pillow's filters round their weights
differently. Targets (boxes, masks, keypoints, labels) are equal: torchvision itself transforms them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from lightning_dali.testing import make_photos
from tests.graph.vocabulary import (
    ELSEWHERE,
    ENTRIES,
    SAMPLES,
    SIZES,
    Entry,
    Pictures,
    delivered,
    measure,
    shared_server,
)

pytestmark = pytest.mark.filterwarnings("ignore:The transform `ToTensor")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 6, sizes=SIZES)


@pytest.fixture(scope="module")
def lossless_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """For the GPU: its JPEG decoder alone is 0.5 to 0.7 of 255 from libjpeg (docs/decisions/0002), here are operators."""
    return make_photos(tmp_path_factory.mktemp("lossless"), 6, sizes=SIZES, format="png")


def _check(entry: Entry, paths: list[Path], device: int | None) -> None:
    measured = [found for sample in SAMPLES if (found := measure(entry.make, paths, sample, device=device)) is not None]
    assert measured, "torchvision takes none of the samples"
    for found in measured:
        assert (found.where == "worker") == entry.worker, found
        if entry.worker:
            assert entry.name.split(" ")[0] in found.notes
        if entry.random:
            continue
        assert found.mean < (1.0 if entry.interpolates else 0.5), found
        assert not entry.interpolates or found.p99 < 4.0, found


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_transform_gives_torchvisions_result(entry: Entry, paths: list[Path]) -> None:
    _check(entry, paths, None)


@pytest.fixture(scope="module", autouse=True)
def graphs() -> Iterator[None]:
    yield
    for device in (None, 0):
        shared_server(device).release()


@pytest.mark.gpu
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_transform_gives_torchvisions_result_on_the_gpu(entry: Entry, lossless_paths: list[Path]) -> None:
    _check(entry, lossless_paths, 0)


def test_no_transform_is_forgotten() -> None:
    classes = {name for name in dir(v2) if inspect.isclass(getattr(v2, name))}
    assert {entry.name.split(" ")[0] for entry in ENTRIES} | set(ELSEWHERE) == classes | {"Transform"}


def test_gaussian_noise_has_the_drawn_statistics_and_repeats(paths: list[Path]) -> None:
    sigma = 0.05
    noisy = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise(sigma=sigma, clip=False)])
    clean = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    first, again, without = (delivered(Pictures(paths, make), len(paths))[0][0] for make in (noisy, noisy, clean))
    noise = torch.cat([(a - b).flatten() for a, b in zip(first, without, strict=True)])
    assert abs(noise.mean().item()) < 4 * sigma / noise.numel() ** 0.5
    assert noise.std().item() == pytest.approx(sigma, rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], first[0][1])
