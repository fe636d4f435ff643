"""Audio as a lane's graph: it is decoded and padded (`speech_decode.py`), and torchaudio's arithmetic follows on the device.

`SpeechSpec` and `RowPlan` are written in the worker; the rest runs in the rank's server thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lightning_dali.graph.audio import apply_calls, opposite_phase
from lightning_dali.graph.audio_rows import Rows, merge
from lightning_dali.graph.spec import Device, Executor, LaneSpec
from lightning_dali.graph.speech_decode import SpeechDecoder
from lightning_dali.media import FlacInfo
from lightning_dali.padded import Padded
from lightning_dali.proxies.audio_calls import AudioCall

if TYPE_CHECKING:
    from lightning_dali.wire import Lane

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeechSpec(LaneSpec):
    """One graph serves all audio."""

    steps: tuple[str, ...] = field(default=(), compare=False)
    """Names of the calls that were seen, for `explain`."""

    def merge(self, other: LaneSpec) -> SpeechSpec | None:
        """Always possible."""
        if not isinstance(other, SpeechSpec):
            return None
        return SpeechSpec((*self.steps, *(step for step in other.steps if step not in self.steps)))

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the pipeline."""
        return SpeechExecutor(device, max_batch_size=max_batch_size)

    def describe(self) -> list[tuple[str, str]]:
        """What runs where."""
        return [
            ("decode audio", "device (FLAC), else DALI, CPU"),
            ("pad", "device"),
            *((step, "torch, device, batched") for step in self.steps),
        ]


@dataclass(frozen=True)
class RowPlan:
    """What is to be done with one row of a lane."""

    field: str
    """Its field in the sample."""
    calls: tuple[AudioCall, ...]
    """What follows decoding."""
    num_channels: int
    """C of what is decoded."""
    num_samples: int
    """S of what is decoded; 0 where there is a result."""
    flat: bool = False
    """Whether one channel is `(S,)`."""
    result: torch.Tensor | None = None
    """A finished tensor instead, from the worker."""
    flac: FlacInfo | None = None
    """Its header, where a GPU can decode it."""


