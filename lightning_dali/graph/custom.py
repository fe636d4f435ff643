"""A user's own pipeline as a lane's graph.

`CustomSpec` is written in the worker and holds a name only. What the name stands for, a `PipelineEntry`, stays in the rank,
in `Device.pipelines`: pipelines are never pickled. DALI is imported when something is built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_dali.graph.spec import Device, Executor, LaneSpec
from lightning_dali.proxies.custom import Input, PipelineProxy
from lightning_dali.seeding import epoch_seed, sample_seed

if TYPE_CHECKING:
    from lightning_dali.wire import Lane

_SEED_BITS = 0x7FFF_FFFF
"""DALI takes signed numbers, and -1 stands for a seed of its own choice."""


@dataclass(frozen=True)
class CustomSpec(LaneSpec):
    """A user's pipeline, by name."""

    name: str
    """The key in `Device.pipelines`."""
    draws: bool = False
    """Whether it draws random numbers: then it is built anew, with another seed, for every epoch."""
    epoch: int | None = None
    """The epoch whose seed it has; None as long as that does not matter."""

    def merge(self, other: LaneSpec) -> CustomSpec | None:
        """One graph a name; of two epochs the other one's, which replaces this."""
        return other if isinstance(other, CustomSpec) and other.name == self.name else None

    def in_epoch(self, epoch: int) -> CustomSpec:
        """With the epoch's seed, if the pipeline draws."""
        return replace(self, epoch=epoch) if self.draws else self

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the pipeline that the name stands for on this rank."""
        return CustomExecutor(self, device.pipelines[self.name], device, max_batch_size=max_batch_size)

    def describe(self) -> list[tuple[str, str]]:
        """One line for `explain`."""
        return [(f"your pipeline {self.name!r}", "DALI")]


class PipelineDefinition:
    """A user's pipeline: a function that makes it, or one that was made already.

    Args:
        name: For messages.
        given: What `@pipeline_def` returns, or another function that takes `batch_size`, `num_threads`, `device_id`,
            `prefetch_queue_depth`, `exec_dynamic` and `seed`; or a `Pipeline`. The latter is copied by serialisation, so
            that it can be built for this batch size and device, and again after a failure; one that cannot be serialised
            (`fn.python_function`) is used itself, by one pass at a time.

    Raises:
        TypeError: It is neither.
    """

    def __init__(self, name: str, given: Any) -> None:
        self.name, self.given = name, given
        self._serialised: bytes | None = None
        self._in_use = self._spoilt = False
        if callable(given) and not isinstance(given, type):
            return
        if not _is_pipeline(given):
            raise TypeError(
                f"pipeline {name!r} is {given!r}: expected a function made with @pipeline_def (without calling it), or a "
                "nvidia.dali.Pipeline."
            )

    @property
    def is_function(self) -> bool:
        """Whether it can be made at will."""
        return not _is_pipeline(self.given)

    def proxy(self, device: Device) -> PipelineProxy:
        """What a dataset calls: names, dtypes and dimensions of the inputs, read from the graph; nothing is built.

        Raises:
            ValueError: The pipeline has no inputs, or one without a name.
        """
        pipeline = self._make(device, max_batch_size=1, seed=0) if self.is_function else self.given
        operators = _operators(pipeline)
        inputs = tuple(_input(self.name, op) for op in operators if _is_input(op))
        if not inputs:
            raise ValueError(
                f"pipeline {self.name!r} has no inputs: give it fn.external_source(name=...) without a source; the proxy "
                "takes them by these names."
            )
        # An operator with a seed of its own goes on from epoch to epoch, as its author wants: building it anew would
        # repeat its draws.
        random = [op for op in operators if op._op.schema.HasRandomSeedArg()]
        draws = bool(random) and self.is_function and not any("seed" in op._op._init_args for op in random)
        return PipelineProxy(self.name, inputs, len(pipeline._graph_outputs), draws)

    def build(self, device: Device, *, max_batch_size: int, seed: int) -> Any:
        """A built pipeline with the dynamic executor."""
        if self.is_function:
            pipeline = self._make(device, max_batch_size=max_batch_size, seed=seed)
        else:
            pipeline = self._copy(device, max_batch_size=max_batch_size, seed=seed)
        try:
            pipeline.build()
        except RuntimeError as error:
            if device.index is None and "requires a CUDA-capable GPU" in str(error):
                raise RuntimeError(
                    f"pipeline {self.name!r} has operators for the GPU (device='gpu' or 'mixed'), but runs on the CPU here. "
                    "Let it choose: device = 'cpu' if Pipeline.current().device_id is None else 'mixed'."
                ) from error
            raise
        return pipeline

    def give_back(self, pipeline: Any, *, sound: bool) -> None:
        """Ends a use of the pipeline."""
        if pipeline is self.given:
            self._in_use, self._spoilt = False, not sound

    def _options(self, device: Device, max_batch_size: int, seed: int) -> dict[str, Any]:
        return {
            "batch_size": max_batch_size,
            "num_threads": device.num_threads,
            "device_id": device.index,
            "prefetch_queue_depth": device.depth,
            "exec_dynamic": True,
            "seed": seed,
        }

    def _make(self, device: Device, *, max_batch_size: int, seed: int) -> Any:
        pipeline = self.given(**self._options(device, max_batch_size, seed))
        if not _is_pipeline(pipeline):
            raise TypeError(
                f"pipeline {self.name!r}: {self.given!r} returned {type(pipeline).__name__}, not a nvidia.dali.Pipeline; "
                "decorate it with @pipeline_def."
            )
        return pipeline

    def _copy(self, device: Device, *, max_batch_size: int, seed: int) -> Any:
        from nvidia.dali import Pipeline

        if self._serialised is None:
            try:
                self._serialised = self.given.serialize()
            except RuntimeError:
                return self._itself(device, max_batch_size)
        return Pipeline.deserialize(self._serialised, **self._options(device, max_batch_size, seed))

    def _itself(self, device: Device, max_batch_size: int) -> Any:
        given, advice = self.given, "Pass the @pipeline_def function instead of what it returned."
        prefix = f"pipeline {self.name!r} cannot be copied (it has operators that DALI does not serialise), and "
        if self._in_use or self._spoilt:
            raise RuntimeError(f"{prefix}{'another pass uses it' if self._in_use else 'it has failed'}. {advice}")
        if not given.exec_dynamic or given.prefetch_queue_depth < device.depth:
            raise ValueError(
                f"{prefix}needs exec_dynamic=True and prefetch_queue_depth={device.depth} or more. {advice}"
            )
        if max_batch_size > given.max_batch_size:
            raise ValueError(f"{prefix}takes {given.max_batch_size} rows, a batch has up to {max_batch_size}. {advice}")
        self._in_use = True
        return given


@dataclass(frozen=True)
class PipelineEntry:
    """What a name in `Device.pipelines` stands for, on one rank."""

    definition: PipelineDefinition
    seed: int = 0
    """The run's seed."""
    rank: int = 0
    """Ranks draw differently."""
    ragged: str = "list"
    """Whether outputs of different sizes come as a list, or are an error."""

    def seed_of(self, epoch: int | None) -> int:
        """The pipeline's seed for an epoch."""
        number = epoch or 0
        return sample_seed(epoch_seed(self.seed, number), number, self.rank) & _SEED_BITS


