"""How long audio files are, from their headers, remembered on disk so that a file is looked at once and not once a run.

Runs in the rank, while batches are planned; any number of ranks may share one cache file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lightning_dali.media.audio import probe_audio
from lightning_dali.media.audio_wav import AudioError

logger = logging.getLogger(__name__)

_TABLE = "CREATE TABLE IF NOT EXISTS audio (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, rate INTEGER, seconds REAL)"
_BUSY_SECONDS = 30.0
"""How long to wait for another process to finish writing."""
_CHUNK = 500
"""Paths in one query: SQLite takes 999 variables."""
_THREADS = 8
"""Files looked at at a time: on network disks that is waiting."""


class AudioLength(NamedTuple):
    """What planning needs to know of a file."""

    sample_rate: int
    """Hz; 0 for a file that is no audio."""
    seconds: float
    """Its length; an estimate where only decoding tells."""


def default_duration_cache() -> Path:
    """Where lengths are kept unless told otherwise: in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-dali" / "audio-lengths.sqlite3"


def audio_lengths(paths: Iterable[str], *, cache: str | os.PathLike[str] | None = None) -> dict[str, AudioLength]:
    """The lengths of files. A file's is used again as long as its absolute path, size and time of change are the same.

    A cache that cannot be read or written is reported once and done without.

    Args:
        paths: Of audio files; those that are missing or no audio get length 0, for the run to report.
        cache: The cache file, made if missing; None for `default_duration_cache()`.
    """
    stats = {path: _stat(path) for path in dict.fromkeys(paths)}
    found: dict[str, AudioLength] = {}
    file = Path(cache) if cache is not None else default_duration_cache()
    with contextlib.closing(_open(file)) as database:
        found.update(_read(database, stats))
        missing = [path for path in stats if path not in found]
        with ThreadPoolExecutor(_THREADS) as threads:
            probed = dict(zip(missing, threads.map(_probe, missing), strict=True))
        _write(database, {path: (stats[path], length) for path, length in probed.items() if length.sample_rate})
    return {**found, **probed}


_Stat = tuple[str, int, int]


def _stat(path: str) -> _Stat:
    try:
        stat = os.stat(path)
    except OSError:
        return os.path.abspath(path), -1, -1
    return os.path.abspath(path), stat.st_size, stat.st_mtime_ns


def _probe(path: str) -> AudioLength:
    try:
        header = probe_audio(path)
    except (AudioError, OSError) as error:
        logger.debug("%s has no length: %s", path, error)
        return AudioLength(0, 0.0)
    return AudioLength(header.sample_rate, header.duration_seconds or 0.0)


def _open(file: Path) -> sqlite3.Connection:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(file, timeout=_BUSY_SECONDS, isolation_level=None)
        database.execute("PRAGMA synchronous = OFF")  # a crash of the machine costs the cache at worst
        database.execute(_TABLE)
    except (sqlite3.Error, OSError) as error:
        logger.warning("the cache of audio lengths %s is not used: %s", file, error)
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.execute(_TABLE)
    return database


def _read(database: sqlite3.Connection, stats: dict[str, _Stat]) -> dict[str, AudioLength]:
    known: dict[_Stat, AudioLength] = {}
    absolute = [stat[0] for stat in stats.values()]
    with contextlib.suppress(sqlite3.Error):
        for start in range(0, len(absolute), _CHUNK):
            part = absolute[start : start + _CHUNK]
            query = f"SELECT path, size, mtime_ns, rate, seconds FROM audio WHERE path IN ({','.join('?' * len(part))})"
            for path, size, mtime_ns, rate, seconds in database.execute(query, part):
                known[(path, size, mtime_ns)] = AudioLength(rate, seconds)
    return {path: known[stat] for path, stat in stats.items() if stat in known}


def _write(database: sqlite3.Connection, lengths: dict[str, tuple[_Stat, AudioLength]]) -> None:
    rows = [(*stat, *length) for stat, length in lengths.values()]
    try:
        # One transaction, the rollback journal: write-ahead logging does not work on network disks.
        database.execute("BEGIN")
        database.executemany("INSERT OR REPLACE INTO audio VALUES (?, ?, ?, ?, ?)", rows)
        database.execute("COMMIT")
    except sqlite3.Error as error:
        logger.warning("the cache of audio lengths is not written: %s", error)
