"""Utterances a second: `python benchmarks/speech.py FOLDER --peers`, FOLDER/speech/*.flac (media.py makes them).

80-bin log-mels, normalised, with SpecAugment. --peers adds, by turns in this process, soundfile + torchaudio in a DataLoader with a
worker per core, the stock DALI Proxy with DALI's features, and DALI's decoding of the files alone, which is the limit of whoever
decodes with it.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from contest import Contest, Entry, add_arguments, versus
from work import LONG_EPOCH, Utterances, ours

from lightning_dali import SpeechDataModule

TORCHAUDIO, DECODING = (4.0, 0.95) if torch.cuda.is_available() else (None, None)
"""Targets, of which one is to be reached: so many times torchaudio, so much of decoding alone."""


def run(options: argparse.Namespace) -> None:
    """All contenders."""
    size = options.batch_size
    dataset = Utterances(options.folder, None if options.buckets else LONG_EPOCH * size)
    with Contest(rounds=options.rounds, slice_seconds=options.seconds) as contest:
        peers: list[tuple[Entry, float | None]] = []
        if options.peers:
            import peers as other

            peers.append((contest.enter(other.torchaudio_speech(dataset, size)), TORCHAUDIO))
        found = []
        asked = {"num_workers": options.workers, "num_threads": options.threads, "depth": options.depth}
        asked = {name: values for name, values in asked.items() if values}
        for values in itertools.product(*asked.values()):
            chosen = dict(zip(asked, values, strict=True))
            dm = SpeechDataModule(train_dataset=dataset, batch_size=size, bucket_by_length=options.buckets, **chosen)
            words = " ".join(["ours", *(f"{name}={value}" for name, value in chosen.items())])
            found.append(contest.enter(ours(words, dm)))
        if options.peers:
            peers.append((contest.enter(other.stock_speech(dataset, size)), None))
            peers.append((contest.enter(other.decode_only(dataset, size)), DECODING))
        contest.run()
        for entry, (peer, target) in itertools.product(found, peers):
            versus(entry, peer, **({} if target is None else {"at_least": target}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="*")
    parser.add_argument("--threads", type=int, nargs="*")
    parser.add_argument("--depth", type=int, nargs="*")
    parser.add_argument("--buckets", action="store_true", help="batches of similar lengths")
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
