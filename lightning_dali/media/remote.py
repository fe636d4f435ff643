"""Whole files from any URL that fsspec knows, through a local folder of bounded size.

Runs in the worker. `RemoteReader` is a value: a dataset holds one and calls it; the bytes then go where a local file's
would (`proxy(images=reader(url))`, `PIL.Image.open(io.BytesIO(reader(url)))`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dali.media.errors import MediaError

logger = logging.getLogger(__name__)

LOCAL_PROTOCOLS = frozenset({"file", "local", "memory"})
"""What is not worth a copy."""
CHECKS = 64
"""The cache is measured each time this fraction of its size has been written, since measuring reads the whole folder."""
KEPT = 0.9
"""The share of its size that a full cache is cut down to."""


@dataclass
class RemoteReader:
    """`reader(url)`: the file's bytes.

    Args:
        cache: A local folder for what came over a network; workers and ranks of a host may share it. None: no cache.
        max_bytes: What the folder may hold, exceeded by a 64th of it for each worker at most; the files that were not
            read for longest go first.
        options: What fsspec's filesystem takes, such as ``{"anon": True}`` for public S3 buckets.

    Raises:
        MediaError: The file cannot be read; an ordinary bad sample, named by its URL.
    """

    cache: str | os.PathLike[str] | None = None
    max_bytes: int = 10 * 2**30
    options: Mapping[str, Any] = field(default_factory=dict)
    _unmeasured: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_bytes < 1:
            raise ValueError(f"max_bytes is {self.max_bytes}: allowed are 1 or more; pass cache=None for no cache.")

    def __call__(self, url: str | os.PathLike[str]) -> bytes:
        url = os.fspath(url)
        protocol = url.partition("://")[0] if "://" in url else "file"
        if self.cache is None or protocol in LOCAL_PROTOCOLS:
            return self._fetch(url)
        file = Path(self.cache) / hashlib.sha256(url.encode()).hexdigest()
        with contextlib.suppress(OSError):
            data = file.read_bytes()
            os.utime(file)  # when it was last read
            return data
        data = self._fetch(url)
        self._keep(file, data)
        return data

    def _fetch(self, url: str) -> bytes:
        import fsspec

        try:
            with fsspec.open(url, "rb", **self.options) as stream:
                data: bytes = stream.read()
        except Exception as error:  # every filesystem has its own
            raise MediaError(f"{type(error).__name__}: {error}", url) from error
        return data

    def _keep(self, file: Path, data: bytes) -> None:
        """Writes a file whole or not at all: another worker may read it at any moment."""
        if len(data) > self.max_bytes:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".")
        try:
            with open(descriptor, "wb") as stream:
                stream.write(data)
            os.replace(name, file)
        except OSError as error:  # a full disk is no reason to stop: the bytes are here
            with contextlib.suppress(OSError):
                os.unlink(name)
            logger.warning("cannot cache in %s: %s", file.parent, error)
            return
        self._unmeasured += len(data)
        if self._unmeasured * CHECKS >= self.max_bytes:
            self._unmeasured = 0
            self._shrink(file.parent)

    def _shrink(self, folder: Path) -> None:
        found = []
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # another worker was faster
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        if total <= self.max_bytes:
            return
        for _, size, path in sorted(found):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= KEPT * self.max_bytes:
                return
