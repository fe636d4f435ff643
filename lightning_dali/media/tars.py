"""WebDataset's tars as a map-style dataset: their headers are read once, samples are read where they lie.

Runs in the rank (the index) and in the worker (the bytes). Unlike a stream of shards this is shuffled over everything,
sharded by sample, resumed anywhere, and each sample comes exactly once.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterable
from typing import Any

from lightning_dali.media.errors import MediaError

Place = tuple[int, int]
"""Offset and size of a member's bytes in its tar."""


class TarSamples:
    """`dataset[index]`: the files of one sample by ending, `{"__key__": ..., "jpg": bytes, "cls": bytes}`.

    The files of a sample stand beside each other and share their name up to the first dot, as in WebDataset.

    Args:
        tars: Local, uncompressed tar files.
        sample: Makes of that mapping what the dataset returns, such as
            ``lambda files: (files["jpg"], int(files["cls"]))``. With `ImageDataModule(train_transform=...)` bytes are an
            image.

    Raises:
        ValueError: A tar is compressed, or no tar.
    """

    def __init__(
        self, tars: Iterable[str | os.PathLike[str]], sample: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self.tars = [os.fspath(path) for path in tars]
        self.sample = sample
        self._samples: list[tuple[int, str, dict[str, Place]]] = []
        self._open: dict[int, int] = {}
        for number, path in enumerate(self.tars):
            self._read_index(number, path)

    def _read_index(self, number: int, path: str) -> None:
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    if not member.isreg():
                        continue
                    folder, name = os.path.split(member.name)
                    stem, _, ending = name.partition(".")
                    key = os.path.join(folder, stem)
                    if not self._samples or self._samples[-1][:2] != (number, key) or ending in self._samples[-1][2]:
                        self._samples.append((number, key, {}))
                    self._samples[-1][2][ending] = (member.offset_data, member.size)
        except tarfile.TarError as error:
            raise ValueError(f"{path}: {error}; expected an uncompressed tar (unpack it with gunzip first).") from error

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        number, key, places = self._samples[index]
        files: dict[str, Any] = {"__key__": key}
        for ending, (offset, size) in places.items():
            data = os.pread(self._descriptor(number), size, offset)
            if len(data) < size:
                raise MediaError(f"{len(data)} of {size} bytes of {key}.{ending}", self.tars[number])
            files[ending] = data
        return files if self.sample is None else self.sample(files)

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self.tars[number], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)
