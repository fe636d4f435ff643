"""What the made-up datasets are made of: the registry, and one function for each kind of file."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Transform = Callable[[Any], Any]
FAKES: dict[str, Callable[[Path, Transform], Any]] = {}


def fake(function: Callable[[Path, Transform], Any]) -> Callable[[Path, Transform], Any]:
    """Registers a maker under its own name."""
    FAKES[function.__name__] = function
    return function


rng = np.random.default_rng(0)
_scratch = 0


def photo(path: Path, size: tuple[int, int] = (37, 49), mode: str = "RGB") -> Path:
    """A small picture, different each time; the ending says the format. Mode "P" holds class numbers 0 to 3 and 255."""
    global _scratch
    _scratch += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "P":
        ys, xs = np.mgrid[: size[0], : size[1]]
        classes = np.where((ys + xs) % 11 == 0, 255, (ys // 9 + xs // 9) % 4).astype(np.uint8)
        image = Image.fromarray(classes).convert("P")
        image.putpalette([value for n in range(256) for value in (n, 255 - n, (7 * n) % 256)])
    else:
        coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        image = coarse.resize(size[::-1], Image.Resampling.BICUBIC).convert(mode)
    image.save(path)
    return path


def text(path: Path, content: str) -> Path:
    """A text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def floats(path: Path, *, channels: int = 1, size: tuple[int, int] = (37, 49)) -> Path:
    """A PFM file."""
    values = rng.random((*size, channels), dtype=np.float32) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    header = f"{'PF' if channels == 3 else 'Pf'}\n{size[1]} {size[0]}\n-1.0\n"
    path.write_bytes(header.encode() + values.astype("<f4").tobytes())
    return path


def flow(path: Path, size: tuple[int, int] = (37, 49)) -> Path:
    """A Middlebury .flo file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"PIEH" + struct.pack("<ii", size[1], size[0]) + rng.random((*size, 2), dtype=np.float32).tobytes()
    )
    return path


def deep(path: Path, size: tuple[int, int] = (37, 49)) -> Path:
    """A gray PNG of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(300, 60000, size).astype(np.uint16)).save(path)
    return path


def deep_colour(path: Path, size: tuple[int, int] = (37, 49)) -> Path:
    """A colour PNG of 16 bits, which PIL cannot write."""
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = rng.integers(0, 65535, (*size, 3)).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", size[1], size[0], 16, 2, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    )
    return path


def folders(root: Path, ending: str = "jpg", classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    """Two pictures in each class folder."""
    for name in classes:
        for n in range(2):
            photo(root / name / f"{n}.{ending}")
    return root
