"""The options that every datamodule has, checked at construction.

Runs in the rank.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import Any

ON_BAD_SAMPLE = ("raise", "replace", "drop")
RELEASE_MEMORY = ("never", "stage", "epoch")
RAGGED = ("error", "list")


@dataclass(frozen=True)
class Options:
    """Plain settings; see `ImageDataModule` for what they mean."""

    batch_size: int = 64
    num_workers: int | None = None
    num_threads: int | None = 4
    shuffle: bool = True
    drop_last: bool = True
    seed: int | None = None
    on_bad_sample: str = "raise"
    max_bad_samples: int | None = None
    bad_samples_file: Any = None
    release_memory: str = "stage"
    ragged: str = "error"
    with_index: bool = False
    channels_last: bool = False
    device: Any = "auto"
    prefetch: int | None = 2
    multiprocessing_context: str | None = None
    persistent_workers: bool = True
    depth: int = 2
    hw_decoder_load: float | None = 1.0
    watchdog_seconds: float = 60.0

    def __post_init__(self) -> None:
        _integer("batch_size", self.batch_size, low=1, note="it counts the samples of one rank in one step")
        _integer("num_workers", self.num_workers, low=0, none="chooses it from this rank's cores")
        _integer("num_threads", self.num_threads, low=1, none="chooses it from this rank's cores")
        _integer("seed", self.seed, low=0, none="takes seed_everything's")
        _integer("max_bad_samples", self.max_bad_samples, low=0, none="sets no limit")
        _integer("prefetch", self.prefetch, low=1, none="chooses it")
        _integer("depth", self.depth, low=1)
        for name in ("on_bad_sample", "release_memory", "ragged"):
            choice = getattr(self, name)
            object.__setattr__(self, name, _choice(name, choice, globals()[name.upper()]))
        for name in ("shuffle", "drop_last", "with_index", "channels_last", "persistent_workers"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}: allowed are True and False.")
        _file("bad_samples_file", self.bad_samples_file)
        methods = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context not in (None, *methods):
            raise ValueError(
                f"multiprocessing_context is {self.multiprocessing_context!r}: allowed are {', '.join(methods)}, or None "
                "for the platform's default."
            )
        if self.hw_decoder_load is not None and not 0.0 <= self.hw_decoder_load <= 1.0:
            raise ValueError(
                f"hw_decoder_load is {self.hw_decoder_load!r}: it is a share, from 0 to 1, or None, which chooses it."
            )


def _file(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected a path, or None for no file.")
    folder = os.path.dirname(os.path.abspath(value))
    if not os.path.isdir(folder):
        raise ValueError(
            f"{name} is {os.fspath(value)!r}: there is no folder {folder!r}. Make it, or pass another path."
        )


def _integer(name: str, value: Any, *, low: int, none: str | None = None, note: str = "") -> None:
    if value is None and none is not None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}): expected an int"
            + (f", or None, which {none}." if none else ".")
        )
    if value < low:
        raise ValueError(f"{name} is {value}: it must be {low} or more" + (f"; {note}." if note else "."))


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    text = str(getattr(value, "value", value))
    if text not in allowed:
        raise ValueError(f"{name} is {value!r}: allowed are {', '.join(map(repr, allowed))}.")
    return text
