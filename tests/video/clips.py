"""What the tests of videos share: datasets of files, scenes to compare pixels on, and what torchvision would have made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors

from lightning_dali import ClipSampler, VideoDataModule
from lightning_dali.media import build_index, decode_frames
from lightning_dali.seeding import sample_seed, seeded
from tests.media.video_files import CODECS, encoder_options, read_number

SEED = 11


class Videos:
    """A dataset of files as people write it: `(path, label)`, or what `make` makes of path and index."""

    def __init__(self, paths: Sequence[Path], make: Callable[[str, int], Any] | None = None) -> None:
        self.paths = [str(path) for path in paths]
        self.make = make

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index]
        return (path, index) if self.make is None else self.make(path, index)


def datamodule(dataset: Any, folder: Path, *, stage: str = "val", **options: Any) -> VideoDataModule:
    """A datamodule whose index cache is in `folder`; on the CPU, in this process, unless told otherwise."""
    options = {"batch_size": 2, "seed": SEED, "num_workers": 0, "num_threads": 1, "device": "cpu", **options}
    return VideoDataModule(**{f"{stage}_dataset": dataset}, index_cache=str(folder / "index.sqlite3"), **options)


def batches(dataset: Any, folder: Path, *, stage: str = "val", **options: Any) -> list[Any]:
    """All batches of one pass."""
    dm = datamodule(dataset, folder, stage=stage, **options)
    try:
        return list(getattr(dm, f"{stage}_dataloader")())
    finally:
        dm.close()


def eager(
    video: Any, sampler: ClipSampler, transform: Any, index: int, *, epoch: int = 0, clip: int = 0
) -> torch.Tensor:
    """The clip as PyAV and torchvision make it under the sample's seed: `(T, C, H, W)`."""
    with seeded(sample_seed(SEED, epoch, index), restore=True):
        facts = build_index(video)
        frames = decode_frames(video, facts, sampler.sample(facts, clip=clip).frames)
        pixels = tv_tensors.Video(torch.from_numpy(frames).permute(0, 3, 1, 2))
        made = pixels if transform is None else transform(pixels)
        return made.as_subclass(torch.Tensor)


def numbers(clip: torch.Tensor) -> list[int]:
    """The numbers painted into the frames of a clip `(T, C, H, W)` of uint8."""
    return [read_number(frame) for frame in clip.permute(0, 2, 3, 1).cpu().numpy()]


def make_scene(
    path: Path, *, codec: str = "h264", width: int = 240, height: int = 180, num_frames: int = 30, seed: int = 0
) -> Path:
    """Writes a smooth picture that pans three pixels a frame."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (8, 12, 3), dtype=np.uint8))
    scene = np.asarray(small.resize((width + 3 * num_frames, height), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream(CODECS[codec], rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        quality = {"crf": "12"} if codec in ("h264", "hevc") else {"b": "3M"}
        stream.options = {**encoder_options(codec, 12, 2, False), **quality}
        stream.codec_context.thread_count = 1
        for k in range(num_frames):
            pixels = np.ascontiguousarray(scene[:, 3 * k : 3 * k + width])
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode())
    return path
