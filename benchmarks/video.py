"""Clips a second: `python benchmarks/video.py FOLDER --peers`, FOLDER/videos/<codec>_<width>x<height>_*.mp4 (media.py makes them).

A clip is 16 frames, every fourth one, from a start among the first 150 frames, resized to 224x224. Prints this library's rate for
each kind of file, decoder and number of workers, and how busy the GPU's decoders are. --peers adds what one would pick instead, by
turns in this process: PyAV in a DataLoader with a worker per core, and PyNvVideoCodec's SimpleDecoder on whole files in 12 threads.
--stock adds the stock DALI Proxy with DALI's video decoder, which takes its time: what `--decoder dali` is judged by.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from contest import Contest, Entry, add_arguments, versus
from nvdec import Utilisation
from rates import judged
from torchvision.transforms import v2
from work import FRAMES, KINDS, RATE, SIZE, STARTS, STRIDE, Videos, ours, videos_in

from lightning_dali import ClipSampler, VideoDataModule

SUM, BUSY = 0.85, 90.0
"""Targets: at least so much of what PyAV on the cores and SimpleDecoder on NVDEC make together; percent that NVDEC is busy."""
PACE = {"warm_up_seconds": 2.5, "stands_still": False}
"""Workers decode a share of the clips that follows from how long they take; a batch of them is ready every 50 ms."""
STOCK = {"h264_1920x1080": 3.0, "h264_640x360": 3.0}
"""At least so many times the stock proxy, whose decoder starts anew for each clip of these sizes."""


def datamodule(paths: Sequence[str], options: argparse.Namespace, decoder: str, workers: int | None) -> VideoDataModule:
    last = STARTS + (FRAMES - 1) * STRIDE
    return VideoDataModule(
        train_dataset=Videos(paths),
        train_transform=v2.Compose([v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, scale=True)]),
        clip=ClipSampler(FRAMES, stride=STRIDE, end_seconds=last / RATE),
        batch_size=options.batch_size, num_workers=workers, decoder=decoder,
        **({} if options.depth is None else {"depth": options.depth}),
    )  # fmt: skip


def run(kind: str, paths: Sequence[str], options: argparse.Namespace) -> None:
    """All contenders on one kind of file."""
    with Utilisation() as nvdec, Contest(rounds=options.rounds, slice_seconds=options.seconds) as contest:
        peers: dict[str, Entry] = {}
        if options.peers or options.stock:
            import peers as other
        if options.peers:
            peers["PyAV"] = contest.enter(other.pyav(paths))
        found = [
            contest.enter(
                ours(f"ours {decoder}" + f" num_workers={workers}" * (workers is not None), dm, slices=1, **PACE)
            )
            for decoder in options.decoder
            for workers in options.workers
            for dm in [datamodule(paths, options, decoder, workers)]
        ]
        if options.peers and torch.cuda.is_available():
            peers["SimpleDecoder"] = contest.enter(other.simple_decoder(paths, options.batch_size))
        if options.stock:
            peers["stock"] = contest.enter(other.stock_video(paths, options.batch_size))
        contest.run()
        for entry in found:
            judge(kind, entry, peers)
            print_busy(entry, nvdec, at_least=BUSY)
        for name in ("SimpleDecoder", "stock"):  # what the counter can show
            if name in peers:
                print_busy(peers[name], nvdec)


def judge(kind: str, entry: Entry, peers: dict[str, Entry]) -> None:
    """Prints ratios to each peer and to the sum of what cores and NVDEC can do."""
    for name, peer in peers.items():
        versus(entry, peer, **({"at_least": STOCK[kind]} if name == "stock" and kind in STOCK else {}))
    both = [peers[name].rate.median for name in ("PyAV", "SimpleDecoder") if name in peers]
    if len(both) == 2 and all(both):
        share = entry.rate.median / sum(both)
        print(judged(f"{entry.contender.name} / (PyAV + SimpleDecoder)", share, at_least=SUM), flush=True)


def print_busy(entry: Entry, nvdec: Utilisation, **target: float) -> None:
    """Prints how busy NVDEC was in a contender's turns; nothing where it was not told."""
    busy = nvdec.percent(entry.spans)
    if busy is not None:
        print(judged(f"NVDEC busy, percent: {entry.contender.name}", busy, **target), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--decoder", nargs="*", default=["auto"], choices=["auto", "nvdec", "dali", "cpu"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="*", default=[None])
    parser.add_argument("--depth", type=int)
    parser.add_argument("--stock", action="store_true", help="the stock proxy too; needs a GPU")
    add_arguments(parser, seconds=1.5)
    options = parser.parse_args()
    if options.stock and not torch.cuda.is_available():
        parser.error("--stock needs a GPU: DALI decodes H.264 and HEVC on nothing else")
    for kind in options.kinds:
        paths = videos_in(options.folder, kind)
        print(f"\n{kind}" if paths else f"\n{kind}: no files", flush=True)
        if paths:
            run(kind, paths, options)


if __name__ == "__main__":
    main()