class SpeechExecutor:
    """Decodes all audio of a batch and runs what follows."""

    def __init__(self, device: Device, *, max_batch_size: int) -> None:
        self.device = device
        self._phases: deque[tuple[Any, Any, list[str]]] = deque()
        self._decoder = SpeechDecoder(device, max_batch_size=max_batch_size)

    def feed(self, lane: Lane) -> None:
        """Starts to decode the encoded rows of one batch; returns at once."""
        encoded = _encoded(lane)
        if encoded:
            self._decoder.feed([lane.data[row] for row in encoded], [lane.heads[row].flac for row in encoded])

    def collect(self, lane: Lane) -> SpeechRows:
        """The oldest batch."""
        plans: list[RowPlan] = lane.heads
        encoded = _encoded(lane)
        waves: Any = []
        if encoded:
            waves, shapes = self._decoder.collect([lane.data[row] for row in encoded])
            if shapes is not None:
                _check_shapes([plans[row] for row in encoded], shapes)
        place = {row: number for number, row in enumerate(encoded)}
        chunks = []
        for members in _groups(plans, lambda plan: plan.field):
            parts = []
            for part in _groups(plans, lambda plan: (plan.result is None, plan.num_channels, plan.flat), members):
                rows = self._rows(plans, part, waves, place, lane)
                parts.append(([members.index(row) for row in part], rows))
            whole = parts[0][1] if len(parts) == 1 else merge(parts)
            chunks.append((members, whole))
        self._report_phases(wait=False)
        return SpeechRows([(members, self._delivered(rows)) for members, rows in chunks])

    def _rows(self, plans: Sequence[RowPlan], part: list[int], waves: Any, place: dict[int, int], lane: Lane) -> Rows:
        """Rows that agree in channels, computed."""
        plan = plans[part[0]]
        if plan.result is not None:
            whole = Padded.stack([plans[row].result for row in part])  # type: ignore[misc]  # as the first row, all have one
            return Rows.of(Padded(self._to_device(whole.data), whole.lengths))
        numbers = [place[row] for row in part]
        if isinstance(waves, list):
            data = torch.stack([waves[number] for number in numbers])
        elif numbers == list(range(len(waves))):
            data = waves
        else:
            data = waves.index_select(0, torch.tensor(numbers).to(waves.device, non_blocking=True))
        data = data.movedim(-1, -2)  # (B, C, S)
        self._note_phases(data, [plans[row] for row in part], [lane.paths[row] for row in part])
        data = data[:, 0] if plan.flat else data
        batch = Padded(data.contiguous(), torch.tensor([plans[row].num_samples for row in part]))
        return Rows.of(apply_calls(batch, [plans[row].calls for row in part]))

    def _to_device(self, data: torch.Tensor) -> torch.Tensor:
        if self.device.index is None:
            return data
        return data.pin_memory().to(self.device.torch_device, non_blocking=True)

    def _delivered(self, rows: Rows) -> Padded:
        data = rows.data.cpu() if self.device.outputs_on_cpu else rows.data
        return Padded(data, torch.tensor(rows.lengths))

    # -- channels that cancel each other

    def _note_phases(self, data: torch.Tensor, plans: list[RowPlan], paths: list[str | None]) -> None:
        """Looks for channels of opposite phase where they are mixed; read a batch later, so that nothing waits."""
        mixed = [any(call.name == "Downmix" for call in plan.calls) for plan in plans]
        if data.shape[1] < 2 or not any(mixed):
            return
        flags = torch.empty(len(data), dtype=torch.bool, pin_memory=data.is_cuda)
        flags.copy_(opposite_phase(data), non_blocking=True)
        event = None
        if data.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._phases.append(
            (flags, event, [path or "a file" if is_mixed else "" for path, is_mixed in zip(paths, mixed, strict=True)])
        )

    def _report_phases(self, *, wait: bool) -> None:
        while self._phases:
            flags, event, names = self._phases[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._phases.popleft()
            for name, opposite in zip(names, flags.tolist(), strict=True):
                if opposite and name:
                    logger.warning(
                        "%s: its channels are of opposite phase and cancel each other when mixed to one; take one of them "
                        "instead (waveform[:1]).",
                        name,
                    )

    def close(self) -> None:
        """Frees the pipelines."""
        self._report_phases(wait=True)
        self._decoder.close()


class SpeechRows:
    """Results of a lane, field by field; lengths are on the host."""

    def __init__(self, chunks: list[tuple[list[int], Padded]]) -> None:
        self._chunks = chunks
        self._place = {row: (number, at) for number, (rows, _) in enumerate(chunks) for at, row in enumerate(rows)}

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, row: int) -> torch.Tensor:
        number, at = self._place[row]
        padded = self._chunks[number][1]
        return padded.data[at][..., : int(padded.lengths[at])]

    def stack_rows(self, rows: list[int]) -> Padded:
        """These rows as one batch."""
        numbers = {self._place[row][0] for row in rows}
        if len(numbers) > 1:
            return Padded.stack([self[row] for row in rows])
        members, padded = self._chunks[numbers.pop()]
        if rows == members:
            return padded
        at = torch.tensor([self._place[row][1] for row in rows])
        lengths = padded.lengths[at]
        data = padded.data.index_select(0, at.to(padded.data.device, non_blocking=True))
        return Padded(data[..., : int(lengths.max())], lengths)


def _encoded(lane: Lane) -> list[int]:
    """Rows that are to be decoded."""
    return [row for row, plan in enumerate(lane.heads) if plan.result is None]


def _groups(plans: Sequence[RowPlan], key: Any, members: Sequence[int] | None = None) -> list[list[int]]:
    """Rows by what `key` says of their plans, in order."""
    found: dict[Any, list[int]] = {}
    for row in range(len(plans)) if members is None else members:
        found.setdefault(key(plans[row]), []).append(row)
    return list(found.values())


def _check_shapes(plans: list[RowPlan], shapes: Any) -> None:
    """DALI must have decoded what the headers promised; a file that is cut off inside may decode to less."""
    for plan, shape in zip(plans, shapes.tolist(), strict=True):
        if shape != [plan.num_samples, plan.num_channels]:
            raise ValueError(
                f"truncated: {shape[0]} samples of {shape[1]} channel(s) decoded, the header says {plan.num_samples} of "
                f"{plan.num_channels}"
            )
