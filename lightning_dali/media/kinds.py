"""Which kind of media bytes are, by how they begin. Runs in the worker."""

from __future__ import annotations

from collections.abc import Collection

KINDS = ("video", "image", "audio")
"""In the order in which a file that may be several is taken for one of them."""
_IMAGE, _AUDIO, _VIDEO = ("image",), ("audio",), ("video",)
_SIGNS: tuple[tuple[int, tuple[bytes, ...], tuple[str, ...]], ...] = (
    (0, (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"II*\0", b"MM\0*", b"8BPS", b"\xff\x4f\xff\x51"), _IMAGE),
    (0, (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"\0\0\0\x0cjP  "), _IMAGE),
    (8, (b"WEBP", b"avif", b"avis", b"heic", b"heix", b"mif1"), _IMAGE),
    (0, (b"GIF8",), ("video", "image")),
    (0, (b"fLaC", b"ID3", b"RF64", b"riff", b".snd", b"caff", b"#!AMR", b"NIST_1A"), _AUDIO),
    (8, (b"WAVE", b"AIFF", b"AIFC", b"M4A ", b"M4B "), _AUDIO),
    (
        0,
        (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xfa", b"\xff\xf1", b"\xff\xf9"),
        _AUDIO,
    ),  # MPEG audio's sync word
    (28, (b"\x80theora",), _VIDEO),
    (0, (b"OggS",), ("audio", "video")),
    (0, (b"\x1aE\xdf\xa3",), ("video", "audio")),
    (4, (b"ftyp",), ("video", "audio")),
)
"""(offset, what stands there, which kinds that may be), the likelier first."""


def kind_of_bytes(data: bytes | bytearray, kinds: Collection[str]) -> str | None:
    """Which of some kinds an encoded file is; of one that nothing is known about, the first of `KINDS`.

    Args:
        data: A whole file.
        kinds: Those that come into question.

    Returns:
        None where the file is surely of none of them.
    """
    found = next((kind for at, signs, kind in _SIGNS if data[at : at + 16].startswith(signs)), KINDS)
    return next((kind for kind in found if kind in kinds), None)
