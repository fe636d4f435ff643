"""What all datamodules share: hooks, loaders, failures, memory.

Runs in the rank. A leaf such as `ImageDataModule` adds its modality and its own options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_dali import environment
from lightning_dali.datamodules.options import Options
from lightning_dali.failures import BadSample
from lightning_dali.fetch import Fetcher, Modality
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.sampling import BatchPlan, BatchTask, EvalPlan, Shard, TrainPlan
from lightning_dali.seeding import batch_seed, seeded

logger = logging.getLogger(__name__)

STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""Which loaders a Lightning stage needs."""

Datasets = Any
"""A dataset, a zero-argument factory of one; for evaluation also a list or dict of them."""


class BaseDataModule(L.LightningDataModule):
    """Hooks and loaders; see `ImageDataModule` for the options."""

    def __init__(
        self,
        *,
        modality: Modality,
        options: Options,
        train_dataset: Datasets = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_transform: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.modality, self.options = modality, options
        self.batch_size = options.batch_size  # a plain attribute: Lightning's BatchSizeFinder sets it
        self._given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, given in self._given.items():
            _check_dataset(stage, given)
        self._train_transform, self._eval_transform = train_transform, eval_transform
        self._collate_fn, self._batch_transform = collate_fn, batch_transform
        self._datasets: dict[str, Any] = {}
        self._loaders: dict[str, list[Loader]] = {}
        self._made_for: dict[str, Any] = {}
        self._bad: list[BadSample] = []

    # -- Lightning's hooks

    def prepare_data(self) -> None:
        """Calls dataset factories once a node, so that what they download is there for all ranks."""
        for given in self._given.values():
            for item in _members(given):
                if _is_factory(item):
                    item()

    def setup(self, stage: str | None = None) -> None:
        """Makes this rank's proxy servers for a stage. Graphs and workers start at the first pass."""
        for name in STAGES.get(str(getattr(stage, "value", stage)), tuple(self._given)):
            self._make(name)

    def train_dataloader(self) -> Any:
        """The training loader."""
        return self._get("train")

    def val_dataloader(self) -> Any:
        """The validation loader, or a list or dict of them as the datasets were given."""
        return self._get("val")

    def test_dataloader(self) -> Any:
        """The test loader, or a list or dict of them."""
        return self._get("test")

    def predict_dataloader(self) -> Any:
        """The prediction loader, or a list or dict of them."""
        return self._get("predict")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The batch is on the device already; only what is not there is moved."""
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def teardown(self, stage: str | None = None) -> None:
        """Ends what the stage started."""
        for name in STAGES.get(str(getattr(stage, "value", stage)), tuple(self._given)):
            for loader in self._loaders.get(name, []):
                loader.stop()
                if self.options.release_memory != "never":
                    loader.release()

    def on_exception(self, exception: BaseException) -> None:
        """Ends everything: Lightning calls this instead of `teardown` when a run fails."""
        self.close()

    # -- for users

    def close(self) -> None:
        """Ends passes, workers and graphs of every stage; the datamodule can be used again."""
        for loaders in self._loaders.values():
            for loader in loaders:
                loader.close()

    def release(self) -> None:
        """Gives graphs and DALI's unused memory back to the device now. Batches in your hands stay valid."""
        for loaders in self._loaders.values():
            for loader in loaders:
                loader.release()

    @property
    def bad_samples(self) -> list[BadSample]:
        """Every bad sample found so far on this rank."""
        return list(self._bad)

    def peek(self, stage: str = "train") -> Any:
        """One batch of a stage, without a trace: the next pass starts where it would have."""
        self._make(stage)
        loader = self._loaders[stage][0]
        state = (loader._epoch, loader._next_epoch, loader._start, loader._current)
        one = iter(loader)
        try:
            return next(one)
        finally:
            one.close()
            loader._epoch, loader._next_epoch, loader._start, loader._current = state

    # -- making loaders

    def _get(self, name: str) -> Any:
        given = self._given[name]
        if given is None:
            return []  # Lightning's way of saying that there is no such stage
        self._make(name)
        loaders = self._loaders[name]
        if isinstance(given, Mapping):
            return dict(zip(given, loaders, strict=True))
        return loaders if isinstance(given, (list, tuple)) else loaders[0]

    def _make(self, name: str) -> None:
        """Makes a stage's loaders, or makes them anew when what they were made for has changed."""
        given = self._given.get(name)
        if given is None:
            return
        shard, device = environment.shard_of(self._trainer_or_none), self._device()
        made_for = (shard, device, self.batch_size)
        if name in self._loaders:
            if self._made_for[name] == made_for:
                return
            for loader in self._loaders[name]:
                loader.close()
        if name not in self._datasets:
            self._datasets[name] = [item() if _is_factory(item) else item for item in _members(given)]
        labels = list(given) if isinstance(given, Mapping) else range(len(self._datasets[name]))
        self._loaders[name] = [
            self._loader(name, dataset, shard, device, label=name if len(labels) == 1 else f"{name}/{label}")
            for label, dataset in zip(labels, self._datasets[name], strict=True)
        ]
        self._made_for[name] = made_for

    @property
    def _trainer_or_none(self) -> Any:
        return getattr(self, "trainer", None)

    def _device(self) -> Device:
        index = environment.device_index(self.options.device, self._trainer_or_none)
        return Device(
            index,
            num_threads=self.options.num_threads or environment.default_num_threads(self._trainer_or_none),
            depth=self.options.depth,
            hw_decoder_load=self.options.hw_decoder_load,
        )

    def _loader(self, name: str, dataset: Any, shard: Shard, device: Device, *, label: str) -> Loader:
        options, train = self.options, name == "train"
        seed = environment.global_seed() if options.seed is None else options.seed
        num_workers = options.num_workers
        if num_workers is None:
            num_workers = environment.default_num_workers(self._trainer_or_none)
        fetcher = Fetcher(
            dataset=dataset,
            modality=self.modality,
            transform=self._train_transform if train else self._eval_transform,
            collate_fn=self._collate_fn,
            seed=seed,
            rank=shard.rank,
            on_bad_sample=options.on_bad_sample,
            ragged=options.ragged,
            with_index=options.with_index,
        )
        loader = Loader(
            fetcher,
            self._plan(name, dataset, shard, seed),
            device,
            num_workers=num_workers,
            prefetch=options.prefetch,
            context=options.multiprocessing_context,
            persistent_workers=options.persistent_workers,
            on_bad=self._note_bad,
            batch_transform=self._seeded_batch_transform(seed) if train and self._batch_transform else None,
            before_start=self._start_workers,
            release_each_pass=options.release_memory == "epoch",
            watchdog_seconds=options.watchdog_seconds,
            name=label,
        )
        loader.trace()
        return loader

    def _plan(self, name: str, dataset: Any, shard: Shard, seed: int) -> BatchPlan:
        size = len(dataset)
        if size == 0:
            raise ValueError(f"the {name} dataset is empty: {dataset!r}. Check its root folder and its split.")
        if name == "train":
            return TrainPlan(
                size,
                self.batch_size,
                shard=shard,
                seed=seed,
                shuffle=self.options.shuffle,
                drop_last=self.options.drop_last,
            )
        return EvalPlan(size, self.batch_size, shard=shard)

    def _start_workers(self) -> None:
        """Starts every stage's persistent workers before the first graph is built: a process forks best without threads."""
        for loaders in self._loaders.values():
            for loader in loaders:
                if loader.persistent:
                    loader.start_workers()

    def _seeded_batch_transform(self, seed: int) -> Callable[[Any, BatchTask], Any]:
        transform = self._batch_transform
        assert transform is not None

        def apply(batch: Any, task: BatchTask) -> Any:
            with seeded(batch_seed(seed, task.epoch, task.step), restore=True):
                return transform(*batch) if isinstance(batch, tuple) else transform(batch)

        return apply

    def _note_bad(self, sample: BadSample) -> None:
        self._bad.append(sample)
        logger.warning(
            "bad sample: dataset index %d, path %s, rank %d, epoch %d: %s",
            sample.dataset_index, sample.path, sample.rank, sample.epoch, sample.reason,
        )  # fmt: skip
        limit = self.options.max_bad_samples
        if limit is not None and len(self._bad) > limit:
            raise RuntimeError(
                f"{len(self._bad)} bad samples on rank {sample.rank}, more than max_bad_samples={limit}; the last one: "
                f"{sample}. See datamodule.bad_samples for all of them; repair the dataset or raise the limit."
            )


def _members(given: Datasets) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _is_factory(item: Any) -> bool:
    return callable(item) and not hasattr(item, "__getitem__") and not hasattr(item, "__iter__")


def _check_dataset(stage: str, given: Datasets) -> None:
    if stage == "train" and isinstance(given, (Mapping, list, tuple)) and not isinstance(given, Dataset):
        raise TypeError(
            f"train_dataset is a {type(given).__name__}: it must be one dataset (or a zero-argument function that makes it). "
            "Join several with torch.utils.data.ConcatDataset."
        )
    for item in _members(given):
        if isinstance(item, IterableDataset):
            raise TypeError(
                f"{stage}_dataset is an IterableDataset ({type(item).__name__}): it cannot be sharded and resumed by index. "
                "Pass a dataset with __getitem__ and __len__."
            )
        if not _is_factory(item) and not (hasattr(item, "__getitem__") and hasattr(item, "__len__")):
            raise TypeError(
                f"{stage}_dataset is {item!r}: expected a dataset with __getitem__ and __len__, or a zero-argument function "
                "that makes one."
            )
