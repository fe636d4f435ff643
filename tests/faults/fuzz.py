"""Damaged files through the whole path: `fuzz.py KIND,KIND COUNT SEED`. Every file must be decoded or reported.

A process of its own, since a crash in a decoder would take pytest along. Prints how many were decoded and reported.
"""

import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torchvision.transforms import v2

from lightning_dali import ClipSampler, ImageDataModule, SpeechDataModule, VideoDataModule
from lightning_dali.testing import IndexedFiles, IndexedImages, make_photos, make_videos, make_wavs

PART = 500
"""Files on disk at a time."""
IMAGES = v2.Compose([v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def mutate(data: bytes, random: np.random.Generator) -> bytes:
    """One to three changes, most of them near the beginning, where headers are."""
    out = bytearray(data)
    for _ in range(int(random.integers(1, 4))):
        if not out:
            break
        where = int(len(out) * random.random() ** 2)
        size = int(random.integers(1, 17))
        kind = int(random.integers(0, 7))
        if kind == 0:
            out[where] ^= 1 << int(random.integers(0, 8))
        elif kind == 1:
            out[where : where + size] = random.bytes(size)
        elif kind == 2:
            del out[where : where + size]
        elif kind == 3:
            out[where:where] = random.bytes(size)
        elif kind == 4:
            out[where : where + size] = (b"\0", b"\xff")[int(random.integers(0, 2))] * size
        elif kind == 5:
            end = where + int(random.integers(1, 2000))
            out[where:where] = out[where:end]
        elif random.random() < 0.3:
            del out[where:]
    return bytes(out)


def originals(kind: str, folder: Path) -> list[Path]:
    """A few sound files of a kind."""
    if kind in ("jpeg", "png"):
        return make_photos(folder, 4, format=kind, sizes=((61, 83), (48, 48)))
    if kind == "mp4":
        return make_videos(folder, 2, num_frames=8, size=(48, 64))
    paths = make_wavs(folder, 3)
    if kind == "wav":
        return paths
    for path in paths:
        wave, rate = soundfile.read(path)
        soundfile.write(path.with_suffix(".flac"), wave, rate)
    return [path.with_suffix(".flac") for path in paths]


def module(kind: str, paths: Sequence[Path]) -> Any:
    """What reads them. A batch of one for audio, since a damaged header may announce another number of channels."""
    options = {
        "on_bad_sample": "drop",
        "num_workers": 2,
        "with_index": True,
        "device": "cpu",
        "persistent_workers": False,
    }
    if kind in ("jpeg", "png"):
        return ImageDataModule(val_dataset=IndexedImages(paths, IMAGES), batch_size=16, **options)
    files = IndexedFiles(paths)
    if kind == "mp4":
        clip, resize = ClipSampler(4), v2.Resize((32, 32))
        return VideoDataModule(val_dataset=files, eval_transform=resize, clip=clip, batch_size=4, **options)
    return SpeechDataModule(val_dataset=files, batch_size=1, **options)


def check(kind: str, paths: Sequence[Path]) -> tuple[int, int]:
    """Decodes them all; (decoded, reported)."""
    dm = module(kind, paths)
    delivered = set()
    for *_, rows in dm.val_dataloader():
        delivered |= set(rows.tolist())
    bad = {one.dataset_index: one for one in dm.bad_samples}
    dm.close()
    lost = set(range(len(paths))) - delivered - set(bad)
    assert not lost, f"neither decoded nor reported: {[paths[index] for index in sorted(lost)][:5]}"
    assert all(one.reason and one.path for one in bad.values()), [one for one in bad.values() if not one.reason][:3]
    return len(paths) - len(bad), len(bad)


def main(kind: str, count: int, seed: int) -> None:
    """Fuzzes one kind of file."""
    logging.disable(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{kind}-"))
    sound = [path.read_bytes() for path in originals(kind, folder / "sound")]
    ending = next(
        path.suffix for path in sorted((folder / "sound").iterdir()) if kind[:2] in path.suffix or kind == "jpeg"
    )
    totals = [0, 0]
    for first in range(0, count, PART):
        part = folder / str(first)
        part.mkdir()
        paths = []
        for number in range(first, min(count, first + PART)):
            random = np.random.default_rng((seed, number))
            path = part / f"{number:06d}{ending}"
            path.write_bytes(mutate(sound[number % len(sound)], random))
            paths.append(path)
        for place, value in enumerate(check(kind, paths)):
            totals[place] += value
        shutil.rmtree(part)  # kept where something went wrong
    shutil.rmtree(folder)
    print(kind, "decoded", totals[0], "reported", totals[1], flush=True)


if __name__ == "__main__":
    for kind in sys.argv[1].split(","):
        main(kind, int(sys.argv[2]), int(sys.argv[3]))
