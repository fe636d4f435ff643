"""One job, two ways: `python benchmarks/custom.py FOLDER`, FOLDER/images/<class>/*.jpg (media.py makes them).

An `ImageFolder` with torchvision's transforms in `ImageDataModule`, and the same augmentation as a DALI pipeline written by hand in
`DALIDataModule`, fed with files' contents and with paths, by turns in this process. The pipelines draw inside DALI, which is less
work and less of a promise; they should not be worth writing for speed alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from contest import Contest, add_arguments, versus
from nvidia.dali import fn, pipeline_def
from peers import GPU, as_bytes, decode_and_augment, file_bytes
from work import image_folder, ours, recipe

from lightning_dali import DALIDataModule, ImageDataModule

TARGET = 0.95
"""At least, of `ImageDataModule`'s rate over that of a pipeline by hand."""
HARDWARE: dict[str, float] = {"hw_decoder_load": 1.0} if GPU else {}


@pipeline_def
def from_bytes() -> Any:
    """Files' contents to augmented images."""
    return decode_and_augment(fn.external_source(name="encoded", no_copy=True), **HARDWARE)


@pipeline_def
def from_paths() -> Any:
    """Paths to augmented images."""
    return decode_and_augment(fn.io.file.read(fn.external_source(name="path", no_copy=True)), **HARDWARE)


def by_hand(pipeline: Any, load: Callable[[str], Any], options: argparse.Namespace) -> DALIDataModule:
    """A datamodule around a pipeline; `load` makes of a path what the pipeline takes."""
    return DALIDataModule(
        train_dataset=lambda proxy: image_folder(options.folder, options.batch_size, transform=proxy, loader=load),
        train_pipeline=pipeline, batch_size=options.batch_size, num_workers=options.workers, depth=options.depth,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--depth", type=int, default=2, help="batches inside DALI, of all contenders")
    add_arguments(parser, peers=False)
    options = parser.parse_args()
    dataset = image_folder(options.folder, options.batch_size, transform=recipe("imagenet"))
    chosen = {"batch_size": options.batch_size, "num_workers": options.workers, "depth": options.depth}
    dm = ImageDataModule(train_dataset=dataset, **chosen)
    with Contest(rounds=options.rounds, slice_seconds=options.seconds) as contest:
        own = contest.enter(ours("ImageDataModule", dm, slices=1))
        others = [
            contest.enter(ours(f"DALIDataModule, {words}", by_hand(pipeline, load, options), slices=1))
            for words, pipeline, load in (("bytes", from_bytes, file_bytes), ("paths", from_paths, as_bytes))
        ]
        contest.run()
        for other in others:
            versus(own, other, at_least=TARGET)


if __name__ == "__main__":
    main()
