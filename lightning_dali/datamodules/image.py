"""`ImageDataModule`: any image dataset with torchvision transforms, decoded and augmented by DALI.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_dali.datamodules.arguments import sort_arguments
from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.datasets import Datasets
from lightning_dali.modalities import ImageModality


class ImageDataModule(BaseDataModule):
    """Trains on the GPU's decoders from an unmodified image dataset.

    Batches have the structure of the dataset's samples. An image field is what the transform would have produced, batched:
    `(B, C, H, W)` on the rank's device. Every other field is collated as PyTorch does and moved to the device.

    The options from `batch_size` on are those of every datamodule, and are explained here only.

    Args:
        train_dataset: A map-style dataset, an `IterableDataset` that shards itself (docs/sources.md), or a zero-argument
            function that makes one (called in `prepare_data`, where it may download, and in `setup`).
        val_dataset: The same, or a list or dict of them.
        test_dataset: The same.
        predict_dataset: The same.
        train_transform: For datasets that have no transform of their own: applied to the first field that is an image
            (a path or encoded bytes, opened in RGB; an array `(H, W, C)`; a PIL image).
        eval_transform: The same for validation, test and prediction.
        batch_size: Samples of one rank in one step.
        num_workers: Processes that fetch; None: of this rank's cores three quarters, 12 at most
            (without a GPU half, from 2 to 8); 0: in the training process.
        num_threads: DALI's CPU threads; None: a quarter of this rank's cores, from 2 to 8.
        shuffle: Whether training goes through a new permutation each epoch. An `IterableDataset` has its own order.
        drop_last: Whether training drops the samples that do not fill a global batch.
        sampler: The order of training instead of `shuffle`: a sampler over the whole dataset, or a function of the
            dataset that makes one. It is dealt to the ranks, unless it shards itself (`DistributedSampler`).
        batch_sampler: The batches of training instead of `batch_size` and `sampler`, in the same two forms.
        seed: Of every order and draw; None: that of `lightning.seed_everything`, else 0.
        on_bad_sample: ``"raise"``, ``"replace"`` (by another sample of the batch) or ``"drop"`` (a shorter batch).
        max_bad_samples: More than so many different ones on a rank end the run.
        bad_samples_file: File to which each bad sample is added, as a line of JSON, when it is met; None: none. Ranks above
            0 put ``.rank1`` and so on before its ending.
        batch_transform: Such as `v2.MixUp`, on the device, in training.
        collate_fn: Instead of the default; it sees stand-ins in the places of images and may stack or list them, such as
            ``lambda batch: tuple(zip(*batch))``. By default images are stacked and so is the rest, as PyTorch does, except
            that detection targets are lists with an entry a sample: boxes, keypoints, what has one row a box.
        release_memory: When graphs and DALI's unused memory go back: ``"never"``, ``"stage"`` (at its end), ``"epoch"``.
        ragged: ``"error"``: images of one batch must have one size; ``"list"``: otherwise a list is delivered.
        with_index: Whether the batch carries the dataset indices of its rows; of an `IterableDataset`, running numbers.
        channels_last: Whether image batches lie in memory as `(B, H, W, C)`, for models that are `channels_last`; their
            shape stays `(B, C, H, W)`.
        device: ``"auto"`` (the trainer's), ``"cpu"``, ``"cuda:0"``, an int.
        prefetch: Finished batches that wait on the device for the model; None: 2.
        multiprocessing_context: Start method of the workers; None: the platform's.
        persistent_workers: Whether workers live from one epoch to the next.
        depth: Batches inside DALI at a time.
        hw_decoder_load: Share of JPEGs for the GPU's hardware decoder; None: all, where there is one.
        watchdog_seconds: After so long without a batch the log says what is waited for.

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
        batch_size: int = 64,
        num_workers: int | None = None,
        num_threads: int | None = 4,
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
        ragged: str = "error",
        with_index: bool = False,
        channels_last: bool = False,
        device: Any = "auto",
        prefetch: int | None = 2,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        depth: int = 2,
        hw_decoder_load: float | None = 1.0,
        watchdog_seconds: float = 60.0,
    ) -> None:
        super().__init__(modality=ImageModality(), **sort_arguments(locals()))
