"""Made-up data that is written once and found again: for configs, walkthroughs, and several ranks that ask at a time.

Runs anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dali.failures import check_choice
from lightning_dali.testing.media import make_images, make_photos, make_wavs

__all__ = ["IndexedFiles", "made_up", "make_videos"]


@dataclass
class IndexedFiles:
    """A map-style dataset of file names with a class each: `(path, i % num_classes)`."""

    paths: Sequence[str | os.PathLike[str]]
    num_classes: int = 10

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return os.fspath(self.paths[index]), index % self.num_classes


def make_videos(
    folder: str | os.PathLike[str],
    n: int,
    *,
    num_frames: int = 24,
    size: tuple[int, int] = (96, 128),
    frame_rate: int = 12,
) -> list[Path]:
    """Writes `n` H.264 videos of a bright square that wanders over a ground whose colour is the video's number.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many.
        num_frames: T of each.
        size: (H, W), even.
        frame_rate: Frames a second.

    Returns:
        The files, video 0 first.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / f"{number:05d}.mp4" for number in range(n)]
    for number, path in enumerate(paths):
        _write_video(path, number, num_frames, size, frame_rate)
    return paths


def _write_video(path: Path, number: int, num_frames: int, size: tuple[int, int], frame_rate: int) -> None:
    import av

    height, width = size
    container: Any = av.open(os.fspath(path), "w")
    with container:
        stream = container.add_stream("libx264", rate=frame_rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"g": "12", "preset": "ultrafast"}
        side = height // 4
        for frame in range(num_frames):
            pixels = np.full((height, width, 3), (40 + 16 * (number % 12), 40, 120), np.uint8)
            left = (width - side) * frame // max(1, num_frames - 1)
            pixels[side : 2 * side, left : left + side] = 230
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


_MAKERS: dict[str, Callable[..., list[Path]]] = {
    "images": make_images,
    "photos": make_photos,
    "videos": make_videos,
    "wavs": make_wavs,
}


def made_up(kind: str, n: int, *, folder: str | os.PathLike[str] | None = None, **options: Any) -> list[Path]:
    """Files of made-up data, written if they are not there yet.

    Args:
        kind: "images", "photos", "videos" or "wavs": what `make_images` and so on write.
        n: How many files.
        folder: Where they are kept; None: a folder of this user's below the one for temporary files.
        **options: Of the maker.

    Returns:
        The files, sample 0 first. Whoever comes second finds them whole: they appear at once.
    """
    check_choice("kind", kind, _MAKERS)
    base = Path(tempfile.gettempdir()) / f"lightning-dali-{os.getuid()}" if folder is None else Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    words = json.dumps(options, sort_keys=True, default=str)
    place = base / f"{kind}-{n}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
    if not place.is_dir():
        beside = Path(tempfile.mkdtemp(dir=base))
        try:
            _MAKERS[kind](beside, n, **options)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(beside, place)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return sorted(file for file in place.rglob("*") if file.is_file())
