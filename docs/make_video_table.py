"""Writes docs/video-codecs.md: what decodes each codec, and whether the wanted frames come out.

Run from the repository: ``python docs/make_video_table.py``. Every kind is encoded and read back; `tests/video` checks that
the file is what this writes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.video.codecs import KINDS, WANTED, Kind, decoder_on_gpu, facts, shown, variable_rate

INTRODUCTION = """# Codecs, and where they are decoded

Every kind is encoded with a number painted in each frame, at a constant and at a variable rate; frames are then asked for by
number, out of order, and read back. *NVDEC*: on the device, with `decoder="auto"`, `"nvdec"` or `"dali"` on a GPU (H.264 from
48x16 to 4096x4096, HEVC from 144x144 to 8192x8192). *worker*: by PyAV in the worker processes. Without a GPU, and with
`decoder="cpu"`, everything is.

Written by `docs/make_video_table.py`; `tests/video/test_frames.py` checks it, and on a GPU every decoder.

| kind | container | as the index has it | on a GPU | frames, constant rate | frames, variable rate |
|---|---|---|---|---|---|
"""
END = """
Whatever else PyAV's FFmpeg decodes plays too. A sound-only file, an encrypted one, one whose index is cut off, one without frames
and one that changes size on the way are bad samples: `on_bad_sample` says what happens.
"""


def row(kind: Kind) -> str:
    """One line of the table."""
    words = []
    known = where = ""
    for one in (variable_rate(kind), kind):
        if one is None:
            words.append("has none")
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = one.make(Path(folder))
            right = sum(shown(path, Path(folder), frames) == frames for frames in WANTED)
            words.append("exact" if right == len(WANTED) else f"{right} of {len(WANTED)} clips")
            known, where = facts(path), decoder_on_gpu(path)
    return f"| {kind.name} | {kind.suffix} | {known} | {where} | {words[1]} | {words[0]} |"


def table() -> str:
    """The whole page."""
    return INTRODUCTION + "\n".join(map(row, KINDS)) + "\n" + END


def main() -> None:
    """Encodes, decodes and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    Path(__file__).with_name("video-codecs.md").write_text(table())


if __name__ == "__main__":
    main()
