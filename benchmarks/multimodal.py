"""Pairs of a photo and an utterance a second: `python benchmarks/multimodal.py FOLDER` (media.py makes images and speech).

One server whose graphs are those of both kinds, against the same with a thread a graph, and against two servers, one a kind, each
with half of the workers and a thread of its own, whose batches are put together afterwards; and each kind alone. What
docs/decisions/0005 rests on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

import soundfile
import torch
from contest import Batches, Contender, Contest, add_arguments, versus
from PIL import Image
from rates import endless
from torch.utils.data import Dataset
from work import LONG_EPOCH, cores, features, images_in, ours, recipe, speech_in

from lightning_dali import ImageDataModule, MultiModalDataModule, SpeechDataModule
from lightning_dali.server import Driver


class Pairs(Dataset[dict[str, Any]]):
    """Photo and utterance of a number, or one of the two, as one would write it without this library."""

    def __init__(self, folder: str, kinds: tuple[str, ...], num_samples: int) -> None:
        self.photos, self.sounds = sorted(glob(f"{images_in(folder)}/*/*.jpg")), speech_in(folder)
        self.kinds, self.num_samples = kinds, num_samples
        self.image, self.audio = recipe("imagenet"), features()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {"index": index}
        if "image" in self.kinds:
            sample["image"] = self.image(Image.open(self.photos[index % len(self.photos)]).convert("RGB"))
        if "audio" in self.kinds:
            wave, _ = soundfile.read(self.sounds[index % len(self.sounds)], dtype="float32")
            sample["speech"] = self.audio(torch.from_numpy(wave))
        return sample


def zipped(name: str, modules: list[Any], batch_size: int) -> Contender:
    """Several datamodules over the same indices, whose batches are joined."""

    def batches() -> Batches:
        try:
            for parts in zip(*(endless(dm.train_dataloader()) for dm in modules), strict=True):
                joined = {key: value for part in parts for key, value in part.items()}
                assert all(torch.equal(part["index"], joined["index"]) for part in parts)
                yield joined
        finally:
            for dm in modules:
                dm.close()

    return Contender(name, batches, batch_size, slices=2)


class Threads:
    """An experiment, not a way to use it: drivers of marked servers collect the lanes of a batch in parallel."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(4, thread_name_prefix="graph")
        self.servers: set[int] = set()
        Driver._collect = self._of(Driver._collect)  # type: ignore[method-assign]  # for good: this is the experiment

    def _of(self, before: Callable[..., Any]) -> Any:
        def collect(driver: Any, request: Any, executors: list[Any]) -> Any:
            def one(number: int) -> Any:
                with driver._on_stream():
                    return executors[number].collect(request.lanes[number])

            if id(driver._server) not in self.servers or len({*map(id, executors)}) < len(executors):
                return before(driver, request, executors)
            return request, list(self.pool.map(one, range(len(executors))))

        return collect


def run(options: argparse.Namespace) -> None:
    """All of them."""
    size, workers, threads = options.batch_size, options.workers, options.threads
    both = ("image", "audio")

    def dataset(*kinds: str) -> Pairs:
        return Pairs(options.folder, kinds, LONG_EPOCH * size)

    def shared(parts: int = 1) -> dict[str, Any]:
        return {"batch_size": size, "num_workers": max(1, workers // parts), "num_threads": max(1, threads // parts)}

    with Contest(rounds=options.rounds, slice_seconds=options.seconds) as contest:
        one, threaded = (MultiModalDataModule(train_dataset=dataset(*both), kinds=both, **shared()) for _ in range(2))
        Threads().servers.add(id(threaded.stage_loaders("train")[0].server))
        two: list[Any] = [
            ImageDataModule(train_dataset=dataset("image"), **shared(2)),
            SpeechDataModule(train_dataset=dataset("audio"), **shared(2)),
        ]
        entries = [
            contest.enter(ours("one server", one)),
            contest.enter(ours("one server, a thread a graph", threaded)),
            contest.enter(zipped("two servers", two, size)),
        ]
        contest.enter(ours("images alone", ImageDataModule(train_dataset=dataset("image"), **shared())))
        contest.enter(ours("speech alone", SpeechDataModule(train_dataset=dataset("audio"), **shared())))
        contest.run()
        for other in entries[1:]:
            versus(entries[0], other)
        for entry in contest.entries:
            print(f"{entry.contender.name:<44} {entry.cpu_seconds_per_1000:.2f} CPU seconds for 1,000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=max(2, cores() // 2))
    parser.add_argument("--threads", type=int, default=max(2, cores() // 4))
    add_arguments(parser, peers=False)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
