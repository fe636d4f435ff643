"""What a loader will do: which step runs where, what was materialised and why, sizes, memory in flight.

Runs in the rank. The first samples are drawn a few times and one small batch is run in this process; no worker is started.
"""

# Over 300 lines: half of them are words for the user.

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dali.environment import cores
from lightning_dali.loader import Loader
from lightning_dali.modalities import ImageModality
from lightning_dali.padded import Padded
from lightning_dali.passes import Pass
from lightning_dali.sources import InlineSource
from lightning_dali.structure import field_name, leaves, map_leaves
from lightning_dali.wire import Lane, Request

__all__ = ["Explanation", "FieldPlan", "Output", "Step", "explain"]

DRAWS = 16
"""How often the first samples are drawn: a step that is taken once in five times is missed once in 35."""
SAMPLES = 2
_MB = 1e6


@dataclass(frozen=True)
class Step:
    """One step of a field's way."""

    name: str
    """What is done, in torchvision's or torchaudio's word where it has one."""
    where: str
    """"DALI", "batched, on the device" or "worker"."""
    sometimes: bool = False
    """Whether only some samples take it."""


@dataclass(frozen=True)
class FieldPlan:
    """How one field of a sample becomes a tensor."""

    field: str
    """Its name or position in the sample."""
    graphs: tuple[tuple[Step, ...], ...]
    """The steps of each graph that the field needs: one, unless samples differ in what cannot be shared (colour mode)."""
    encoded_bytes: float
    """What travels from worker to rank, a sample."""
    normalised: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """(mean, std) where the last step normalises, for showing pictures."""


@dataclass(frozen=True)
class Output:
    """A field of a batch as the model gets it."""

    field: str
    shape: tuple[int, ...]
    """With the loader's batch size in front; of a small batch, so lengths that depend on the samples vary."""
    dtype: str
    device: str
    nbytes: int
    """Of a full batch."""


@dataclass(frozen=True)
class Explanation:
    """What `datamodule.explain(stage)` found; print it."""

    stage: str
    num_samples: int | None
    """None: a stream that does not say."""
    num_batches: int | None
    batch_size: int
    device: str
    num_workers: int
    num_threads: int
    cores: int
    """Cores that this process may use."""
    prefetch: int
    """Finished batches that may wait for the model."""
    depth: int
    """Batches inside DALI."""
    hw_decoder_load: float | None
    """Share of JPEGs for the hardware decoder, if the device has one; None where no image is decoded on a CUDA device."""
    ahead: int
    """Batches that workers make or hold at a time."""
    fields: tuple[FieldPlan, ...]
    outputs: tuple[Output, ...]
    materialised: tuple[tuple[str, str], ...]
    """(field, why): what the worker had to decode because something needs pixels or samples."""
    problem: str | None = None
    """Why the first samples could not be run."""

    @property
    def host_bytes(self) -> int:
        """Shared memory of the batches that workers make or hold, about."""
        encoded = sum(plan.encoded_bytes for plan in self.fields)
        return round(encoded * self.batch_size * (self.ahead + self.depth))

    @property
    def device_bytes(self) -> int:
        """Finished batches on the device: those that wait, those inside DALI, and the model's."""
        return sum(output.nbytes for output in self.outputs) * (self.prefetch + self.depth + 1)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(told: Explanation) -> list[str]:
    lines = [
        f"{told.stage}: {_size(told)} of {told.batch_size} on this rank, on {told.device}",
        f"  {told.num_workers} worker(s), {told.num_threads} DALI thread(s), {told.cores} core(s); "
        f"prefetch {told.prefetch}, depth {told.depth}"
        + ("" if told.hw_decoder_load is None else f", hardware decoder share {told.hw_decoder_load:g}"),
    ]
    for plan in told.fields:
        lines.append(f"  field {plan.field!r} ({plan.encoded_bytes / 1e3:.1f} kB a sample from the worker)")
        for number, graph in enumerate(plan.graphs):
            if len(plan.graphs) > 1:
                lines.append(f"    graph {number + 1} of {len(plan.graphs)}")
            lines += [f"    {step.name:<44} {step.where}{' (some samples)' * step.sometimes}" for step in graph]
    if told.materialised:
        lines.append("  materialised (decoded in the worker, augmented on its CPU):")
        lines += [f"    field {name!r}: {reason}" for name, reason in told.materialised]
    for output in told.outputs:
        lines.append(
            f"  batch {output.field!r}: {output.dtype} {output.shape} on {output.device}, {output.nbytes / _MB:.1f} MB"
        )
    lines.append(
        f"  in flight: about {told.host_bytes / _MB:.0f} MB of shared memory, {told.device_bytes / _MB:.0f} MB of "
        f"finished batches on {told.device}"
    )
    if told.problem:
        lines += textwrap.wrap(f"problem: {told.problem}", 118, initial_indent="  ", subsequent_indent="    ")
    return lines


def _size(told: Explanation) -> str:
    if told.num_samples is None:
        return "a stream, batches"
    return f"{told.num_samples} samples, {told.num_batches} batches"


