"""Writes docs/vocabulary.md: where each transform of `torchvision.transforms.v2` runs, and how close it is.

Run from the repository: ``python docs/make_vocabulary_table.py``; with ``--device 0`` on a GPU it writes docs/vocabulary-gpu.md.
The numbers are those that `tests/graph/test_vocabulary.py` holds to its tolerances, there on PNGs for the GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_dali.testing import make_photos
from tests.graph.vocabulary import ENTRIES, SAMPLES, SIZES, Entry, Measured, measure

INTRODUCTION = """# {title}

Every transform of `torchvision.transforms.v2` runs from an unmodified `Compose`. *DALI*: in the DALI graph, with decoding.
*device*: right after it, batched, with torchvision's arithmetic (Pillow's where the transform met a PIL image, as it would
have without DALI: decisions/0003). *worker*: it needs pixels on the CPU, so the file is decoded there and the rest of the
pipeline runs there too; the datamodule says so.

Differences from torchvision on the same draw, in 255ths, on smooth JPEGs of about 64 x 80, on the {device}. Boxes, masks
and keypoints are transformed by torchvision itself and are equal; "targets" says which of them torchvision takes.{more}
Written by `docs/make_vocabulary_table.py`; `tests/graph/test_vocabulary.py` checks it.

| transform | where | mean | 99th percentile | max | targets |
|---|---|---|---|---|---|
"""
DECODER = """
The GPU's JPEG decoder alone is 0.5 to 0.7 from libjpeg (`RandomHorizontalFlip`, `RGB`): that is in every row, more where a
transform enlarges differences, as `Normalize` does by 4 and `RandomEqualize` by what the picture needs.
"""
END = """
`MixUp`, `CutMix` and `RandomChoice` of them go to `batch_transform=` and run on the device. `UniformTemporalSubsample` is
for videos. `GaussianNoise` draws its noise from a seed that the worker drew: the same every time, but not torchvision's.
"""


def row(entry: Entry, paths: list[Path], device: int | None) -> str:
    """One line of the table: the worst of all samples that torchvision takes."""
    found = {sample: measure(entry.make, paths, sample, device=device) for sample in SAMPLES}
    taken: list[Measured] = [one for one in found.values() if one is not None]
    where = max((one.where for one in taken), key=["DALI", "device", "worker"].index)
    numbers = (
        ["drawn"] * 3
        if entry.random
        else [f"{max(getattr(one, name) for one in taken):.3g}" for name in ("mean", "p99", "max")]
    )
    targets = ", ".join(sample for sample in SAMPLES[1:] if found[sample] is not None) or "none"
    return f"| {entry.name} | {where} | {' | '.join(numbers)} | {targets} |"


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, help="a CUDA device; the CPU by default")
    device = parser.parse_args().device
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        paths = make_photos(folder, 6, sizes=SIZES)
        lines = [row(entry, paths, device) for entry in ENTRIES]
    where = {"device": "CPU", "title": "The transforms, and where they run", "more": ""}
    if device is not None:
        where = {"device": "GPU", "title": "The transforms on a GPU", "more": DECODER}
    text = INTRODUCTION.format(**where) + "\n".join(lines) + "\n" + END
    Path(__file__).with_name("vocabulary.md" if device is None else "vocabulary-gpu.md").write_text(text)


if __name__ == "__main__":
    main()
