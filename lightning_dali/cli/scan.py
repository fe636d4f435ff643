"""`lightning-dali scan` and `index`: every sample, or video, is looked at before training. Runs in the rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_dali.cli.parallel import over_indices
from lightning_dali.failures import BadSample
from lightning_dali.fetch import Fetcher
from lightning_dali.loader import Loader
from lightning_dali.media import IndexCache, MediaError
from lightning_dali.sampling import BatchTask
from lightning_dali.streams import is_stream
from lightning_dali.structure import map_leaves
from lightning_dali.workers import WorkerError

__all__ = ["VIDEO_SUFFIXES", "Scan", "find_videos", "index_videos", "num_samples", "scan"]

CHUNK = 64
"""Samples a task."""
VIDEO_SUFFIXES = frozenset(
    [
        ".mp4",
        ".m4v",
        ".mov",
        ".mkv",
        ".webm",
        ".avi",
        ".ts",
        ".mts",
        ".m2ts",
        ".mpg",
        ".mpeg",
        ".flv",
        ".wmv",
        ".3gp",
        ".ogv",
    ]
)
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Scan:
    """What was found."""

    name: str
    total: int
    decoded: bool
    """Whether every file was decoded, not only its header and end looked at."""
    bad: tuple[BadSample, ...]
    materialised: dict[str, int]
    """What needed pixels or samples in the worker, and in how many tasks of 64 samples it did."""
    seconds: float

    def report(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "bad": [asdict(one) for one in self.bad]}


@dataclass
class _Scanner:
    """Makes the answers of one worker; a value, sent to it."""

    fetcher: Fetcher
    decode: bool

    @property
    def dataset(self) -> Any:
        """For `torch.utils.data.get_worker_info`."""
        return self.fetcher.dataset

    def __call__(self, task: BatchTask) -> tuple[list[BadSample], set[str]]:
        bad: list[BadSample] = []
        notes: set[str] = set()
        for index in task.indices:
            try:
                sample = self.fetcher._checked(task, index, {})
                map_leaves(lambda leaf: self._look(leaf, notes), sample)
            except Exception as error:
                bad.append(self.fetcher._bad(task, index, error))
        return bad, notes

    def _look(self, leaf: Any, notes: set[str]) -> Any:
        modality = self.fetcher.modality
        if modality.is_proxy(leaf):
            notes.update(modality.notes(leaf))
            if self.decode:
                self._settle(leaf)
        return leaf

    def _settle(self, proxy: Any) -> None:
        try:
            self.fetcher.modality.settle(proxy)
        except Exception as error:
            raise MediaError(str(error), self.fetcher.modality.path(proxy)) from error


def num_samples(loader: Loader) -> int:
    """How many samples there are to look at.

    Raises:
        ValueError: The dataset is iterated.
    """
    if is_stream(loader.dataset):
        raise ValueError(
            f"the {loader.name} dataset is a stream ({type(loader.dataset).__name__}): scan asks for samples by their index. Train "
            "with on_bad_sample='replace' and bad_samples_file=..., which lists what was met, or scan the files."
        )
    return int(loader.plan.num_samples or 0)


def scan(loader: Loader, *, num_workers: int, decode: bool = False, on_progress: Progress = lambda done: None) -> Scan:
    """Fetches every sample of a loader's dataset, on stand-ins: headers and the ends of files are looked at.

    Args:
        loader: It is not iterated.
        num_workers: Processes; at least one.
        decode: Whether to decode everything: slower by far, and finds damage in the middle of files.
        on_progress: Called with the number of samples done.
    """
    start, total = time.perf_counter(), num_samples(loader)
    scanner = _Scanner(replace(loader.fetcher, on_bad_sample="replace", restore_rng=False), decode)
    bad: list[BadSample] = []
    counts: dict[str, int] = {}
    for indices, value in over_indices(scanner, total, num_workers=num_workers, chunk=CHUNK, context=loader.context):
        if isinstance(value, WorkerError):
            reason = f"it ends the process that fetches it: {value}"
            bad.append(BadSample(dataset_index=indices.start, path=None, rank=0, epoch=0, reason=reason))
        else:
            bad += value[0]
            for note in value[1]:
                counts[note] = counts.get(note, 0) + 1
        on_progress(indices.stop)
    return Scan(loader.name, total, decode, tuple(bad), counts, time.perf_counter() - start)


# -- videos ----------------------------------------------------------------------------------------------------------


def find_videos(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Files as they are given, folders with all videos below them, in order of name.

    Raises:
        FileNotFoundError: A path does not exist.
    """
    found: list[Path] = []
    for one in map(Path, paths):
        if one.is_dir():
            found += sorted(file for file in one.rglob("*") if file.suffix.lower() in VIDEO_SUFFIXES)
        elif one.exists():
            found.append(one)
        else:
            raise FileNotFoundError(f"{one}: no such file or folder.")
    return found


@dataclass
class _Indexer:
    files: Sequence[Path]
    cache: IndexCache

    dataset: Any = None

    def __call__(self, task: BatchTask) -> list[BadSample]:
        bad = []
        for number in task.indices:
            try:
                self.cache.get(self.files[number])
            except Exception as error:
                path = os.fspath(self.files[number])
                bad.append(BadSample(dataset_index=number, path=path, rank=0, epoch=0, reason=str(error)))
        return bad


def index_videos(
    files: Sequence[Path],
    *,
    cache: IndexCache,
    num_workers: int,
    on_progress: Progress = lambda done: None,
) -> Scan:
    """Puts the index of every video into the cache, so that training demuxes none.

    Args:
        files: Which.
        cache: Where to; what it has already is not made again.
        num_workers: Processes.
        on_progress: Called with the number of files done.
    """
    start = time.perf_counter()
    bad: list[BadSample] = []
    for indices, value in over_indices(_Indexer(files, cache), len(files), num_workers=num_workers, chunk=4):
        if isinstance(value, WorkerError):
            path = os.fspath(files[indices.start])
            bad.append(BadSample(dataset_index=indices.start, path=path, rank=0, epoch=0, reason=str(value)))
        else:
            bad += value
        on_progress(indices.stop)
    return Scan("videos", len(files), False, tuple(bad), {}, time.perf_counter() - start)
