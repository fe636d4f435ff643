"""Clips a second: `python benchmarks/video.py FOLDER`, FOLDER/videos/<codec>_<width>x<height>_*.mp4 of 240 frames at 30 a second.

A clip is 16 frames, every fourth one, from a random start in [0, 150), resized to 224x224. Prints this library's rate for each
kind of file, decoder and number of workers, and with --peer what one would pick instead: PyAV in a DataLoader with a worker
per core, and PyNvVideoCodec's SimpleDecoder on whole files in 12 threads, which keeps its decoder from clip to clip.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from itertools import count
from typing import Any

import av
import torch
from rates import Rate, endless, measure
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_dali import ClipSampler, VideoDataModule

KINDS = ("h264_320x256", "h264_340x256", "h264_640x360", "h264_1280x720", "h264_1920x1080", "hevc_1920x1080")
FRAMES, STRIDE, STARTS, RATE = 16, 4, 150, 30
SIZE = 224
PEER_THREADS = 12
CLIPS = 960
"""Samples of the dataset: its files again and again, so that an epoch is no shorter than a measurement."""


class Videos(Dataset[tuple[str, int]]):
    """Paths; what becomes of them is the datamodule's."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return CLIPS

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.paths[index % len(self.paths)], index


class Decoded(Videos):
    """What a DataLoader's user writes: PyAV from the file's start, swscale's resizing."""

    def __getitem__(self, index: int) -> tuple[Any, int]:  # type: ignore[override]  # pixels instead of the path
        path, start = self.paths[index % len(self.paths)], (13 * index) % STARTS
        wanted, frames = set(range(start, start + FRAMES * STRIDE, STRIDE)), []
        with av.open(path) as container:
            container.streams.video[0].thread_count = 1
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    frames.append(torch.from_numpy(frame.reformat(SIZE, SIZE, format="rgb24").to_ndarray()))
                if len(frames) == FRAMES:
                    break
        return torch.stack(frames), index


def pyav(paths: Sequence[str], batch_size: int) -> Iterator[Any]:
    """Batches on the device from a plain DataLoader; small ones, so that every worker has one."""
    cuda = torch.cuda.is_available()
    loader = DataLoader(
        Decoded(paths), batch_size, shuffle=True, num_workers=len(os.sched_getaffinity(0)), persistent_workers=True,
        drop_last=True, pin_memory=cuda,
    )  # fmt: skip
    for clips, _ in endless(loader):
        yield clips.to("cuda", non_blocking=True) if cuda else clips


def simple_decoder(paths: Sequence[str], batch_size: int) -> Iterator[Any]:
    """Batches from NVIDIA's own high-level decoder, one a thread."""
    import PyNvVideoCodec as nvc

    kept = threading.local()

    def clip(index: int) -> torch.Tensor:
        path, start = paths[index % len(paths)], (13 * index) % STARTS
        if hasattr(kept, "decoder"):
            kept.decoder.reconfigure_decoder(path)
        else:
            kept.decoder = nvc.SimpleDecoder(
                path, gpu_id=0, use_device_memory=True, output_color_type=nvc.OutputColorType.RGB
            )
        frames = kept.decoder.get_batch_frames_by_index([*range(start, start + FRAMES * STRIDE, STRIDE)])
        pixels = torch.stack([torch.from_dlpack(frame) for frame in frames]).permute(0, 3, 1, 2)
        return torch.nn.functional.interpolate(pixels.float(), (SIZE, SIZE), mode="bilinear")

    with ThreadPoolExecutor(PEER_THREADS) as pool:
        numbers = count()
        ahead = [pool.submit(clip, next(numbers)) for _ in range(4 * batch_size)]
        try:
            while True:
                now, ahead = ahead[:batch_size], ahead[batch_size:]
                ahead += [pool.submit(clip, next(numbers)) for _ in range(batch_size)]
                yield torch.stack([one.result() for one in now])
        finally:
            for one in ahead:
                one.cancel()


def ours(paths: Sequence[str], options: argparse.Namespace, decoder: str, workers: int) -> Rate:
    """The datamodule's rate."""
    transform = v2.Compose([v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, scale=True)])
    last = STARTS + (FRAMES - 1) * STRIDE
    dm = VideoDataModule(
        train_dataset=Videos(paths), train_transform=transform, clip=ClipSampler(FRAMES, stride=STRIDE, end_seconds=last / RATE),
        batch_size=options.batch_size, num_workers=workers, decoder=decoder, depth=options.depth,
    )  # fmt: skip
    try:
        return measure(endless(dm.train_dataloader()), options.batch_size, seconds=options.seconds)
    finally:
        dm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--decoder", nargs="*", default=["auto"], choices=["auto", "nvdec", "dali", "cpu"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="*", default=[8])
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    for kind in options.kinds:
        paths = sorted(glob(f"{options.folder}/videos/{kind}_*.mp4"))
        if not paths:
            print(f"{kind}: no files", flush=True)
            continue
        for decoder in options.decoder:
            for workers in options.workers:
                print(f"{kind} {decoder} w{workers}: {ours(paths, options, decoder, workers)}", flush=True)
        if options.peer:
            rate = measure(pyav(paths, 4), 4, seconds=options.seconds)
            print(f"{kind} PyAV, {len(os.sched_getaffinity(0))} workers: {rate}", flush=True)
            if torch.cuda.is_available():
                rate = measure(simple_decoder(paths, options.batch_size), options.batch_size, seconds=options.seconds)
                print(f"{kind} SimpleDecoder, {PEER_THREADS} threads: {rate}", flush=True)


if __name__ == "__main__":
    main()
