"""Datasets that keep all pictures in a few files, and hand out arrays."""

from __future__ import annotations

import bz2
import csv
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torchvision import datasets

from lightning_dali.testing import make_photos
from tests.datasets.fakes.files import FAKES, Transform, fake, rng


def _cifar(root: Path, name: str, files: tuple[str, ...], labels: str, meta: str, key: str) -> Path:
    base = root / name
    base.mkdir(parents=True)
    for file in files:
        entry = {"data": rng.integers(0, 256, (2, 3072), dtype=np.uint8), labels: [0, 1]}
        (base / file).write_bytes(pickle.dumps(entry))
    (base / meta).write_bytes(pickle.dumps({key: ["a", "b"]}))
    return root


@fake
def CIFAR10(root: Path, transform: Transform) -> Any:
    files = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
    _cifar(root, "cifar-10-batches-py", files, "labels", "batches.meta", "label_names")
    return datasets.CIFAR10(root, train=False, transform=transform)


@fake
def CIFAR100(root: Path, transform: Transform) -> Any:
    _cifar(root, "cifar-100-python", ("train", "test"), "fine_labels", "meta", "fine_label_names")
    return datasets.CIFAR100(root, transform=transform)


def _idx(path: Path, values: np.ndarray[Any, Any], kind: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    big = values.astype(">i4" if kind == 12 else np.uint8)
    path.write_bytes(
        struct.pack(">BBBB", 0, 0, kind, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + big.tobytes()
    )


def _mnist(folder: Path, images: str, labels: str) -> None:
    _idx(folder / images, rng.integers(0, 256, (3, 28, 28)))
    _idx(folder / labels, np.array([3, 1, 2]))


def _mnist_like(name: str) -> Callable[[Path, Transform], Any]:
    def make(root: Path, transform: Transform) -> Any:
        for part in ("train", "t10k"):
            _mnist(root / name / "raw", f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        return getattr(datasets, name)(root, transform=transform)

    return make


for _name in ("MNIST", "FashionMNIST", "KMNIST"):
    FAKES[_name] = _mnist_like(_name)


@fake
def EMNIST(root: Path, transform: Transform) -> Any:
    prefix = "emnist-letters-train"
    _mnist(root / "EMNIST" / "raw", f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    return datasets.EMNIST(root, "letters", transform=transform)


@fake
def QMNIST(root: Path, transform: Transform) -> Any:
    base = root / "QMNIST" / "raw"
    _idx(base / "qmnist-train-images-idx3-ubyte", rng.integers(0, 256, (3, 28, 28)))
    _idx(base / "qmnist-train-labels-idx2-int", rng.integers(0, 9, (3, 8)), kind=12)
    return datasets.QMNIST(root, transform=transform)


@fake
def STL10(root: Path, transform: Transform) -> Any:
    base = root / "stl10_binary"
    base.mkdir(parents=True)
    for name in ("train", "test", "unlabeled"):
        (base / f"{name}_X.bin").write_bytes(rng.integers(0, 256, 2 * 3 * 96 * 96, dtype=np.uint8).tobytes())
        (base / f"{name}_y.bin").write_bytes(bytes([1, 2]))
    return datasets.STL10(root, transform=transform)


@fake
def SVHN(root: Path, transform: Transform) -> Any:
    from scipy.io import savemat

    root.mkdir(parents=True, exist_ok=True)
    savemat(
        root / "train_32x32.mat", {"X": rng.integers(0, 256, (32, 32, 3, 3), dtype=np.uint8), "y": [[1], [10], [3]]}
    )
    return datasets.SVHN(root, transform=transform)


@fake
def USPS(root: Path, transform: Transform) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{n + 1} " + " ".join(f"{k + 1}:{value:.3f}" for k, value in enumerate(rng.uniform(-1, 1, 256)))
        for n in range(2)
    ]
    with bz2.open(root / "usps.bz2", "wt") as file:
        file.write("\n".join(rows) + "\n")
    return datasets.USPS(root, transform=transform)


@fake
def SEMEION(root: Path, transform: Transform) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    rows = np.concatenate([rng.integers(0, 2, (2, 256)), np.eye(10)[:2]], axis=1)
    np.savetxt(root / "semeion.data", rows)
    return datasets.SEMEION(root, transform=transform, download=False)


@fake
def FER2013(root: Path, transform: Transform) -> Any:
    (root / "fer2013").mkdir(parents=True)
    with open(root / "fer2013" / "train.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["emotion", "pixels"])
        for n in range(2):
            rows.writerow([n, " ".join(map(str, rng.integers(0, 256, 48 * 48)))])
    return datasets.FER2013(root, transform=transform)


@fake
def PCAM(root: Path, transform: Transform) -> Any:
    import h5py

    (root / "pcam").mkdir(parents=True)
    files = datasets.PCAM._FILES["train"]
    with h5py.File(root / "pcam" / files["images"][0], "w") as file:
        file["x"] = rng.integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    with h5py.File(root / "pcam" / files["targets"][0], "w") as file:
        file["y"] = np.array([0, 1]).reshape(2, 1, 1, 1)
    return datasets.PCAM(root, transform=transform)


@fake
def LSUN(root: Path, transform: Transform) -> Any:
    import lmdb

    with lmdb.open(str(root / "bedroom_val_lmdb"), map_size=2**22) as db, db.begin(write=True) as transaction:
        for path in make_photos(root / "photos", 2, sizes=((37, 49),)):
            transaction.put(path.name.encode(), path.read_bytes())
    return datasets.LSUN(str(root), ["bedroom_val"], transform=transform)


@fake
def FakeData(root: Path, transform: Transform) -> Any:
    return datasets.FakeData(size=3, image_size=(3, 37, 49), transform=transform)