class CustomExecutor:
    """A user's pipeline, built."""

    def __init__(self, spec: CustomSpec, entry: PipelineEntry, device: Device, *, max_batch_size: int) -> None:
        self._entry, self._device = entry, device
        self._pipeline = entry.definition.build(device, max_batch_size=max_batch_size, seed=entry.seed_of(spec.epoch))
        self._in_flight = 0

    def feed(self, lane: Lane) -> None:
        """Hands one batch to DALI; returns at once."""
        from lightning_dali.graph.dali import tensors

        self._in_flight += 1
        for name in lane.heads[0]:
            self._pipeline.feed_input(name, tensors([inputs[name] for inputs in lane.heads]))
        self._pipeline._run_once()  # `schedule_run` would wait for a full prefetch queue first

    def collect(self, lane: Lane) -> Outputs:
        """The oldest batch."""
        from lightning_dali.graph.dali import collect

        outputs = collect(self._pipeline, self._device)
        self._in_flight -= 1
        if self._device.outputs_on_cpu:
            outputs = [_cpu(output) for output in outputs]
        return Outputs(outputs, lane, ragged=self._entry.ragged, name=self._entry.definition.name)

    def close(self) -> None:
        """Frees the pipeline."""
        if self._pipeline is not None:
            self._entry.definition.give_back(self._pipeline, sound=self._in_flight == 0)
        self._pipeline = None


