"""Images a second: `python benchmarks/images.py FOLDER --peers`, FOLDER/images/<class>/*.jpg (media.py makes them).

A slice is a second of the training loader alone. --peers adds torchvision on PIL in a DataLoader with a worker per core, the stock
DALI Proxy with paths, and DALI's own file reader, by turns in this process, and prints ratios, CPU seconds and device memory
beside their targets. `--recipe randaugment` does so with RandAugment and RandomErasing, beside the plain recipe. Several values of
--workers, --threads, --depth or --load make several contenders; without one the library chooses.

`--guard 1.1` needs no FOLDER: it makes pictures, and exits with 1 where this library is not 1.1 times torchvision's DataLoader.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contest import Contest, Entry, add_arguments, versus
from media import write_all, write_image
from rates import judged
from work import RECIPES, image_folder, ours, recipe

from lightning_dali import ImageDataModule

GPU = torch.cuda.is_available()
TARGETS: dict[str, dict[str, float]] = {"torchvision": {"at_least": 1.3}}
"""Of our rate over each peer's, and of other figures."""
if GPU:
    TARGETS = {
        "torchvision": {"at_least": 6},
        "reader": {"at_least": 1.15},
        "hardware": {"at_least": 0.95},
        "plain": {"at_least": 0.85},
        "steadiness": {"at_least": 0.85},
        "CPU": {"at_most": 0.5},
        "memory": {"at_most": 900},  # MB, for float32 in batches of 256
    }
GUARD_IMAGES, GUARD_BATCH = 300, 64


def target(name: str) -> dict[str, float]:
    """As `judged` takes it; none where there is none for this machine."""
    return TARGETS.get(name, {})


def settings(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """A name and the datamodule's options for each combination that was asked for."""
    asked = {
        name: values
        for name, values in {
            "num_workers": options.workers, "num_threads": options.threads, "depth": options.depth,
            "hw_decoder_load": options.load,
        }.items()
        if values
    }  # fmt: skip
    made = [dict(zip(asked, values, strict=True)) for values in itertools.product(*asked.values())]
    return [(" ".join(["ours", *(f"{name}={value}" for name, value in one.items())]), one) for one in made]


def beside_torch_mb() -> float:
    """Device memory in use that torch's allocator does not hold, in MB: contexts, libraries, DALI, other processes."""
    if not GPU:
        return 0.0
    torch.zeros(1, device="cuda")  # the context
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 1e6


def run(options: argparse.Namespace) -> None:
    """All contenders of a recipe."""
    size, name = options.batch_size, options.recipe
    dataset = image_folder(options.folder, size, transform=recipe(name, getattr(torch, options.dtype)))
    with Contest(rounds=options.rounds, slice_seconds=options.seconds) as contest:
        peers: dict[str, Entry] = {}
        if options.peers:  # first, so that its processes are forked before DALI has threads
            from peers import dataloader

            peers["torchvision"] = contest.enter(dataloader("torchvision on PIL", dataset, size))
        found, before = [], beside_torch_mb()
        for words, chosen in settings(options):
            dm = ImageDataModule(train_dataset=dataset, batch_size=size, **chosen)
            found.append(contest.enter(ours(words, dm)))
            if GPU and len(found) == 1:  # later ones find DALI's libraries loaded
                memory = beside_torch_mb() - before
                print(judged("device memory beside torch, MB", memory, **target("memory")), flush=True)
        if name == "randaugment":
            plain = ImageDataModule(
                train_dataset=image_folder(options.folder, size, transform=recipe("imagenet")), batch_size=size
            )
            peers["plain"] = contest.enter(ours("ours without RandAugment", plain, slices=1))
        elif options.peers:
            from peers import file_reader, stock_images

            peers["stock"] = contest.enter(stock_images(options.folder, size))
            peers["reader"] = contest.enter(file_reader(options.folder, size, share=None))
            if GPU:
                peers["hardware"] = contest.enter(file_reader(options.folder, size, share=1.0))
        contest.run()
        for entry in found:
            judge(entry, peers)


def judge(entry: Entry, peers: dict[str, Entry]) -> None:
    """Prints ratios to each peer."""
    for name, peer in peers.items():
        versus(entry, peer, **target(name))
    if entry.slices:
        steady = entry.rate.tenth_percentile / entry.rate.median
        print(judged("tenth percentile / median", steady, **target("steadiness")), flush=True)
        print(judged("CPU seconds per 1,000 images", entry.cpu_seconds_per_1000), flush=True)
    torchvision = peers.get("torchvision")
    if torchvision and entry.samples and torchvision.samples:
        theirs = torchvision.cpu_seconds_per_1000
        print(judged("CPU seconds per 1,000 images, torchvision", theirs), flush=True)
        share = judged("CPU seconds / torchvision's", entry.cpu_seconds_per_1000 / theirs, **target("CPU"))
        print(share, flush=True)


def guard(least: float) -> int:
    """The exit status: 1 where the ratio of medians is under `least`, also when it is measured once more."""
    from peers import dataloader

    with tempfile.TemporaryDirectory() as folder:
        write_all(partial(write_image, Path(folder)), range(GUARD_IMAGES))
        dataset = image_folder(folder, GUARD_BATCH, transform=recipe("imagenet"))
        for _ in range(2):  # machines are noisy
            with Contest() as contest:
                theirs = contest.enter(dataloader("torchvision on PIL", dataset, GUARD_BATCH))
                dm = ImageDataModule(train_dataset=dataset, batch_size=GUARD_BATCH)
                own = contest.enter(ours("ours", dm))
                contest.run()
            ratio = own.rate.median / theirs.rate.median if own.slices and theirs.slices else 0.0
            print(judged("ours / torchvision", ratio, at_least=least), flush=True)
            if ratio >= least:
                return 0
    print(
        f"The image path makes {ratio:.2f} times the images a second of torchvision's DataLoader on the same cores, "
        f"and must make {least:g} times as many: see what the last changes cost.",
        file=sys.stderr,
    )
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--recipe", default="imagenet", choices=RECIPES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="*")
    parser.add_argument("--threads", type=int, nargs="*")
    parser.add_argument("--depth", type=int, nargs="*")
    parser.add_argument("--load", type=float, nargs="*")
    parser.add_argument("--guard", type=float, metavar="RATIO")
    add_arguments(parser)
    options = parser.parse_args()
    if options.guard is not None:
        sys.exit(guard(options.guard))
    if options.folder is None:
        parser.error("FOLDER is missing; do: python benchmarks/media.py FOLDER --images 20000")
    run(options)


if __name__ == "__main__":
    main()
