"""Video indexes on disk, so that a video is demuxed once and not once a run. Runs in every worker process at a time."""

import contextlib
import logging
import os
import sqlite3
import threading
from collections import OrderedDict
from pathlib import Path

from lightning_dali.media.video_index import VideoIndex
from lightning_dali.media.video_open import Source
from lightning_dali.media.video_scan import build_index

logger = logging.getLogger(__name__)

_TABLE = "CREATE TABLE IF NOT EXISTS videos (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, data BLOB)"
_BUSY_SECONDS = 30.0
"""How long to wait for another process to finish writing."""
_Key = tuple[str, int, int]


def default_cache_path() -> Path:
    """Where indexes are kept unless told otherwise: in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-dali" / "video-index.sqlite3"


class IndexCache:
    """Gives the index of a video: from memory, from one file on disk, or by building it.

    A file's index is used as long as its absolute path, size and time of change are the same. Any number of processes
    may use one cache file; a copy that is pickled or forked opens it anew. A cache that cannot be read or written (a
    read-only or full disk, a damaged file) is reported once and done without: it never fails a run.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, memory_bytes: int = 64 << 20) -> None:
        """Nothing is opened before the first `get`.

        Args:
            path: the cache file, made if missing; None for `default_cache_path()`.
            memory_bytes: the most that indexes kept in memory may take, in each process; raise it for many videos of
                hours (4 MB an hour at 30 frames a second).
        """
        self.path = Path(path) if path is not None else default_cache_path()
        self.memory_bytes = memory_bytes
        self._reset()

    def _reset(self) -> None:
        self._memory: OrderedDict[_Key, VideoIndex] = OrderedDict()
        self._used_bytes = 0
        self._database: sqlite3.Connection | None = None
        self._process = 0
        self._off = False
        self._inherited: list[sqlite3.Connection] = []
        self._lock = threading.Lock()

    def get(self, source: Source) -> VideoIndex:
        """The index of a video; bytes are indexed each time.

        Raises:
            VideoError: see `build_index`. Failures are not kept.
            OSError: the file cannot be opened.
        """
        if isinstance(source, bytes):
            return build_index(source)
        index = self.load(source)
        if index is None:
            key = self._key(source)
            index = build_index(source)
            self._store(key, index)
        return index

    def load(self, path: str | os.PathLike[str]) -> VideoIndex | None:
        """The index of a video file if it is in the cache and the file has not changed since, else None."""
        key = self._key(path)
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
            query = "SELECT data FROM videos WHERE path = ? AND size = ? AND mtime_ns = ?"
            row = self._run(query, key)
            index = None
            with contextlib.suppress(ValueError):  # written by another version of this library
                index = VideoIndex.from_bytes(row[0]) if row else None
            if index is not None:
                self._remember(key, index)
            return index

    def _store(self, key: _Key, index: VideoIndex) -> None:
        with self._lock:
            self._run("INSERT OR REPLACE INTO videos VALUES (?, ?, ?, ?)", (*key, index.to_bytes()))
            self._remember(key, index)

    @staticmethod
    def _key(path: str | os.PathLike[str]) -> _Key:
        stat = os.stat(path)
        return os.path.abspath(path), stat.st_size, stat.st_mtime_ns

    def _remember(self, key: _Key, index: VideoIndex) -> None:
        self._memory[key] = index
        self._used_bytes += index.nbytes
        while self._used_bytes > self.memory_bytes and self._memory:
            _, oldest = self._memory.popitem(last=False)
            self._used_bytes -= oldest.nbytes

    def _run(self, statement: str, values: tuple[object, ...]) -> tuple[bytes] | None:
        """The first row of a statement's result; None where there is none or the cache is out of order."""
        if self._off:
            return None
        try:
            row: tuple[bytes] | None = self._connection().execute(statement, values).fetchone()
            return row
        except (sqlite3.Error, OSError) as error:
            self._off = True
            logger.warning("video index cache %s is not used in this process: %s", self.path, error)
            return None

    def _connection(self) -> sqlite3.Connection:
        if self._database is not None and self._process != os.getpid():
            self._inherited.append(self._database)  # SQLite: a connection must not be used, or closed, across a fork
            self._database = None
        if self._database is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # One transaction a statement, the rollback journal: write-ahead logging does not work on network disks.
            database = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA synchronous = OFF")  # a crash of the machine costs the cache at worst
            database.execute(_TABLE)
            self._database, self._process = database, os.getpid()
        return self._database

    def close(self) -> None:
        """Close the cache file in this process; the next `get` opens it again."""
        with self._lock:
            if self._database is not None and self._process == os.getpid():
                self._database.close()
            self._database = None

    def __getstate__(self) -> dict[str, object]:
        """Where the file is; connections and indexes stay behind."""
        return {"path": self.path, "memory_bytes": self.memory_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Open nothing yet."""
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"IndexCache({str(self.path)!r})"