class Outputs:
    """All outputs of a pipeline for one lane; row `output * num_calls + call`."""

    def __init__(self, outputs: list[Any], lane: Lane, *, ragged: str, name: str) -> None:
        self._outputs, self._lane, self._ragged, self._name = outputs, lane, ragged, name

    def __getitem__(self, row: int) -> torch.Tensor:
        output, call = divmod(row, len(self._lane))
        found: torch.Tensor = self._outputs[output][call]
        return found

    def stack_rows(self, rows: list[int]) -> torch.Tensor | list[torch.Tensor]:
        """These rows as one tensor `(n, ...)`; a list where sizes differ.

        Raises:
            ValueError: They differ, and a list was not asked for.
        """
        output, first = divmod(rows[0], len(self._lane))
        whole = self._outputs[output]
        in_order = rows == list(range(rows[0], rows[0] + len(rows))) and first + len(rows) <= len(self._lane)
        if in_order and isinstance(whole, torch.Tensor):
            return whole if len(rows) == len(whole) else whole[first : first + len(rows)]
        items = [self[row] for row in rows]
        odd = next((n for n, item in enumerate(items) if item.shape != items[0].shape), None)
        if odd is None:
            return torch.stack(items)
        if self._ragged == "list":
            return items
        index = [self._lane.indices[row % len(self._lane)] for row in (rows[0], rows[odd])]
        raise ValueError(
            f"pipeline {self._name!r}, output {output}: sizes differ in one batch: dataset index {index[0]} gives "
            f"{tuple(items[0].shape)}, index {index[1]} gives {tuple(items[odd].shape)}. Let the pipeline resize, crop or "
            "pad, or pass ragged='list' to get a list of tensors."
        )


def _cpu(output: Any) -> Any:
    return [item.cpu() for item in output] if isinstance(output, list) else output.cpu()


def _is_pipeline(value: Any) -> bool:
    from nvidia.dali import Pipeline

    return isinstance(value, Pipeline)


def _operators(pipeline: Any) -> list[Any]:
    """The operator instances of a pipeline: DALI has no public way to ask for them (its own proxy does the same)."""
    if pipeline._deserialized:
        raise ValueError(
            "the pipeline was deserialised, so its inputs' names are lost: pass the function that makes it."
        )
    if not pipeline._py_graph_built:
        pipeline._build_graph()
    return list(pipeline._ops)


def _is_input(op: Any) -> bool:
    """Whether an operator is an `external_source` that waits to be fed."""
    from nvidia.dali.external_source import ExternalSource

    return isinstance(op._op, ExternalSource) and op._op._callback is None


def _input(pipeline: str, op: Any) -> Input:
    from nvidia.dali import types

    if op._autoname:
        raise ValueError(f"pipeline {pipeline!r} has an input without a name: write fn.external_source(name=...).")
    dtype, ndim = op._op._dtype, op._op._ndim
    known = dtype is not None and dtype != types.NO_TYPE
    return Input(op.name, _numpy_name(dtype) if known else None, None if ndim in (None, -1) else int(ndim))


def _numpy_name(dtype: Any) -> str:
    import numpy as np
    from nvidia.dali import types

    return str(np.dtype(types.to_numpy_type(dtype)))
