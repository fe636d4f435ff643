"""What one would pick instead of this library, for the same work on the same files: a function a contender.

Batches are on the device where there is one, else everything is on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from contest import Batches, Contender
from lightning.fabric.utilities import move_data_to_device
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy
from nvidia.dali.plugin.pytorch.experimental import proxy as stock
from rates import endless
from torch.utils.data import DataLoader, Dataset
from work import (
    FRAMES,
    HOP_LENGTH,
    MEAN,
    N_FFT,
    N_MELS,
    SAMPLE_RATE,
    SIZE,
    STD,
    STRIDE,
    WIN_LENGTH,
    Utterances,
    Videos,
    clip_start,
    cores,
    image_folder,
    images_in,
)

from lightning_dali import Padded

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
MIXED, DEVICE_ID = ("mixed", 0) if GPU else ("cpu", None)
PROXY_WORKERS, SIMPLE_DECODER_THREADS = 4, 12
"""The fastest of those that were tried on 16 cores."""


def dataloader(name: str, dataset: Dataset[Any], batch_size: int, **options: Any) -> Contender:
    """PyTorch's own: a worker per core, pinned memory, batches moved to the device."""

    def batches() -> Batches:
        loader = DataLoader(
            dataset, batch_size, shuffle=True, num_workers=cores(), persistent_workers=True, drop_last=True,
            pin_memory=GPU, **options,
        )  # fmt: skip
        for batch in endless(loader):
            yield move_data_to_device(batch, DEVICE)

    return Contender(f"{name}, {cores()} workers", batches, batch_size)


