"""The API of NVIDIA's DALI Proxy on this engine: existing code runs with only the import changed.

    - import nvidia.dali.plugin.pytorch.experimental.proxy as dali_proxy
    + import lightning_dali.proxy_api as dali_proxy

Runs in the rank; `DALIServer.proxy` goes to the workers. There is no server thread that could outlive or miss a batch:
`DataLoader` makes passes as every loader here, and `produce_data` runs the pipeline when it is called. New code is better
off with `DALIDataModule`, which also names files that do not decode, shards, resumes and validates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lightning_dali import environment
from lightning_dali.delivery import assemble
from lightning_dali.fetch import Fetcher
from lightning_dali.graph.custom import PipelineDefinition, PipelineEntry
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.modalities import CustomModality
from lightning_dali.proxies.custom import PipelineProxy, ProxyOutput, ProxyOutputs
from lightning_dali.sampling import BatchPlan, TrainPlan, user_plan
from lightning_dali.server import Server
from lightning_dali.structure import leaves, map_leaves
from lightning_dali.wire import Slot, SlotStack

__all__ = ["DALIServer", "DataLoader"]

_NAME = "pipeline"


class DALIServer:
    """Runs a pipeline for the loaders and batches that its proxy took part in; a context manager.

    Args:
        pipeline: With named inputs. It is copied by serialisation where possible, so several loaders may use it at once.
        deterministic: Accepted: the order of execution is always that of the batches.

    Raises:
        TypeError: It is no `nvidia.dali.Pipeline`.
    """

    def __init__(self, pipeline: Any, deterministic: bool = False) -> None:
        self._definition = PipelineDefinition(_NAME, pipeline)
        if self._definition.is_function:
            raise TypeError(f"expected a nvidia.dali.Pipeline, got {pipeline!r}: call the @pipeline_def function.")
        self.modality = CustomModality()
        entry = PipelineEntry(self._definition, seed=torch.initial_seed())
        self.device = Device(pipeline.device_id, num_threads=pipeline.num_threads, pipelines={_NAME: entry})
        self._proxy = self._definition.proxy(self.device)
        self.engine = Server(self.device, max_batch_size=pipeline.max_batch_size)
        self._loaders: weakref.WeakSet[DataLoader] = weakref.WeakSet()

    @property
    def proxy(self) -> PipelineProxy:
        """What a dataset calls."""
        return self._proxy

    def produce_data(self, obj: Any) -> Any:
        """A batch with the pipeline's results in the places of stand-ins.

        Args:
            obj: Any nesting of containers, and objects with such in their attributes (these are changed in place).

        Returns:
            The same structure; a stacked field is a tensor `(B, ...)`, or a list of tensors where sizes differ.
        """
        items: list[tuple[str, int, Any]] = []
        known: dict[int, int] = {}

        def find(leaf: Any) -> Any:
            for output in leaf.items if isinstance(leaf, ProxyOutputs) else (leaf,):
                if id(output) not in known:
                    known[id(output)] = len(items)
                    items.append(("batch", len(items), output))
            return leaf

        _visit(obj, find)
        if not items:
            return obj
        # Learnt afresh each time: what a manual call feeds may change from one to the next.
        planned = CustomModality().lanes(items)
        slots = {
            position: Slot(lane, row) for lane, (_, rows) in enumerate(planned) for row, position in enumerate(rows)
        }
        results = self._run([lane for lane, _ in planned])

        def place(leaf: Any) -> Any:
            if isinstance(leaf, ProxyOutput):
                return assemble(slots[known[id(leaf)]], results)
            places = [slots[known[id(output)]] for output in leaf.items]
            return assemble(SlotStack(tuple(one.lane for one in places), tuple(one.row for one in places)), results)

        return _visit(obj, place)

    def _run(self, lanes: list[Any]) -> list[Any]:
        executors = self.engine.borrow()
        try:
            results = []
            for lane in lanes:
                executor = executors.get(lane.spec, len(lane), busy=lambda _: False)
                assert executor is not None  # nothing is busy
                executor.feed(lane)
                results.append(executor.collect(lane))
            return results
        except BaseException:
            executors.close()  # a pipeline that failed is unusable
            raise
        finally:
            self.engine.give_back(executors)

    def attach(self, loader: DataLoader) -> None:
        """Makes a loader end with this server."""
        self._loaders.add(loader)

    def start_thread(self) -> None:
        """Nothing to start: kept for code that calls it."""

    def stop_thread(self) -> None:
        """Ends the loaders' passes and workers and frees the pipeline; it is built again when it is needed."""
        for loader in list(self._loaders):
            loader.close()
        self.engine.release()

    def __enter__(self) -> DALIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_thread()


