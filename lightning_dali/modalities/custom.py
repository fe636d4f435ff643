"""A user's own pipelines: calls of their proxies to lanes, one lane a pipeline.

Runs in the worker, where it also catches what would make DALI give up on a whole batch: dtypes and dimensions that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dali.graph.custom import CustomSpec
from lightning_dali.media import MediaError
from lightning_dali.proxies.custom import PipelineProxy, ProxyCall, ProxyOutput, ProxyOutputs, describe
from lightning_dali.wire import Blobs, Lane

Expected = tuple[str, int, str]
"""dtype, number of dimensions, and whose they are, in words."""


@dataclass
class CustomModality:
    """Handles the outputs of `PipelineProxy`; everything else in a sample is left alone."""

    captures: bool = False
    """Images that the dataset opens itself stay images."""
    _seen: dict[tuple[str, str], Expected] = field(default_factory=dict)
    """What each input got first: DALI wants the same ever after. Learnt at setup, so all workers agree."""

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf is the output of a proxy."""
        return isinstance(value, ProxyOutput)

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf is several outputs."""
        return isinstance(value, ProxyOutputs)

    def wrap(self, sample: Any, transform: Callable[[Any], Any] | None) -> Any:
        """The dataset calls its proxy itself."""
        return sample

    def check(self, proxy: ProxyOutput) -> str | None:
        """Only the pipeline knows."""
        return None

    def settle(self, proxy: ProxyOutput) -> None:
        """There is no second decoder: what the pipeline refused is bad."""
        raise MediaError("the pipeline cannot process it", self.path(proxy))

    def path(self, proxy: ProxyOutput) -> str | None:
        """The file behind it."""
        return proxy.call.file()

    def notes(self, proxy: ProxyOutput) -> Iterable[str]:
        """Nothing is materialised."""
        return ()

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """One lane a pipeline. Its rows are the calls, once for each output: row `output * num_calls + call`."""
        groups: dict[str, _Calls] = {}
        for position, (name, index, output) in enumerate(items):
            proxy = output.call.proxy
            group = groups.setdefault(proxy.name, _Calls(proxy))
            if group.add(position, index, name, output):
                self._same(proxy, output.call, name, index)
        return [group.lane() for group in groups.values()]

    def _same(self, proxy: PipelineProxy, call: ProxyCall, name: str, index: int) -> None:
        for key, array in call.inputs.items():
            found = (str(array.dtype), array.ndim)
            dtype, ndim, first = self._seen.setdefault((proxy.name, key), (*found, f"dataset index {index}"))
            if found != (dtype, ndim):
                raise ValueError(
                    f"pipeline {proxy.name!r}, input {key!r}: the values of one input must agree in dtype and number of "
                    f"dimensions; expected {describe(dtype, ndim)} (as {first}), found {describe(*found)} at dataset index "
                    f"{index}, field {name!r}. Convert it in the dataset."
                )


class _Calls:
    """The calls of one pipeline in a batch."""

    def __init__(self, proxy: PipelineProxy) -> None:
        self.proxy = proxy
        self.rows: dict[int, int] = {}
        self.calls: list[ProxyCall] = []
        self.indices: list[int] = []
        self.fields: list[str] = []
        self.asked: list[tuple[int, int, int]] = []  # (output, row, position)

    def add(self, position: int, index: int, name: str, output: ProxyOutput) -> bool:
        """Takes an output; True if its call is new."""
        call = output.call
        new = id(call) not in self.rows
        if new:
            self.rows[id(call)] = len(self.calls)
            self.calls.append(call)
            self.indices.append(index)
            self.fields.append(name)
        self.asked.append((output.output, self.rows[id(call)], position))
        return new

    def lane(self) -> tuple[Lane, list[int]]:
        """The lane, and the item of each row; -1 where nobody asked for that output of that call."""
        positions = [-1] * (len(self.calls) * self.proxy.num_outputs)
        for output, row, position in self.asked:
            positions[output * len(self.calls) + row] = position
        lane = Lane(
            field=self.fields[0],
            spec=CustomSpec(self.proxy.name, draws=self.proxy.draws),
            data=Blobs(),
            inputs={},
            heads=[call.inputs for call in self.calls],
            tail=[],
            indices=self.indices,
            paths=[call.file() for call in self.calls],
        )
        return lane, positions
