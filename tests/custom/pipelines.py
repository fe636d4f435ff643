"""Pipelines and datasets of the tests here; a module, so that workers that are not forked can import them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types

from lightning_dali.testing import make_images


@pipeline_def
def decode() -> Any:
    encoded = fn.external_source(name="images", no_copy=True)
    return fn.transpose(fn.decoders.image(encoded, device="cpu", output_type=types.RGB), perm=[2, 0, 1])


@pipeline_def
def decode_and_halve() -> Any:
    encoded = fn.external_source(name="images")
    image = fn.transpose(fn.decoders.image(encoded, device="cpu", output_type=types.RGB), perm=[2, 0, 1])
    return image, fn.cast(image / 2, dtype=types.UINT8)


@pipeline_def
def add_and_subtract() -> Any:
    a, b = fn.external_source(name="a", no_copy=True), fn.external_source(name="b", no_copy=True)
    return a + b, a - b


@pipeline_def
def noise() -> Any:
    """A number, and the same with something random added."""
    x = fn.external_source(name="x", dtype=types.FLOAT, ndim=0)
    return x + 0.5 * fn.random.uniform(range=[0, 1])


@pipeline_def
def identity() -> Any:
    return fn.external_source(name="x")


def doubled(array: Any) -> Any:
    return array * 2


@pipeline_def
def with_python() -> Any:
    """A Python function between two operators, as one would put it between two GPU operators (then with .cpu(), .gpu())."""
    image = fn.decoders.image(fn.external_source(name="images"), device="cpu", output_type=types.RGB)
    image = fn.python_function(image.cpu(), function=doubled, output_layouts="HWC")
    return fn.transpose(image, perm=[2, 0, 1])


@dataclass
class Views:
    first: Any
    second: Any


class Pair(NamedTuple):
    image: Any
    number: int


class Files(torch.utils.data.Dataset):
    """`(proxy(bytes), index)`, or what `sample(self, index)` says."""

    def __init__(self, paths: Sequence[Path], proxy: Any, sample: Callable[[Any, int], Any] | None = None) -> None:
        self.paths, self.proxy, self.sample = paths, proxy, sample

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()

    def __getitem__(self, index: int) -> Any:
        if self.sample is not None:
            return self.sample(self, index)
        return self.proxy(self.read(index)), index


def nested(files: Files, index: int) -> Any:
    """Every container; several calls; both outputs of some, one of others."""
    image, half = files.proxy(images=files.read(index))
    return {
        "pair": Pair(image, index),
        "views": Views(half, [files.proxy(files.read(index))[0], "text"]),
        "index": index,
    }


class Numbers(torch.utils.data.Dataset):
    """`proxy(make(index))` and the index."""

    def __init__(self, proxy: Any, make: Callable[[int], Any] = float, size: int = 16) -> None:
        self.proxy, self.make, self.size = proxy, make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.proxy(self.make(index)), index


def read_filepath(path: str) -> np.ndarray:
    """As in NVIDIA's example."""
    return np.frombuffer(path.encode(), dtype=np.int8)


def make_files(folder: Path, n: int = 24) -> list[Path]:
    return make_images(folder, n)