class DataLoader(Loader):
    """PyTorch's `DataLoader` arguments, this library's loader: see `Loader` for what it can do besides.

    Without a sampler, the ranks of an initialised `torch.distributed` share the dataset. The order is drawn from torch's
    seed (`torch.manual_seed`).

    Args:
        dali_server: Whose proxy the dataset calls.
        dataset: Map-style.
        batch_size: Samples a batch on this rank.
        shuffle: A new permutation each pass.
        sampler: Yields dataset indices.
        batch_sampler: Yields lists of them.
        num_workers: Processes; 0: in this one.
        collate_fn: Sees stand-ins where the proxy was called; `default_collate` and `torch.stack` join them.
        pin_memory: Accepted: results come on the pipeline's device.
        drop_last: Leave out what does not fill a batch.
        persistent_workers: Keep workers from pass to pass.
        multiprocessing_context: Start method of the workers.
        prefetch_factor: Accepted: workers keep two batches each.

    Raises:
        ValueError: An argument has no counterpart here.
    """

    def __init__(
        self,
        dali_server: DALIServer,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        persistent_workers: bool = False,
        multiprocessing_context: str | None = None,
        prefetch_factor: int | None = None,
        **unsupported: Any,
    ) -> None:
        refused = {key: value for key, value in unsupported.items() if value}
        if refused:
            raise ValueError(
                f"DataLoader({', '.join(f'{key}={value!r}' for key, value in refused.items())}): not supported here. Seed "
                "with torch.manual_seed, and set workers up in the dataset's first __getitem__."
            )
        self.dali_server = dali_server
        seed = torch.initial_seed()
        fetcher = Fetcher(dataset, dali_server.modality, collate_fn=collate_fn, seed=seed)
        plan = _plan(
            dataset,
            batch_size,
            shuffle=bool(shuffle),
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            seed=seed,
        )
        super().__init__(
            fetcher,
            plan,
            dali_server.device,
            num_workers=num_workers,
            context=multiprocessing_context,
            persistent_workers=persistent_workers,
        )
        self.server = dali_server.engine
        dali_server.attach(self)


def _plan(
    dataset: Any, batch_size: int, *, shuffle: bool, sampler: Any, batch_sampler: Any, drop_last: bool, seed: int
) -> BatchPlan:
    shard = environment.shard_of(None)
    if sampler is None and batch_sampler is None:
        return TrainPlan(len(dataset), batch_size, shard=shard, seed=seed, shuffle=shuffle, drop_last=drop_last)
    if shuffle or (sampler is not None and batch_sampler is not None):
        raise ValueError("shuffle, sampler and batch_sampler exclude each other: pass one of them.")
    return user_plan(
        dataset,
        sampler=sampler,
        batch_sampler=batch_sampler,
        batch_size=batch_size,
        shard=shard,
        seed=seed,
        drop_last=drop_last,
        deal=False,
    )


def _visit(obj: Any, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to the stand-ins in a batch, and in the attributes of its objects, each of these once."""
    seen: set[int] = set()

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, (ProxyOutput, ProxyOutputs)):
            return function(leaf)
        attributes = getattr(leaf, "__dict__", None)
        if attributes and not isinstance(leaf, (torch.Tensor, type)) and id(leaf) not in seen:
            seen.add(id(leaf))
            for key, value in list(attributes.items()):
                changed = map_leaves(visit, value)
                if any(isinstance(one, (ProxyOutput, ProxyOutputs)) for _, one in leaves(value)):
                    setattr(leaf, key, changed)
        return leaf

    return map_leaves(visit, obj)
