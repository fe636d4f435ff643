"""Files that are no good, and a few that only look so."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

Fault = Callable[[Path], None]


def noise(path: Path, format: str = "JPEG") -> bytes:
    """Writes noise, of which every byte counts; returns the file."""
    pixels = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format=format)
    return path.read_bytes()


def missing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    """Cannot be opened, whoever asks: root may read what nobody may."""
    path.unlink()
    path.mkdir()


def forbidden(path: Path) -> None:
    path.chmod(0)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    data = noise(path)
    path.write_bytes(data[: len(data) // 2])


def twenty_short(path: Path) -> None:
    path.write_bytes(noise(path)[:-20])


def half_png(path: Path) -> None:
    data = noise(path, "PNG")
    path.write_bytes(data[: len(data) // 2])


def page(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>404 Not Found</body></html>\n" * 40)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(path: Path) -> None:
    """A PNG of 200 bytes that announces ten gigabytes of pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(60_000))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b""))


def damaged_jpeg(path: Path) -> None:
    """Header and end are fine; the Huffman tables make no sense. Neither DALI nor PIL can decode it."""
    data = bytearray(noise(path))
    at = data.find(b"\xff\xc4")
    data[at + 5 : at + 21] = b"\xff" * 16
    path.write_bytes(data)


def damaged_png(path: Path) -> None:
    """Header and end are fine; the compressed pixels are not."""
    data = bytearray(noise(path, "PNG"))
    at = data.find(b"IDAT") + 8
    data[at : at + 6] = b"\xff" * 6
    path.write_bytes(data)


def damaged_palette(path: Path) -> None:
    """The same, of a kind that PIL decodes because DALI does it differently."""
    noise(path)
    Image.open(path).quantize(16).save(path, format="PNG")
    data = bytearray(path.read_bytes())
    at = data.find(b"IDAT") + 8
    data[at : at + 6] = b"\xff" * 6
    path.write_bytes(data)


def png_named_jpg(path: Path) -> None:
    """Nothing is wrong with its content."""
    noise(path, "PNG")


def png_with_a_wrong_sum(path: Path) -> None:
    """Its checksum is wrong: DALI refuses it, PIL does not look."""
    data = bytearray(noise(path, "PNG"))
    at = data.find(b"IDAT")
    size = int.from_bytes(data[at - 4 : at], "big")
    data[at + 4 + size] ^= 0xFF
    path.write_bytes(data)


BAD: dict[Fault, str] = {
    missing: "No such file",
    folder: "Is a directory",
    empty: "empty file",
    half: "truncated JPEG",
    twenty_short: "truncated JPEG",
    half_png: "truncated PNG",
    page: "not an image: starts with b'<!DOCTYPE html>",
    bomb: "60000 x 60000 = 3,600,000,000 pixels exceed max_pixels",
    damaged_jpeg: "",
    damaged_png: "",
    damaged_palette: "broken data stream",
}
"""What is bad, and what the reason says."""
if os.geteuid() != 0:
    BAD[forbidden] = "Permission denied"
FINE: tuple[Fault, ...] = (png_named_jpg, png_with_a_wrong_sum)
"""What decodes all the same."""
