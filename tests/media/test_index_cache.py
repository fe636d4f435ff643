"""The index cache: one file for any number of processes, never a reason to fail."""

import logging
import multiprocessing
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_dali.media import IndexCache, VideoError, VideoIndex, build_index, index_cache
from tests.media.video_files import make_video


@pytest.fixture
def video(tmp_path: Path) -> Path:
    path: Path = make_video(tmp_path / "video.mp4", num_frames=30, rate=30, gop=10)
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sources that were indexed."""
    calls: list[Any] = []

    def counted(source: Any) -> VideoIndex:
        calls.append(source)
        return build_index(source)

    monkeypatch.setattr(index_cache, "build_index", counted)
    return calls


def test_a_video_is_indexed_once(video: Path, tmp_path: Path, builds: list[Any]) -> None:
    cache = IndexCache(tmp_path / "deep" / "cache.sqlite3")
    first = cache.get(video)
    assert cache.get(video) is first and len(builds) == 1
    again = IndexCache(cache.path)
    assert again.get(str(video)) == first == build_index(video) and len(builds) == 1
    assert pickle.loads(pickle.dumps(again)).get(os.path.relpath(video)) == first and len(builds) == 1
    assert again.load(video) == first
    for used in (cache, again):
        used.close()


def test_a_changed_file_is_indexed_again(video: Path, tmp_path: Path, builds: list[Any]) -> None:
    cache = IndexCache(tmp_path / "cache.sqlite3")
    assert cache.get(video).num_frames == 30
    make_video(video, num_frames=20, rate=30, gop=10)
    assert cache.load(video) is None
    assert cache.get(video).num_frames == 20 and len(builds) == 2
    os.utime(video, ns=(0, 0))
    assert cache.get(video).num_frames == 20 and len(builds) == 3
    cache.close()


def test_bytes_and_failures_are_not_kept(video: Path, tmp_path: Path, builds: list[Any]) -> None:
    cache = IndexCache(tmp_path / "cache.sqlite3")
    for _ in range(2):
        assert cache.get(video.read_bytes()).num_frames == 30
    assert len(builds) == 2 and not cache.path.exists()
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no")
    for _ in range(2):
        with pytest.raises(VideoError, match="not a video"):
            cache.get(bad)
    with pytest.raises(FileNotFoundError):
        cache.get(tmp_path / "missing.mp4")
    cache.close()


def test_memory_is_bounded(video: Path, tmp_path: Path, builds: list[Any]) -> None:
    paths = [Path(shutil.copy(video, tmp_path / f"{k}.mp4")) for k in range(5)]
    one = build_index(video).nbytes
    cache = IndexCache(tmp_path / "cache.sqlite3", memory_bytes=3 * one)
    for path in [*paths, *paths]:
        cache.get(path)
    assert len(cache._memory) == 3 and cache._used_bytes == 3 * one and len(builds) == 5
    assert IndexCache(cache.path, memory_bytes=0).get(paths[0]).num_frames == 30
    cache.close()


@pytest.mark.parametrize("trouble", ["not a database", "a folder", "no folder possible"])
def test_a_broken_cache_is_reported_once_and_done_without(
    trouble: str, video: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache.sqlite3"
    if trouble == "not a database":
        path.write_bytes(b"something else" * 100)
    elif trouble == "a folder":
        path.mkdir()
    else:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "cache.sqlite3"
    cache = IndexCache(path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert cache.get(video).num_frames == 30
    assert len(caplog.records) == 1 and f"video index cache {path} is not used" in caplog.text
    cache.close()


def test_entries_of_another_version_are_replaced(video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = IndexCache(tmp_path / "cache.sqlite3", memory_bytes=0)
    monkeypatch.setattr(VideoIndex, "to_bytes", lambda self: b"from the future")
    cache.get(video)
    monkeypatch.undo()
    assert cache.load(video) is None
    assert cache.get(video) == cache.load(video)
    cache.close()


def test_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert IndexCache().path == tmp_path / "lightning-dali" / "video-index.sqlite3"
    assert repr(IndexCache("/x.sqlite3")) == "IndexCache('/x.sqlite3')"


def _index_all(cache: IndexCache, paths: list[Path]) -> None:
    assert [cache.get(path).num_frames for path in paths] == [30] * len(paths)


def test_many_processes_at_once(video: Path, tmp_path: Path) -> None:
    paths = [Path(shutil.copy(video, tmp_path / f"{k}.mp4")) for k in range(12)]
    cache = IndexCache(tmp_path / "cache.sqlite3")
    cache.get(video)  # an open connection for the forked ones to leave alone
    context: Any = multiprocessing.get_context("fork")
    workers = [context.Process(target=_index_all, args=(cache, paths[k:] + paths[:k])) for k in (0, 4, 8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    fresh = IndexCache(cache.path)
    assert all(fresh.load(path) is not None for path in [video, *paths])
    for used in (cache, fresh):
        used.close()
