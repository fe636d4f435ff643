"""`DALIDataModule`: the user's own DALI pipelines, fed by a dataset that calls their proxies.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from lightning_dali import environment
from lightning_dali.datamodules.arguments import explained_by, sort_arguments
from lightning_dali.datamodules.base import BaseDataModule
from lightning_dali.datamodules.datasets import Datasets, check_dataset
from lightning_dali.datamodules.image import ImageDataModule
from lightning_dali.datamodules.plain import plain
from lightning_dali.fetch import Fetcher
from lightning_dali.graph.custom import PipelineDefinition, PipelineEntry
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.modalities import CustomModality
from lightning_dali.proxies.custom import Proxies, ProxyInputError
from lightning_dali.sampling import Shard
from lightning_dali.streams import StreamFetcher

OUTPUT_DEVICES = ("auto", "cpu")
PIPELINES = ("train_pipeline", "val_pipeline", "test_pipeline", "predict_pipeline")

Pipelines = Any
"""A `@pipeline_def` function or a `Pipeline`; or a mapping of names to them."""


@explained_by(ImageDataModule)
class DALIDataModule(BaseDataModule):
    """Trains on any DALI pipeline, fed from a dataset in worker processes.

    A pipeline has named inputs, `fn.external_source(name="images")`. A dataset is given as a function of the proxy:
    ``lambda proxy: ImageFolder(root, transform=proxy, loader=read_bytes)``. The dataset calls `proxy(images=...)` (or
    `proxy(value)` where there is one input) wherever and as often as it likes; what that returns stands for the pipeline's
    output in the sample, in any nesting, and is a tensor `(B, ...)` on the rank's device in the batch. A pipeline with
    several outputs gives a tuple of them. Outputs that differ in size come as a list. Everything else is collated as
    PyTorch does.

    Random operators of a pipeline are seeded by the run's seed, the rank and the epoch: the same run draws the same
    numbers, but, unlike with `ImageDataModule`, a sample's augmentation depends on the number of ranks, the batch size and
    the point of resumption (docs/custom-pipelines.md).

    Options that are not explained here are those of `ImageDataModule`, and mean the same.

    Args:
        train_dataset: A function of the proxy that makes a dataset, as in `ImageDataModule`. With several pipelines it gets all their
            proxies: `proxies.image(...)` or `proxies["image"](...)`.
        train_pipeline: What `@pipeline_def` returns (it is called with batch size, device and threads), or a
            `nvidia.dali.Pipeline`, which is copied; or a mapping of names to these, for several.
        val_dataset: The same, or a list or dict of such functions.
        val_pipeline: The same as `train_pipeline`; needed for `val_dataset`.
        test_dataset: As `val_dataset`.
        test_pipeline: None: `val_pipeline`.
        predict_dataset: As `val_dataset`.
        predict_pipeline: None: `val_pipeline`.
        collate_fn: Instead of the default; it sees stand-ins and may stack (`torch.stack`, `default_collate`) or list them.
        ragged: ``"list"``: outputs of different sizes come as a list; ``"error"``: they are an error.
        output_device: Where batches are delivered: ``"auto"`` (where pipelines run) or ``"cpu"``.

    Raises:
        ValueError: An option has a value that is not allowed, or a dataset lacks its pipeline.
        TypeError: A dataset is no function of the proxy, or a pipeline is none.
        ProxyInputError: At setup: the dataset calls a proxy with other names than its pipeline has inputs.
    """

    def __init__(
        self,
        *,
        train_dataset: Datasets = None,
        train_pipeline: Pipelines = None,
        val_dataset: Datasets = None,
        val_pipeline: Pipelines = None,
        test_dataset: Datasets = None,
        test_pipeline: Pipelines = None,
        predict_dataset: Datasets = None,
        predict_pipeline: Pipelines = None,
        batch_size: int = 64,
        num_workers: int | None = None,
        num_threads: int | None = 4,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        on_bad_sample: str = "raise",
        max_bad_samples: int | None = None,
        bad_samples_file: Any = None,
        batch_transform: Callable[..., Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        release_memory: str = "stage",
        ragged: str = "list",
        with_index: bool = False,
        device: Any = "auto",
        output_device: str = "auto",
        prefetch: int | None = 2,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        depth: int = 2,
        watchdog_seconds: float = 60.0,
    ) -> None:
        shared = sort_arguments(locals(), own=(*PIPELINES, "output_device"))
        if output_device not in OUTPUT_DEVICES:
            raise ValueError(f"output_device is {output_device!r}: allowed are {', '.join(map(repr, OUTPUT_DEVICES))}.")
        self._output_device = output_device
        self._definitions = _definitions(
            {"train": train_pipeline, "val": val_pipeline, "test": test_pipeline, "predict": predict_pipeline}
        )
        for stage in self._definitions:
            shared[f"{stage}_dataset"] = self._of_proxy(stage, shared[f"{stage}_dataset"])
        super().__init__(modality=CustomModality(), **shared)

    def _of_proxy(self, stage: str, given: Datasets) -> Datasets:
        """The dataset functions as functions of nothing, which the base calls when it needs the datasets."""
        given = plain(f"{stage}_dataset", given)
        if given is None:
            return None
        if not self._definitions[stage]:
            raise ValueError(f"{stage}_dataset needs a pipeline: pass {stage}_pipeline.")
        if isinstance(given, Mapping):
            return {key: self._of_proxy(stage, one) for key, one in given.items()}
        if isinstance(given, (list, tuple)):
            return [self._of_proxy(stage, one) for one in given]
        if not callable(given) or isinstance(given, Dataset):
            raise TypeError(
                f"{stage}_dataset is {given!r}: expected a function of the proxy that makes the dataset, such as "
                "lambda proxy: MyDataset(root, transform=proxy)."
            )
        return _OfProxy(given, stage, self)

    def proxies(self, stage: str) -> Any:
        """What the stage's datasets call: one proxy, or several by name."""
        device = self._device()
        proxies = {key: definition.proxy(device) for key, definition in self._definitions[stage].items()}
        return proxies[None] if None in proxies else Proxies({str(key): proxy for key, proxy in proxies.items()})

    def _device(self) -> Device:
        return replace(super()._device(), outputs_on_cpu=self._output_device == "cpu")

    def _loader(self, name: str, dataset: Any, shard: Shard, device: Device, **more: Any) -> Loader:
        options = self.options
        seed = environment.global_seed() if options.seed is None else options.seed
        entries = {
            definition.name: PipelineEntry(definition, seed=seed, rank=shard.rank, ragged=options.ragged)
            for definition in self._definitions[name].values()
        }
        loader = super()._loader(name, dataset, shard, replace(device, pipelines=entries), **more)
        _check_inputs(loader.fetcher)
        return loader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leaves the batch where it is if it was asked for on the CPU."""
        if self._output_device == "cpu":
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class _OfProxy:
    """A dataset function with its proxy; a class, so that the datamodule can be copied and pickled with it."""

    def __init__(self, function: Callable[[Any], Any], stage: str, owner: DALIDataModule) -> None:
        self._function, self._stage, self._owner = function, stage, owner

    def __call__(self) -> Any:
        dataset = self._function(self._owner.proxies(self._stage))
        if not isinstance(dataset, (list, tuple)):  # those are datasets here, where the base takes them for several
            check_dataset(self._stage, dataset)
        return dataset


def _definitions(given: Mapping[str, Pipelines]) -> dict[str, dict[str | None, PipelineDefinition]]:
    """Each stage's pipelines by key; None is the key of one that is alone. Evaluation stages share the validation's."""
    made: dict[str, dict[str | None, PipelineDefinition]] = {}
    for stage, pipelines in given.items():
        pipelines = plain(f"{stage}_pipeline", pipelines)
        if pipelines is None:
            made[stage] = made["val"] if stage in ("test", "predict") else {}
        elif isinstance(pipelines, Mapping):
            if not pipelines:
                raise ValueError(f"{stage}_pipeline is an empty mapping: name at least one pipeline.")
            made[stage] = {
                str(key): PipelineDefinition(f"{stage}_pipeline[{str(key)!r}]", one) for key, one in pipelines.items()
            }
        else:
            made[stage] = {None: PipelineDefinition(f"{stage}_pipeline", pipelines)}
    return made


def _check_inputs(fetcher: Fetcher) -> None:
    """Calls the dataset once, so that wrong names are told at setup; what else goes wrong the first pass will tell.

    Not a stream: its first sample may be far away.
    """
    if isinstance(fetcher, StreamFetcher):
        return
    try:
        replace(fetcher, restore_rng=True).sample(0, 0)
    except ProxyInputError:
        raise
    except Exception:
        return
