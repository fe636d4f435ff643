"""Images a second: `python benchmarks/images.py FOLDER [--recipe ...]`, FOLDER/images/<class>/*.jpg.

Prints this library's rate and, with --peer, that of torchvision on PIL in a DataLoader with a worker per core.
"""

from __future__ import annotations

import argparse
import os

import torch
from rates import endless, measure
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_dali import ImageDataModule

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def recipe(name: str) -> v2.Compose:
    """The transforms of a named recipe."""
    before = {"imagenet": [], "randaugment": [v2.RandAugment()]}[name]
    after = {"imagenet": [], "randaugment": [v2.RandomErasing(0.25)]}[name]
    return v2.Compose(
        [
            v2.RandomResizedCrop(224),
            *before,
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
            *after,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--recipe", default="imagenet", choices=["imagenet", "randaugment"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="*", default=[8])
    parser.add_argument("--threads", type=int, nargs="*", default=[4])
    parser.add_argument("--depth", type=int, nargs="*", default=[3])
    parser.add_argument("--load", type=float, nargs="*", default=[1.0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    dataset = ImageFolder(os.path.join(options.folder, "images"), transform=recipe(options.recipe))
    for workers in options.workers:
        for threads in options.threads:
            for depth in options.depth:
                for load in options.load:
                    dm = ImageDataModule(
                        train_dataset=dataset, batch_size=options.batch_size, num_workers=workers, num_threads=threads,
                        depth=depth, hw_decoder_load=load,
                    )  # fmt: skip
                    rate = measure(endless(dm.train_dataloader()), options.batch_size, seconds=options.seconds)
                    dm.close()
                    print(f"{options.recipe} w{workers} t{threads} d{depth} hw{load}: {rate}", flush=True)
    if options.peer:
        loader = torch.utils.data.DataLoader(
            dataset, options.batch_size, shuffle=True, num_workers=len(os.sched_getaffinity(0)), drop_last=True,
            persistent_workers=True, pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batches = (batch[0].to(device, non_blocking=True) for batch in endless(loader))
        rate = measure(batches, options.batch_size, seconds=options.seconds)
        print(f"{options.recipe} torchvision on PIL, {loader.num_workers} workers: {rate}", flush=True)


if __name__ == "__main__":
    main()