def explain(loader: Loader) -> Explanation:
    """Looks at a loader; see `Explanation`.

    Args:
        loader: Not touched: its position, its passes and the random state stay.
    """
    requests: list[Request] = []
    problem = None
    outputs: tuple[Output, ...] = ()
    try:
        requests.extend(loader.draw(samples=SAMPLES, draws=DRAWS))
        outputs = _outputs(loader)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    device, plan = loader.server.device, loader.plan
    modality = loader.fetcher.modality
    images = any(isinstance(one, ImageModality) for one in getattr(modality, "members", {"": modality}).values())
    return Explanation(
        stage=loader.name,
        num_samples=plan.num_samples,
        num_batches=None if plan.num_samples is None else len(loader),
        batch_size=loader.batch_size,
        device=str(device.torch_device),
        num_workers=loader.num_workers,
        num_threads=device.num_threads,
        cores=cores(),
        prefetch=loader.server.queue,
        depth=device.depth,
        hw_decoder_load=device.hw_decoder_load if device.index is not None and images else None,
        ahead=loader.ahead,
        fields=_fields(requests),
        outputs=outputs,
        materialised=tuple(sorted({note for request in requests for note in request.notes})),
        problem=problem,
    )


def _outputs(loader: Loader) -> tuple[Output, ...]:
    """Runs one request of the first samples through the graphs, here and now."""
    request = next(loader.draw(samples=SAMPLES, draws=1))
    rows = len(request.indices)
    fetcher = _Given(request)
    one = Pass(loader.server, InlineSource(fetcher, iter([request.task])), threaded=False)  # type: ignore[arg-type]  # `_Given` does what is asked of a Fetcher
    try:
        batch = next(one).batch
    finally:
        one.close()
    found: dict[str, list[torch.Tensor]] = {}
    named = map_leaves(
        lambda leaf: leaf._asdict() if isinstance(leaf, Padded) else leaf,
        batch,
        leaf=lambda one: isinstance(one, Padded),
    )
    for path, leaf in leaves(named):
        if isinstance(leaf, torch.Tensor):  # a list of tensors of different sizes, one a row, counts as one field
            ragged = len(path) > 1 and isinstance(path[-1], int) and tuple(leaf.shape[:1]) != (rows,)
            found.setdefault(field_name(path[:-1] if ragged else path), []).append(leaf)
    return tuple(_output(name, tensors, rows, loader.batch_size) for name, tensors in found.items())


class _Given:
    """Stands in for a fetcher: the request is there already."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, task: Any) -> Request:
        return self._request


def _output(name: str, tensors: Sequence[torch.Tensor], rows: int, batch_size: int) -> Output:
    first = tensors[0]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    listed = len(tensors) > 1 or first.dim() == 0 or first.shape[0] != rows
    shape = (batch_size, *(first.shape if listed else first.shape[1:]))
    return Output(
        field=name,
        shape=tuple(shape),
        dtype=str(first.dtype).removeprefix("torch."),
        device=str(first.device),
        nbytes=round(nbytes * batch_size / max(1, rows)),
    )


def _fields(requests: Sequence[Request]) -> tuple[FieldPlan, ...]:
    by_field: dict[str, list[Lane]] = {}
    for request in requests:
        for lane in request.lanes:
            by_field.setdefault(lane.field, []).append(lane)
    return tuple(_field(name, lanes) for name, lanes in by_field.items())


def _field(name: str, lanes: Sequence[Lane]) -> FieldPlan:
    groups: list[tuple[Any, list[Lane]]] = []
    for lane in lanes:
        for number, (spec, members) in enumerate(groups):
            union = spec.merge(lane.spec)
            if union is not None:
                groups[number] = (union, [*members, lane])
                break
        else:
            groups.append((lane.spec, [lane]))
    rows = sum(len(lane) for lane in lanes)
    return FieldPlan(
        field=name,
        graphs=tuple(_graph(spec, members) for spec, members in groups),
        encoded_bytes=sum(lane.nbytes + _heads_bytes(lane) for lane in lanes) / max(1, rows),
        normalised=next(filter(None, map(_normalised, lanes)), None),
    )


def _heads_bytes(lane: Lane) -> int:
    tensors: int = sum(head.nbytes for head in lane.heads if isinstance(head, torch.Tensor))
    arrays: int = sum(array.nbytes for head in lane.heads if isinstance(head, dict) for array in head.values())
    return tensors + arrays


def _graph(spec: Any, lanes: Sequence[Lane]) -> tuple[Step, ...]:
    steps = [Step(name, where) for name, where in spec.describe()]
    rows: dict[str, int] = {}
    places: dict[str, list[float]] = {}
    for lane in lanes:
        for number, (name, taken) in enumerate(_tail_rows(lane).items()):
            rows[name] = rows.get(name, 0) + taken
            places.setdefault(name, []).append(number / len(lane.tail))
    total = sum(len(lane) for lane in lanes)
    in_order = sorted(rows, key=lambda name: sum(places[name]) / len(places[name]))
    return (*steps, *(Step(name, "batched, on the device", rows[name] < total) for name in in_order))


def _tail_rows(lane: Lane) -> dict[str, int]:
    """How many rows of a lane take each call of its tail, in order."""
    taken: dict[str, set[int]] = {}
    for step in lane.tail:
        rows = range(len(lane)) if step.rows is None else step.rows
        for row, kwargs in zip(rows, step.arguments, strict=True):
            name = str(kwargs.get("_call", step.name)).removesuffix(
                "_pil"
            )  # Pillow's arithmetic for the same functional
            taken.setdefault(name, set()).add(row)
    return {name: len(rows) for name, rows in taken.items()}


def _normalised(lane: Lane) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    finish = getattr(getattr(lane.spec, "template", lane.spec), "finish", None)  # a clip's stages are an image's
    if finish is not None and finish.mean is not None and finish.std is not None:
        return finish.mean, finish.std
    for step in lane.tail:
        if step.name == "normalize":
            mean, std = (tuple(map(float, step.arguments[0][key])) for key in ("mean", "std"))
            return mean, std
    return None
