"""`SpeechDataModule`: any audio dataset with torchaudio's transforms, decoded by DALI, computed on the rank's device.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dali import environment
from lightning_dali.datamodules.arguments import explained_by, sort_arguments
from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.datasets import Datasets
from lightning_dali.datamodules.image import ImageDataModule
from lightning_dali.graph.spec import Device
from lightning_dali.modalities.audio import AudioModality
from lightning_dali.modalities.durations import dataset_durations
from lightning_dali.sampling import DurationPlan, Plan, Shard


@explained_by(ImageDataModule)
class SpeechDataModule(BaseDataModule):
    """Trains on features made on the GPU from an unmodified audio dataset.

    Batches have the structure of the dataset's samples. An audio field is always a `Padded(data, lengths)`: what the
    transform would have produced, `(B, C, S)`, `(B, C, F, T)` and so on, zero beyond each row's length, on the rank's device.
    Every other field is collated as PyTorch does and moved to the device. The audio field is what the dataset loads
    (`torchaudio.load`, `soundfile.read`, `lightning_dali.audio.load_audio`), else the first leaf of a sample that is audio: a
    waveform `(C, S)` or `(S,)`, a path, encoded bytes, or Hugging Face's `{"bytes": ..., "path": ...}`.

    Options that are not explained here are those of `ImageDataModule`, and mean the same.

    Args:
        train_transform: For datasets that have no transform of their own, as torchaudio's: applied to the audio field.
        eval_transform: The same for validation, test and prediction.
        sample_rate: In Hz; audio of another rate is resampled when it is loaded, with torchaudio's default kernel, and the
            rate that comes with it is this one. None keeps each file's.
        max_seconds: Most seconds of audio in a batch, padding included; batches then differ in size and are made of samples
            of similar length. `batch_size` stays the most samples of one. Lengths are those of the files.
        bucket_by_length: Whether batches are made of samples of similar length; implied by `max_seconds`. Prediction keeps
            the dataset's order.
        length_cache: Where lengths of files are kept; None: in the user's cache folder.
        num_workers: Processes that fetch; None: three eighths of this rank's cores, 8 at most; 0: in the training
            process.
        num_threads: DALI's threads, which decode audio on the CPU (FLAC on a GPU needs none); None: three quarters of this
            rank's cores, 24 at most.
        sampler: See `ImageDataModule`; not with length buckets.
        batch_sampler: See `ImageDataModule`; not with length buckets.

    Raises:
        ValueError: An option has a value that is not allowed, or a dataset is empty.
        TypeError: An option has the wrong type.
    """

    def __init__(
        self,
        *,
        train_dataset: Datasets = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        sample_rate: int | None = None,
        max_seconds: float | None = None,
        bucket_by_length: bool = False,
        length_cache: str | None = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        num_threads: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
        sampler: Any = None,
        batch_sampler: Any = None,
        seed: int | None = None,
        on_bad_sample: str = "raise",
        max_bad_samples: int | None = None,
        bad_samples_file: Any = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        release_memory: str = "stage",
        with_index: bool = False,
        device: Any = "auto",
        prefetch: int | None = 2,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        depth: int = 4,
        watchdog_seconds: float = 60.0,
    ) -> None:
        shared = sort_arguments(locals(), own=("sample_rate", "max_seconds", "bucket_by_length", "length_cache"))
        check_positive("sample_rate", sample_rate, int)
        check_positive("max_seconds", max_seconds, (int, float))
        self._max_seconds, self._length_cache = max_seconds, length_cache
        self._by_length = bool(bucket_by_length) or max_seconds is not None
        if self._by_length and (sampler is not None or batch_sampler is not None):
            raise ValueError(
                "max_seconds and bucket_by_length decide which samples make a batch, so there can be no sampler or "
                "batch_sampler beside them: drop the one or the other."
            )
        super().__init__(modality=AudioModality(sample_rate), **shared)

    def _default_num_workers(self, device: Device) -> int:
        return environment.default_decoding(self._trainer_or_none)[0]

    def _default_num_threads(self, device_index: int | None) -> int:
        return environment.default_decoding(self._trainer_or_none)[1]

    @property
    def _orders(self) -> bool:
        return self._by_length or super()._orders

    def _plan(self, name: str, dataset: Any, shard: Shard, seed: int) -> Plan:
        train = name == "train"
        overfit = train and environment.overfits(self._trainer_or_none)
        if not self._by_length or name == "predict" or overfit or len(dataset) == 0:
            return super()._plan(name, dataset, shard, seed)
        return DurationPlan(
            dataset_durations(dataset, cache=self._length_cache).tolist(),
            self.batch_size,
            max_seconds=self._max_seconds,
            shard=shard,
            seed=seed,
            shuffle=train and self.options.shuffle,
            drop_last=train and self.options.drop_last,
        )


def check_positive(name: str, value: Any, kind: Any) -> None:
    """Refuses what is neither None nor a number above zero."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected a number, or None for none.")
    if not value > 0:
        raise ValueError(f"{name} is {value}: it must be more than 0; None sets none.")
