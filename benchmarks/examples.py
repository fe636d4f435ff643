"""Is any example slower than without this library? `python benchmarks/examples.py`; it makes what it needs.

The dataset and the transforms of each program in examples/, loaded by its datamodule and by PyTorch's own DataLoader with a worker
per core, by turns in this process; the model is left out. What an example does not say is the default. Where DALI decodes what
torchvision does not (video, speech), the DataLoader decodes with PyAV and soundfile.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import soundfile
import torch
from contest import Contender, Contest, add_arguments, versus
from peers import dataloader, padded
from torch.utils.data import ConcatDataset, Dataset
from torchvision.datasets import ImageFolder
from work import ours

from lightning_dali import ClipSampler, ImageDataModule, SpeechDataModule, VideoDataModule

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
AGAIN = 100
"""Times that the files are gone through in an epoch: examples are short, and their ends are lifecycle.py's subject."""


def again(dataset: Any) -> Dataset[Any]:
    """The dataset `AGAIN` times."""
    return ConcatDataset([dataset] * AGAIN)


def digits(root: Path, *, strong: bool = False) -> tuple[Any, Contender]:
    """examples/image_classification.py."""
    import image_classification as example

    example.write_digits(root)
    dataset = again(ImageFolder(root / "train", transform=example.transforms(train=True, strong=strong)))
    return ImageDataModule(train_dataset=dataset, batch_size=64), dataloader("DataLoader", dataset, 64)


def strong_digits(root: Path) -> tuple[Any, Contender]:
    """The same with --strong."""
    return digits(root, strong=True)


def detection(root: Path) -> tuple[Any, Contender]:
    """examples/detection.py."""
    import detection as example

    dataset = again(example.Shapes(root, example.draw_shapes(root, 160), example.transforms()))
    collate = example.detection_collate
    dm = ImageDataModule(train_dataset=dataset, collate_fn=collate, batch_size=4)
    return dm, dataloader("DataLoader", dataset, 4, collate_fn=collate)


def multimodal(root: Path) -> tuple[Any, Contender]:
    """examples/multimodal.py."""
    import multimodal as example

    example.draw_pairs(root, 600)
    dataset = again(example.Pairs(root, example.transforms(train=True)))
    return ImageDataModule(train_dataset=dataset, batch_size=64), dataloader("DataLoader", dataset, 64)


class Clips(Dataset[Any]):
    """What a DataLoader's user writes for examples/video_classification.py: a random clip, and the transform."""

    def __init__(self, videos: Any, transform: Any, *, num_frames: int, stride: int) -> None:
        self.videos, self.transform, self.num_frames, self.stride = videos, transform, num_frames, stride

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.videos[index]
        with av.open(path) as container:
            stream = container.streams.video[0]
            span = (self.num_frames - 1) * self.stride + 1
            start = random.randrange(stream.frames - span + 1)
            frames = [frame for frame, _ in zip(container.decode(stream), range(start + span), strict=False)]
        chosen = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in frames[start :: self.stride]]
        return self.transform(torch.stack(chosen).permute(0, 3, 1, 2)).transpose(0, 1), label


def video(root: Path) -> tuple[Any, Contender]:
    """examples/video_classification.py."""
    import video_classification as example

    videos, transform = again(example.Videos(root / "train", 60, seed=0)), example.transform(train=True)
    dm = VideoDataModule(
        train_dataset=videos, train_transform=transform, clip=ClipSampler(6, stride=2), layout="CTHW", batch_size=16,
        index_cache=str(root / "index.sqlite3"),
    )  # fmt: skip
    return dm, dataloader("DataLoader, PyAV", Clips(videos, transform, num_frames=6, stride=2), 16)


class Read(Dataset[Any]):
    """What a DataLoader's user writes for examples/speech_commands.py: files by soundfile, and the transform."""

    def __init__(self, paths: list[Path], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        wave, _ = soundfile.read(self.paths[index], dtype="float32")
        return self.transform(torch.from_numpy(wave)[None]), index


def speech(root: Path) -> tuple[Any, Contender]:
    """examples/speech_commands.py."""
    import speech_commands as example

    example.write_words(root, 20)
    transform = example.features(train=True)
    words = again(example.SPEECHCOMMANDS(str(root), subset="training"))
    dm = SpeechDataModule(train_dataset=words, train_transform=transform, batch_size=32)
    read = again(Read(sorted(root.rglob("*.wav")), transform))
    return dm, dataloader("DataLoader, soundfile", read, 32, collate_fn=padded)


EXAMPLES: dict[str, Callable[[Path], tuple[Any, Contender]]] = {
    "image_classification": digits,
    "image_classification --strong": strong_digits,
    "detection": detection,
    "multimodal": multimodal,
    "video_classification": video,
    "speech_commands": speech,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES), metavar="EXAMPLE")
    add_arguments(parser, peers=False)
    options = parser.parse_args()
    for name in options.only:
        print(f"\n{name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            dm, peer = EXAMPLES[name](Path(folder))
            with Contest(rounds=options.rounds, slice_seconds=options.seconds) as contest:
                theirs, own = contest.enter(peer), contest.enter(ours("ours", dm, slices=1))
                contest.run()
                versus(own, theirs, at_least=1.0)


if __name__ == "__main__":
    main()
