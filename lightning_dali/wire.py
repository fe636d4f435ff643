"""What crosses from a worker to its rank: a batch of samples, packed, and unpacked again.

The large parts (encoded bytes, pixels, large arrays) lie in one shared-memory slab a batch; the rest is one small pickle.
Packing runs in the worker, unpacking in the rank's server thread.
"""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lightning_dali.graph.plan import TailStep
from lightning_dali.graph.spec import LaneSpec
from lightning_dali.sampling import BatchTask

ALIGNMENT = 64
"""Bytes; every buffer starts on a cache line."""
INLINE_BYTES = 2048
"""Arrays up to this size travel in the pickle."""


class Blobs(list[np.ndarray]):
    """Arrays of uint8 that travel in the slab one behind the other: as one buffer, which costs next to nothing to read."""

    @property
    def nbytes(self) -> int:
        """Bytes in the slab."""
        return sum(-(-item.nbytes // ALIGNMENT) * ALIGNMENT for item in self)


def _blobs(sizes: bytes, shapes: list[tuple[int, ...]] | None, buffer: Any) -> Blobs:
    whole, start = np.frombuffer(buffer, np.uint8), 0
    blobs = Blobs()
    for size in array("q", sizes):
        blobs.append(whole[start : start + size])
        start += -(-size // ALIGNMENT) * ALIGNMENT
    if shapes is not None:
        blobs[:] = [blob.reshape(shape) for blob, shape in zip(blobs, shapes, strict=True)]
    return blobs


@dataclass
class Lane:
    """The items of one field that run through one graph."""

    field: str
    """The field's name in the sample, for messages."""
    spec: LaneSpec
    """The graph they need."""
    data: Blobs
    """Encoded bytes `(n_bytes,)` or pixels, an array an item, or several in a row (`parts`)."""
    inputs: dict[str, np.ndarray]
    """Per-item parameters of the graph, first axis the item."""
    heads: list[Any]
    """What else the executor needs to know of each item; empty where `inputs` say all."""
    tail: list[TailStep]
    """What follows on the device."""
    indices: list[int]
    """Dataset index of each item."""
    paths: list[str | None]
    """File of each item, where known."""
    parts: tuple[int, ...] = ()
    """How many arrays of `data` each item has; empty: one each, or none at all."""

    def __len__(self) -> int:
        return len(self.indices)

    def blobs(self, row: int) -> Blobs:
        """The arrays of one item."""
        if not self.parts:
            return Blobs(self.data[row : row + 1])
        first = sum(self.parts[:row])
        return Blobs(self.data[first : first + self.parts[row]])

    def select(self, rows: list[int]) -> Lane:
        """The lane with only those rows, without its tail."""
        return replace(
            self,
            data=Blobs(blob for row in rows for blob in self.blobs(row)),
            inputs={name: values[rows] for name, values in self.inputs.items()},
            heads=[self.heads[row] for row in rows] if self.heads else [],
            tail=[],
            indices=[self.indices[row] for row in rows],
            paths=[self.paths[row] for row in rows],
            parts=tuple(self.parts[row] for row in rows) if self.parts else (),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return sum(item.nbytes for item in self.data)


@dataclass(frozen=True)
class KnownBad:
    """A task to be made again, with what turned out not to decode."""

    task: BatchTask
    reasons: tuple[tuple[int, str, str | None], ...]
    """(dataset index, reason, path)."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The task's indices."""
        return self.task.indices

    @property
    def worker(self) -> int | None:
        """The task's worker."""
        return self.task.worker

    @property
    def size(self) -> int:
        """The task's size."""
        return self.task.size


@dataclass(frozen=True)
class Slot:
    """Where an item's result belongs in the batch: row `row` of lane `lane`."""

    lane: int
    row: int


@dataclass(frozen=True)
class SlotStack:
    """Several results that were stacked: `(B, ...)`."""

    lanes: tuple[int, ...]
    """Each result's lane."""
    rows: tuple[int, ...]
    """Each result's row in its lane."""
    ragged: bool = False
    """Whether sizes differ: then a list is delivered."""
    lead: tuple[int, ...] | None = None
    """The leading dimensions where there are several, such as (samples, crops)."""


@dataclass
class Request:
    """One batch on its way to the device."""

    task: BatchTask
    lanes: list[Lane]
    batch: Any
    """The collated batch with `Slot` and `SlotStack` in the places of proxied fields."""
    indices: tuple[int, ...]
    """Dataset indices of the rows that are in the batch."""
    bad: list[Any] = field(default_factory=list)
    """`BadSample`s found while it was made."""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(field, what needed pixels in the worker)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long the worker took, by stage."""


def _tensor_from_array(values: np.ndarray, dtype: torch.dtype | None, kind: type | None, extra: Any) -> torch.Tensor:
    # a copy: the array lies in a slab that will be used again
    tensor = torch.from_numpy(np.array(values))
    if dtype is not None:
        tensor = tensor.view(dtype)
    if kind is None:
        return tensor
    tensor = tensor.as_subclass(kind)
    tensor.__dict__.update(extra)
    return tensor


_VIEWS = {torch.bfloat16: torch.int16}


class _Pickler(pickle.Pickler):
    """Tensors as numpy arrays, and `Blobs` as one buffer, so that their bytes can travel out of band."""

    def __init__(self, stream: io.BytesIO, blobs: dict[int, tuple[bytearray, Blobs]], **options: Any) -> None:
        super().__init__(stream, **options)
        self._blobs = blobs

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Blobs):
            return self._reduce_blobs(obj)
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cpu" or obj.layout != torch.strided:
            return NotImplemented
        if (
            type(obj).__reduce_ex__ is not torch.Tensor.__reduce_ex__
            and type(obj).__module__.split(".")[0] != "torchvision"
        ):
            return NotImplemented
        kind = None if type(obj) is torch.Tensor else type(obj)
        plain = obj.detach().as_subclass(torch.Tensor)
        view = _VIEWS.get(plain.dtype)
        values = (plain.view(view) if view else plain).contiguous().numpy()
        return _tensor_from_array, (values, plain.dtype if view else None, kind, dict(obj.__dict__) if kind else None)

    def _reduce_blobs(self, blobs: Blobs) -> Any:
        """One buffer for all: a placeholder that `write` fills in, since joining them first would copy them twice."""
        place = bytearray(1)
        self._blobs[id(place)] = (place, blobs)
        flat = all(item.ndim == 1 for item in blobs)
        sizes = array("q", [item.nbytes for item in blobs]).tobytes()
        return _blobs, (sizes, None if flat else [item.shape for item in blobs], pickle.PickleBuffer(place))


Buffer = memoryview | Blobs


def dumps(value: Any) -> tuple[bytes, list[Buffer]]:
    """Pickles `value`; large arrays come as separate buffers."""
    buffers: list[Buffer] = []
    blobs: dict[int, tuple[bytearray, Blobs]] = {}

    def keep_inline(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        known = blobs.get(id(raw.obj))
        if known is None and raw.nbytes <= INLINE_BYTES:
            return True
        buffers.append(raw if known is None else known[1])
        return False

    stream = io.BytesIO()
    _Pickler(stream, blobs, protocol=5, buffer_callback=keep_inline).dump(value)
    return stream.getvalue(), buffers


def layout(buffers: list[Buffer]) -> tuple[list[tuple[int, int]], int]:
    """Where each buffer goes in a slab: ((offset, size), ...) and the bytes needed."""
    places, end = [], 0
    for buffer in buffers:
        places.append((end, buffer.nbytes))
        end += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
    return places, end


def write(value: Any, slab: Callable[[int], memoryview]) -> bytes:
    """Packs `value` into a message and a slab.

    Args:
        value: What to send.
        slab: Called once with the bytes needed, gives the memory; not called when nothing is large.

    Returns:
        The message; `read` needs it and the slab.
    """
    body, buffers = dumps(value)
    places, size = layout(buffers)
    if size:
        memory = np.frombuffer(slab(size), np.uint8)
        for (offset, count), buffer in zip(places, buffers, strict=True):
            if isinstance(buffer, Blobs):
                _write_blobs(memory, offset, buffer)
            else:
                memory[offset : offset + count] = np.frombuffer(buffer, np.uint8)
    return pickle.dumps((places, body), protocol=5)


def _write_blobs(memory: np.ndarray, offset: int, blobs: Blobs) -> None:
    for item in blobs:
        memory[offset : offset + item.nbytes].reshape(item.shape)[...] = item
        offset += -(-item.nbytes // ALIGNMENT) * ALIGNMENT


def write_small(value: Any) -> bytes:
    """Packs `value` into a message that needs no slab."""
    return pickle.dumps(([], pickle.dumps(value, protocol=5)), protocol=5)


def read(message: bytes, slab: memoryview | None) -> Any:
    """Unpacks a message. Arrays of lanes look into the slab, which must live until the batch is done; tensors are copies."""
    places, body = pickle.loads(message)
    buffers = [slab[offset : offset + count] for offset, count in places] if slab is not None else []
    if slab is None and places:  # lanes of empty blobs only: nothing was written
        buffers = [memoryview(b"") for _ in places]
    return pickle.loads(body, buffers=buffers)
