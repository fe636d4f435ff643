"""Every image dataset of torchvision, on made-up files: what the engine delivers is what the dataset itself gives.

Images are resized, so they may differ by a rounding (mean below 1 of 255, 99th percentile below 4); everything else is equal.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torchvision import datasets
from torchvision.transforms import v2

from tests.datasets.fakes import FAKES
from tests.datasets.same import check_same

NEEDS = {"PCAM": "h5py", "LSUN": "lmdb", "CocoCaptions": "pycocotools", "CocoDetection": "pycocotools"}
OTHERS = {
    "HMDB51": "videos",
    "Kinetics": "videos",
    "UCF101": "videos",
    "MovingMNIST": "tensors of frames, which are no images to decode",
    "LSUNClass": "LSUN's part",
    "VisionDataset": "the base class",
}
"""Classes that have no line here, and why."""
IN_MEMORY = {"CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST", "STL10", "SVHN", "USPS", "SEMEION"} | {
    "FER2013", "PCAM", "FakeData", "PhotoTour"
}  # fmt: skip


@pytest.fixture(autouse=True)
def any_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up files are not the archives whose checksums torchvision knows."""
    for module in [value for value in vars(datasets).values() if inspect.ismodule(value)]:
        if hasattr(module, "check_integrity"):
            monkeypatch.setattr(
                module, "check_integrity", lambda path, md5=None: md5 is not None or Path(path).is_file()
            )


def test_no_dataset_is_forgotten() -> None:
    classes = {name for name in datasets.__all__ if inspect.isclass(getattr(datasets, name))}
    assert set(FAKES) | set(OTHERS) == classes


@pytest.mark.parametrize("name", sorted(FAKES))
def test_samples_are_the_datasets_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="pip install 'lightning-dali[datasets]'")
    monkeypatch.chdir(tmp_path)  # LSUN leaves a cache where it is
    transform = v2.Compose([v2.Resize((24, 28)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    dataset = FAKES[name](tmp_path, transform)
    # Made-up arrays are noise, where it shows that DALI repeats the image's edge and Pillow renormalises its weights.
    request = check_same(dataset, p99=20.0 if name in IN_MEMORY | {"Omniglot"} else 4.0)
    assert not [note for _, note in request.notes if "Error" in note], request.notes
    images = [lane for lane in request.lanes if lane.data]
    assert images, "no image reached the device"
    assert any(lane.data[0].ndim == (3 if name in IN_MEMORY else 1) for lane in images), "pixels or files?"
