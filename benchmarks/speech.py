"""Utterances a second: `python benchmarks/speech.py FOLDER`, FOLDER/speech/*.flac: 80-bin log-mels with SpecAugment.

Prints this library's rate and, with --peer, that of soundfile + torchaudio in a DataLoader with a worker per core.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import soundfile
import torch
from rates import endless, measure
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchaudio import transforms as T

from lightning_dali import Padded, SpeechDataModule
from lightning_dali.audio import CMVN, Log


def features() -> nn.Sequential:
    """What an ASR model is fed: NeMo's usual front end."""
    return nn.Sequential(
        T.MelSpectrogram(16_000, n_fft=512, win_length=400, hop_length=160, n_mels=80),
        Log(),
        CMVN(),
        T.SpecAugment(n_time_masks=2, time_mask_param=70, n_freq_masks=2, freq_mask_param=27, p=0.2),
    )


class Utterances(Dataset[tuple[Any, int]]):
    """FLAC files, read with soundfile, and the transform."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder, "speech").glob("*.flac"))
        self.transform = features()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        wave, _ = soundfile.read(self.paths[index], dtype="float32")
        return self.transform(torch.from_numpy(wave)), index


def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[Padded, torch.Tensor]:
    """What a DataLoader's user writes to collate."""
    return Padded.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


def peer(dataset: Utterances, batch_size: int) -> Any:
    """Batches on the device from a plain DataLoader."""
    cuda = torch.cuda.is_available()
    loader = DataLoader(
        dataset, batch_size, shuffle=True, num_workers=len(os.sched_getaffinity(0)), collate_fn=padded, drop_last=True,
        persistent_workers=True, pin_memory=cuda, worker_init_fn=lambda _: torch.set_num_threads(1),
    )  # fmt: skip
    for batch, _ in endless(loader):
        yield batch.to("cuda", non_blocking=True) if cuda else batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="*", default=[2])
    parser.add_argument("--threads", type=int, nargs="*", default=[12])
    parser.add_argument("--depth", type=int, nargs="*", default=[2])
    parser.add_argument("--buckets", action="store_true", help="batches of similar lengths")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    dataset = Utterances(options.folder)
    for workers in options.workers:
        for threads in options.threads:
            for depth in options.depth:
                dm = SpeechDataModule(
                    train_dataset=dataset, batch_size=options.batch_size, num_workers=workers, num_threads=threads,
                    depth=depth, bucket_by_length=options.buckets,
                )  # fmt: skip
                rate = measure(endless(dm.train_dataloader()), options.batch_size, seconds=options.seconds)
                dm.close()
                print(f"log-mel w{workers} t{threads} d{depth}: {rate}", flush=True)
    if options.peer:
        rate = measure(peer(dataset, options.batch_size), options.batch_size, seconds=options.seconds)
        print(f"log-mel soundfile + torchaudio, {len(os.sched_getaffinity(0))} workers: {rate}", flush=True)


if __name__ == "__main__":
    main()
