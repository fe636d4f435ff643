"""`RemoteReader`: the bytes of a URL, a bounded cache, and errors that are bad samples."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_dali.media import MediaError, RemoteReader

opened: list[str] = []


class Far(MemoryFileSystem):
    """A filesystem that counts as remote, kept in memory."""

    protocol = ("far",)
    store: dict[str, Any] = {}  # noqa: RUF012  (fsspec's own way)
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("far://", "memory://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            opened.append(path)
        return super()._open(path, mode, **kwargs)


@pytest.fixture(autouse=True)
def far() -> Iterator[None]:
    fsspec.register_implementation("far", Far, clobber=True)
    Far.store.clear()
    opened.clear()
    yield
    Far.store.clear()


def put(n: int, size: int = 100) -> list[str]:
    filesystem = fsspec.filesystem("far")
    for i in range(n):
        filesystem.pipe(f"/bucket/{i}", bytes([i]) * size)
    return [f"far://bucket/{i}" for i in range(n)]


def test_local_urls_and_paths_are_read_where_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a b"
    file.write_bytes(b"content")
    fsspec.filesystem("memory").pipe("/x", b"memory")
    reader = RemoteReader(tmp_path / "cache")
    assert reader(file) == reader(str(file)) == reader(f"file://{file}") == b"content"
    assert reader("memory://x") == b"memory"
    assert not (tmp_path / "cache").exists()


def test_a_second_reading_comes_from_the_cache_of_any_reader(tmp_path: Path) -> None:
    (url,) = put(1)
    reader = RemoteReader(tmp_path)
    assert reader(url) == reader(url) == pickle.loads(pickle.dumps(reader))(url) == bytes(100)
    assert len(opened) == 1
    assert RemoteReader()(url) == bytes(100) and len(opened) == 2


def test_the_cache_is_bounded_and_forgets_what_was_not_read_for_longest(tmp_path: Path) -> None:
    urls = put(20)
    reader = RemoteReader(tmp_path, max_bytes=1000)
    for age, url in enumerate(urls[:10]):
        reader(url)
        newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (age, age))
    reader(urls[0])  # read again: now the youngest
    opened.clear()
    for url in urls[10:12]:
        reader(url)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000
    opened.clear()
    reader(urls[0])
    assert not opened
    reader(urls[1])
    assert opened
    for url in urls:
        reader(url)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1000 * (1 + 1 / 64)


def test_a_file_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    (url,) = put(1)
    assert RemoteReader(tmp_path, max_bytes=50)(url) == bytes(100)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(MediaError, match="FileNotFoundError") as caught:
        RemoteReader()("far://bucket/none")
    assert caught.value.path == "far://bucket/none"
    with pytest.raises(MediaError, match="ValueError"):
        RemoteReader()("nowhere://x")
    with pytest.raises(ValueError, match="max_bytes is 0: allowed are 1 or more"):
        RemoteReader(max_bytes=0)