def stock_proxy(
    name: str, pipeline: Any, dataset: Callable[[Any], Dataset[Any]], batch_size: int, **options: Any
) -> Contender:
    """NVIDIA's DALI Proxy. `pipeline` is what `@pipeline_def` returns, `dataset` a function of the proxy."""
    workers = max(1, min(PROXY_WORKERS, cores() // 2))

    def batches() -> Batches:
        made = pipeline(
            batch_size=batch_size, num_threads=max(2, cores() - workers), device_id=DEVICE_ID, exec_dynamic=True, **options
        )  # fmt: skip
        with stock.DALIServer(made) as server:
            loader = stock.DataLoader(
                server, dataset(server.proxy), batch_size=batch_size, num_workers=workers, drop_last=True, shuffle=True
            )
            yield from endless(loader)

    return Contender(f"{name}, {workers} workers", batches, batch_size)


def as_bytes(path: str) -> Any:
    """A path as DALI takes it: its characters."""
    return np.frombuffer(path.encode(), np.int8)


def file_bytes(path: str) -> Any:
    """A file's contents."""
    return np.fromfile(path, np.uint8)


# -- images ----------------------------------------------------------------------------------------------------------


def decode_and_augment(encoded: Any, **options: Any) -> Any:
    """The ImageNet training recipe in DALI's operators, with draws of its own."""
    images = fn.decoders.image_random_crop(encoded, device=MIXED, output_type=types.RGB, **options)
    images = fn.resize(images, size=[SIZE, SIZE], antialias=True)
    return fn.crop_mirror_normalize(
        images, dtype=types.FLOAT, output_layout="CHW", mirror=fn.random.coin_flip(),
        mean=[255 * mean for mean in MEAN], std=[255 * std for std in STD],
    )  # fmt: skip


@pipeline_def
def images_from_paths() -> Any:
    """Paths to augmented images."""
    return decode_and_augment(fn.io.file.read(fn.external_source(name="path", no_copy=True)))


def file_reader(folder: str | Path, batch_size: int, *, share: float | None) -> Contender:
    """DALI alone, no Python in it: its file reader. `share` is the hardware decoder's; None: DALI's default, 0.65."""

    @pipeline_def(batch_size=batch_size, num_threads=max(2, cores() - 1), device_id=DEVICE_ID, exec_dynamic=True)
    def read() -> Any:
        encoded, labels = fn.readers.file(file_root=str(images_in(folder)), random_shuffle=True, name="reader")
        return decode_and_augment(encoded, **({} if share is None else {"hw_decoder_load": share})), labels

    def batches() -> Batches:
        loader = DALIClassificationIterator(
            read(prefetch_queue_depth=2), reader_name="reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
        )
        yield from endless(loader)

    words = "default" if share is None else f"{share:g}"
    return Contender(f"DALI file reader, hardware share {words}", batches, batch_size)


def stock_images(folder: str | Path, batch_size: int) -> Contender:
    """The stock proxy with paths, its fastest form."""

    def dataset(proxy: Any) -> Any:
        return image_folder(folder, batch_size, transform=proxy, loader=as_bytes)

    return stock_proxy("stock proxy, paths", images_from_paths, dataset, batch_size, prefetch_queue_depth=4)


# -- video -----------------------------------------------------------------------------------------------------------


class Decoded(Videos):
    """What a DataLoader's user writes: PyAV from the file's start, swscale's resizing."""

    def __getitem__(self, index: int) -> tuple[Any, int]:  # type: ignore[override]  # frames instead of the path
        path, start = self.paths[index % len(self.paths)], clip_start(index)
        wanted, frames = set(range(start, start + FRAMES * STRIDE, STRIDE)), []
        with av.open(path) as container:
            container.streams.video[0].thread_count = 1
            for number, frame in enumerate(container.decode(video=0)):
                if number in wanted:
                    frames.append(torch.from_numpy(frame.reformat(SIZE, SIZE, format="rgb24").to_ndarray()))
                if len(frames) == FRAMES:
                    break
        return torch.stack(frames), index


def pyav(paths: Sequence[str]) -> Contender:
    """PyAV in a DataLoader. A clip is a batch: a worker takes seconds for the largest."""
    return dataloader("PyAV", Decoded(paths), 1)


def simple_decoder(paths: Sequence[str], batch_size: int) -> Contender:
    """PyNvVideoCodec's high-level decoder on whole files, one a thread, which is kept from clip to clip."""
    kept = threading.local()

    def clip(index: int) -> torch.Tensor:
        import PyNvVideoCodec as nvc

        path, start = paths[index % len(paths)], clip_start(index)
        if hasattr(kept, "decoder"):
            kept.decoder.reconfigure_decoder(path)
        else:
            kept.decoder = nvc.SimpleDecoder(
                path, gpu_id=0, use_device_memory=True, output_color_type=nvc.OutputColorType.RGB
            )
        frames = kept.decoder.get_batch_frames_by_index([*range(start, start + FRAMES * STRIDE, STRIDE)])
        pixels = torch.stack([torch.from_dlpack(frame) for frame in frames]).permute(0, 3, 1, 2)
        return torch.nn.functional.interpolate(pixels.float(), (SIZE, SIZE), mode="bilinear")

    def batches() -> Batches:
        with ThreadPoolExecutor(SIMPLE_DECODER_THREADS) as pool:
            numbers = count()
            ahead = [pool.submit(clip, next(numbers)) for _ in range(2 * batch_size)]
            try:
                while True:
                    now, ahead = ahead[:batch_size], ahead[batch_size:]
                    ahead += [pool.submit(clip, next(numbers)) for _ in range(batch_size)]
                    yield torch.stack([one.result() for one in now])
            finally:
                for one in ahead:
                    one.cancel()

    return Contender(f"PyNvVideoCodec SimpleDecoder, {SIMPLE_DECODER_THREADS} threads", batches, batch_size)


class Requested(Videos):
    """The same clips, asked of a proxy."""

    def __init__(self, paths: Sequence[str], proxy: Any) -> None:
        super().__init__(paths)
        self.proxy = proxy

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path = self.paths[index % len(self.paths)]
        return self.proxy(path=as_bytes(path), start=np.array(clip_start(index), np.int32)), index


@pipeline_def
def clips_from_paths() -> Any:
    """Paths and first frames to clips."""
    files = fn.io.file.read(fn.external_source(name="path", no_copy=True))
    start = fn.external_source(name="start", no_copy=True)
    clips = fn.decoders.video(
        files, device=MIXED, start_frame=start, sequence_length=FRAMES, stride=STRIDE, pad_mode="edge"
    )
    return fn.resize(clips, size=[SIZE, SIZE])


def stock_video(paths: Sequence[str], batch_size: int) -> Contender:
    """The stock proxy and DALI's video decoder."""
    return stock_proxy(
        "stock proxy, decoders.video", clips_from_paths, lambda proxy: Requested(paths, proxy), batch_size
    )


# -- speech ----------------------------------------------------------------------------------------------------------


def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[Padded, torch.Tensor]:
    """What a DataLoader's user writes to collate."""
    return Padded.stack([sample[0] for sample in samples]), torch.tensor([sample[1] for sample in samples])


def torchaudio_speech(dataset: Utterances, batch_size: int) -> Contender:
    """soundfile and torchaudio in a DataLoader."""
    return dataloader("soundfile + torchaudio", dataset, batch_size, collate_fn=padded)


class RequestedSpeech(Dataset[Any]):
    """The same files, asked of a proxy."""

    def __init__(self, of: Utterances, proxy: Any) -> None:
        self.of, self.proxy = of, proxy

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int) -> Any:
        features, length = self.proxy(as_bytes(self.of.paths[index % len(self.of.paths)]))
        return features, length, index


@pipeline_def
def mels_from_paths() -> Any:
    """Paths to log-mels without SpecAugment, which the stock proxy's user would add after it."""
    wave, _ = fn.decoders.audio(
        fn.io.file.read(fn.external_source(name="path", no_copy=True)), dtype=types.FLOAT, downmix=True
    )
    length = wave.shape()
    spectrogram = fn.spectrogram(
        wave.gpu() if GPU else wave, nfft=N_FFT, window_length=WIN_LENGTH, window_step=HOP_LENGTH
    )
    mel = fn.mel_filter_bank(spectrogram, sample_rate=SAMPLE_RATE, nfilter=N_MELS)
    mel = fn.normalize(fn.to_decibels(mel, multiplier=np.log(10), reference=1.0, cutoff_db=-80), axes=[1])
    return fn.pad(mel, axes=[1]), length


def stock_speech(dataset: Utterances, batch_size: int) -> Contender:
    """The stock proxy and DALI's features."""
    return stock_proxy(
        "stock proxy, features", mels_from_paths, lambda proxy: RequestedSpeech(dataset, proxy), batch_size
    )


def decode_only(dataset: Utterances, batch_size: int) -> Contender:
    """DALI decoding the files on every core and nothing else: what no loader with its decoder can beat."""

    @pipeline_def(batch_size=batch_size, num_threads=cores(), device_id=DEVICE_ID, exec_dynamic=True)
    def decode() -> Any:
        encoded, _ = fn.readers.file(files=dataset.paths, random_shuffle=True)
        return fn.decoders.audio(encoded, dtype=types.FLOAT, downmix=True)[0]

    def batches() -> Batches:
        pipeline = decode()
        pipeline.build()
        yield from runs(pipeline)

    return Contender("decoding alone", batches, batch_size)


def runs(pipeline: Any) -> Iterator[Any]:
    """Outputs, for ever."""
    while True:
        yield pipeline.run()
