"""What all datamodules share: hooks, loaders, failures, memory.

Runs in the rank. A leaf such as `ImageDataModule` adds its modality and its own options.
"""

# Over 300 lines: every hook of Lightning's and every public name of the datamodules is one short method here.

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lightning_dali import environment
from lightning_dali.datamodules.datasets import Datasets, check_dataset, describe, is_factory, members
from lightning_dali.datamodules.host import Host, NoData
from lightning_dali.datamodules.loops import SeenIndices, align_progress, restart_evaluation
from lightning_dali.datamodules.options import Options
from lightning_dali.datamodules.plain import check_dataset_transforms, check_transform, plain
from lightning_dali.datamodules.streamed import plan_of_stream, size_of
from lightning_dali.explain import Explanation, explain
from lightning_dali.failures import BadSample, BadSamples
from lightning_dali.fetch import Fetcher, Modality
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.memory import Growth, MemoryReport, give_back, measure
from lightning_dali.sampling import BatchTask, EvalPlan, Plan, Shard, TrainPlan, user_plan
from lightning_dali.seeding import batch_seed, seeded
from lightning_dali.streams import StreamFetcher, is_stream

logger = logging.getLogger(__name__)

STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
"""Which loaders a Lightning stage needs."""


class BaseDataModule(Host):
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
        sampler: Any = None,
        batch_sampler: Any = None,
    ) -> None:
        super().__init__()
        self.modality, self.options = modality, options
        self.batch_size = options.batch_size  # a plain attribute: Lightning's BatchSizeFinder sets it
        given_by_stage = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        self._given = {stage: plain(f"{stage}_dataset", given) for stage, given in given_by_stage.items()}
        for stage, given in self._given.items():
            check_dataset(stage, given)
            for item in members(given):
                check_dataset_transforms(f"{stage}_dataset", item)
            hook = f"{stage}_dataloader"
            if given is None and getattr(type(self), hook) is getattr(BaseDataModule, hook):
                self.__dict__[hook] = NoData(hook)
        if sampler is not None and batch_sampler is not None:
            raise ValueError(
                "sampler and batch_sampler are both given: a batch sampler decides the order too; pass one."
            )
        self._sampler, self._batch_sampler = sampler, batch_sampler
        self._train_transform = check_transform("train_transform", plain("train_transform", train_transform))
        self._eval_transform = check_transform("eval_transform", plain("eval_transform", eval_transform))
        self._collate_fn = check_transform("collate_fn", plain("collate_fn", collate_fn))
        self._batch_transform = check_transform("batch_transform", plain("batch_transform", batch_transform))
        self._datasets: dict[str, Any] = {}
        self._loaders: dict[str, list[Loader]] = {}
        self._made_for: dict[str, Any] = {}
        self._resume: dict[str, Any] | None = None
        self._bad = BadSamples(limit=options.max_bad_samples, file=options.bad_samples_file)
        self._growth = Growth()

    # -- Lightning's hooks

    def prepare_data(self) -> None:
        """Calls dataset factories once a node, so that what they download is there for all ranks."""
        for given in self._given.values():
            for item in members(given):
                if is_factory(item):
                    self._call(item)

    def setup(self, stage: str | None = None) -> None:
        """Makes this rank's proxy servers for a stage. Graphs and workers start at the first pass.

        Raises:
            ValueError: The stage has no dataset.
        """
        needed = STAGES.get(str(getattr(stage, "value", stage)), tuple(self._given))
        if len(needed) == 1 and self._given[needed[0]] is None and f"{needed[0]}_dataloader" in self.__dict__:
            there = ", ".join(name for name, given in self._given.items() if given is not None) or "none"
            raise ValueError(
                f"the trainer is to run {stage}, but the datamodule has no {needed[0]}_dataset (it has: {there}). Pass one."
            )
        for name in needed:
            self._make(name)

    def train_dataloader(self) -> Any:
        """The training loader, where the checkpoint says that it stood."""
        loader = self._get("train")
        if self._resume is not None and isinstance(loader, Loader):
            state, self._resume = self._resume, None
            loader.load_state_dict(state)
        return loader

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
        self._bad.report()
        if self.options.release_memory != "never":
            self._give_back()

    def state_dict(self) -> dict[str, Any]:
        """Where the training loader stands; Lightning puts it into checkpoints.

        The fit loop keeps it too, but drops it when the loader was asked for before the loop was restored, as
        `trainer.estimated_stepping_batches` does (Lightning #20550).
        """
        if self._resume is not None:
            return {"train": self._resume}
        loaders = self._loaders.get("train")
        return {"train": loaders[0].state_dict()} if loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the position for the next `train_dataloader()`; only fitting goes on where it stopped."""
        trainer = self._trainer_or_none
        if trainer is None or trainer.state.fn == "fit":
            self._resume = state_dict.get("train")

    def on_exception(self, exception: BaseException) -> None:
        """Ends everything: Lightning calls this instead of `teardown` when a run fails."""
        self._bad.report()
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
        self._give_back()

    @property
    def bad_samples(self) -> list[BadSample]:
        """Every bad sample found so far on this rank."""
        return list(self._bad.met)

    def peek(self, stage: str = "train") -> Any:
        """One batch of a stage, without a trace: the next pass starts where it would have."""
        self._make(stage)
        return self._loaders[stage][0].peek()

    def explain(self, stage: str = "train") -> Explanation:
        """What runs where, what was materialised and why, sizes and memory in flight; print it. Starts no worker."""
        return explain(self.stage_loaders(stage)[0])

    def memory_report(self) -> MemoryReport:
        """Who holds memory on this rank now. Called once an epoch (`ThroughputMonitor` does) it warns of growth."""
        slabs = sum(loader.slab_bytes for loaders in self._loaders.values() for loader in loaders)
        rank = environment.shard_of(self._trainer_or_none).rank
        report = measure(rank=rank, device_index=self._device().index, host_slabs=slabs)
        self._growth.note(report)
        return report

    def stage_loaders(self, stage: str = "train") -> list[Loader]:
        """The loaders of a stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``; made if they are not there.

        Raises:
            ValueError: The stage has no dataset.
        """
        if self._given.get(stage) is None:
            there = ", ".join(repr(name) for name, given in self._given.items() if given is not None) or "none"
            raise ValueError(f"stage is {stage!r}: the datamodule has a dataset for {there}. Pass {stage}_dataset=...")
        self._make(stage)
        return self._loaders[stage]

    def __str__(self) -> str:
        """The datasets. Lightning's own would make and iterate every loader that is not torch's."""
        return "\n".join(
            [type(self).__name__, *(f"  {name}: {describe(given)}" for name, given in self._given.items())]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what lives: a copy, or a rank started by `ddp_spawn`, makes its own loaders."""
        return {**self.__dict__, "_loaders": {}, "_made_for": {}}

    def _give_back(self) -> None:
        used = {loader.server.device.index for loaders in self._loaders.values() for loader in loaders}
        give_back(next(iter(used - {None}), None))

    # -- making loaders

    def _call(self, factory: Callable[[], Any]) -> Any:
        """Makes a dataset."""
        return factory()

    def _get(self, name: str) -> Any:
        given = self._given[name]
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
        trainer = self._trainer_or_none
        shard, device = environment.shard_of(trainer), self._device()
        if name not in self._datasets:
            self._datasets[name] = [self._call(item) if is_factory(item) else item for item in members(given)]
        workers = self._num_workers(device)
        sizes = [size_of(one, batch_size=self.batch_size, num_workers=workers) for one in self._datasets[name]]
        sampling = (environment.overfits(trainer), environment.deals_samplers(trainer)) if name == "train" else ()
        limit = environment.batch_limit(trainer, name) if any(map(is_stream, self._datasets[name])) else None
        made_for = (shard, device, self.batch_size, sizes, sampling, limit)
        if name in self._loaders:
            if self._made_for[name] == made_for:
                return
            for loader in self._loaders[name]:
                loader.close()
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
        load = self.options.hw_decoder_load
        return Device(
            index,
            num_threads=self.options.num_threads or self._default_num_threads(index),
            depth=self.options.depth,
            hw_decoder_load=environment.default_hw_decoder_load() if load is None else load,
            channels_last=self.options.channels_last,
        )

    def _num_workers(self, device: Device) -> int:
        if self.options.num_workers is not None:
            return self.options.num_workers
        return self._default_num_workers(device)

    def _default_num_workers(self, device: Device) -> int:
        return environment.default_num_workers(self._trainer_or_none, gpu=device.index is not None)

    def _default_num_threads(self, device_index: int | None) -> int:
        return environment.default_num_threads(self._trainer_or_none)

    def _loader(self, name: str, dataset: Any, shard: Shard, device: Device, *, label: str) -> Loader:
        options, train = self.options, name == "train"
        seed = environment.global_seed() if options.seed is None else options.seed
        stream = is_stream(dataset)
        loader = Loader(
            self._fetcher(name, dataset, shard, seed),
            self._plan(name, dataset, shard, seed) if not stream else self._stream_plan(label, dataset, shard, device),
            device,
            num_workers=self._num_workers(device),
            prefetch=options.prefetch or environment.default_prefetch(),
            context=options.multiprocessing_context,
            persistent_workers=options.persistent_workers,
            on_bad=partial(self._bad.note, dataset=label),
            batch_transform=self._seeded_batch_transform(seed) if train and self._batch_transform else None,
            before_start=self._start_workers,
            on_epoch=self._epoch_told,
            release_each_pass=options.release_memory == "epoch",
            watchdog_seconds=options.watchdog_seconds,
            name=label,
        )
        if name == "predict":
            loader.batch_sampler = SeenIndices(loader)
        if not stream:  # whose beginning may be far away, or open what workers must not inherit
            loader.trace()
        return loader

    def _fetcher(self, name: str, dataset: Any, shard: Shard, seed: int) -> Fetcher:
        options = self.options
        common: dict[str, Any] = {
            "dataset": dataset,
            "modality": self.modality,
            "transform": self._train_transform if name == "train" else self._eval_transform,
            "collate_fn": self._collate_fn,
            "seed": seed,
            "rank": shard.rank,
            "on_bad_sample": options.on_bad_sample,
            "ragged": options.ragged,
            "with_index": options.with_index,
        }
        if is_stream(dataset):
            return StreamFetcher(**common, world_size=shard.world_size)
        return Fetcher(**common)

    def _stream_plan(self, label: str, dataset: Any, shard: Shard, device: Device) -> Plan:
        return plan_of_stream(
            dataset,
            self._trainer_or_none,
            name=label,
            batch_size=self.batch_size,
            shard=shard,
            num_workers=self._num_workers(device),
            drop_last=self.options.drop_last,
            own_order=self._orders,
        )

    @property
    def _orders(self) -> bool:
        """Whether the user told in which order training takes the samples."""
        return self._sampler is not None or self._batch_sampler is not None

    def _plan(self, name: str, dataset: Any, shard: Shard, seed: int) -> Plan:
        size = len(dataset)
        if size == 0:
            raise ValueError(f"the {name} dataset is empty: {dataset!r}. Check its root folder and its split.")
        if name != "train":
            return EvalPlan(size, self.batch_size, shard=shard)
        options, trainer = self.options, self._trainer_or_none
        overfit = environment.overfits(trainer)
        if not overfit and (self._sampler is not None or self._batch_sampler is not None):
            return user_plan(
                dataset,
                sampler=self._sampler,
                batch_sampler=self._batch_sampler,
                batch_size=self.batch_size,
                shard=shard,
                seed=seed,
                drop_last=options.drop_last,
                deal=environment.deals_samplers(trainer),
            )
        shuffle = options.shuffle and not overfit
        return TrainPlan(size, self.batch_size, shard=shard, seed=seed, shuffle=shuffle, drop_last=options.drop_last)

    def _epoch_told(self, loader: Loader) -> None:
        """Lightning says which epoch comes, just before a loop asks for batches."""
        trainer = self._trainer_or_none
        if trainer is None or trainer.state.fn != "fit":
            return
        if loader.name == "train":
            align_progress(trainer, loader)
        else:
            restart_evaluation(trainer)

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
