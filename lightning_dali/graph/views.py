"""Several views of one file: decoded once, then the image template for each view.

`ViewsSpec` is written in the worker; building and running it happens in the rank. In such a lane row `r` is a file; its
view `v` has the number ``v * n + r`` wherever a view is meant: in slots and in the rows of tail steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lightning_dali.graph.image import ImageSpec, channels_first, decoded, identity_input, stage_inputs, stages
from lightning_dali.graph.plan import TailStep
from lightning_dali.graph.run import Rows, run_tail
from lightning_dali.graph.spec import Device, Executor, LaneSpec

if TYPE_CHECKING:
    from lightning_dali.wire import Lane


@dataclass(frozen=True)
class ViewsSpec(LaneSpec):
    """The templates of a file's views, all of encoded images in one mode."""

    views: tuple[ImageSpec, ...]

    def merge(self, other: LaneSpec) -> ViewsSpec | None:
        """View by view."""
        if not isinstance(other, ViewsSpec) or len(self.views) != len(other.views):
            return None
        merged = [mine.merge(theirs) for mine, theirs in zip(self.views, other.views, strict=True)]
        return None if None in merged else ViewsSpec(tuple(spec for spec in merged if spec is not None))

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the DALI pipeline."""
        return ViewsExecutor(self, device, max_batch_size=max_batch_size)

    def describe(self) -> list[tuple[str, str]]:
        """The stages in order; equal views together."""
        steps = [("decode once", "DALI")]
        for spec in dict.fromkeys(self.views):
            count = self.views.count(spec)
            steps += [(f"{count} view(s): {step}", where) for step, where in spec.describe()[1:]]
        return steps


def combine(lanes: Sequence[Lane]) -> Lane:
    """One lane of the lanes of a file's views, which have the same files in the same order."""
    first, n = lanes[0], len(lanes[0])
    return replace(
        first,
        field=", ".join(dict.fromkeys(lane.field for lane in lanes)),
        spec=ViewsSpec(tuple(lane.spec for lane in lanes if isinstance(lane.spec, ImageSpec))),
        inputs={
            _prefix(view) + name: values for view, lane in enumerate(lanes) for name, values in lane.inputs.items()
        },
        tail=[
            replace(step, rows=tuple(view * n + row for row in (range(n) if step.rows is None else step.rows)))
            for view, lane in enumerate(lanes)
            for step in lane.tail
        ],
    )


def _prefix(view: int) -> str:
    return f"view{view}_"


class Views:
    """The results of all views."""

    def __init__(self, views: list[Rows], n: int) -> None:
        self._views, self._n = views, n

    def __getitem__(self, number: int) -> torch.Tensor:
        view, row = divmod(number, self._n)
        return self._views[view][row]

    def stack_rows(self, numbers: list[int]) -> Rows:
        """Some of them as one tensor; a list where their sizes differ."""
        view = numbers[0] // self._n
        if numbers == list(range(view * self._n, (view + 1) * self._n)):
            return self._views[view]
        items = [self[number] for number in numbers]
        same = all(item.shape == items[0].shape for item in items)
        return torch.stack(items) if same else items


class ViewsExecutor:
    """One DALI pipeline with an output for each view."""

    def __init__(self, spec: ViewsSpec, device: Device, *, max_batch_size: int) -> None:
        from lightning_dali.graph.dali import new_pipeline

        self.spec, self.device = spec, device
        layout = "HWC" if device.channels_last else "CHW"
        self._pipeline = new_pipeline(device, max_batch_size=max_batch_size)
        with self._pipeline:
            images = decoded(spec.views[0].mode, device)
            views = [stages(images, one, layout=layout, prefix=_prefix(view)) for view, one in enumerate(spec.views)]
            self._pipeline.set_outputs(*views)
        self._pipeline.build()

    def feed(self, lane: Lane) -> None:
        """Hands one batch to DALI; returns at once."""
        from lightning_dali.graph.dali import tensors

        self._pipeline.feed_input("data", tensors(lane.data))
        for view, spec in enumerate(self.spec.views):
            prefix = _prefix(view)
            inputs = {
                name.removeprefix(prefix): values for name, values in lane.inputs.items() if name.startswith(prefix)
            }
            for name in stage_inputs(spec):
                values = inputs.get(name)
                if values is None:
                    values = inputs[name] = lane.inputs[prefix + name] = identity_input(name, inputs)
                self._pipeline.feed_input(prefix + name, values)
        self._pipeline._run_once()  # as in `ImageExecutor.feed`

    def collect(self, lane: Lane) -> Views:
        """The oldest batch: for each view `(n, C, H, W)`, or a list of `(C, H, W)` when sizes differ."""
        from lightning_dali.graph.dali import collect

        n = len(lane)
        views: list[Rows] = []
        for view, output in enumerate(collect(self._pipeline, self.device)):
            if self.spec.views[view].finish is None or self.device.channels_last:
                output = (
                    [channels_first(item) for item in output] if isinstance(output, list) else channels_first(output)
                )
            steps = [_of_view(step, n) for step in lane.tail if step.rows and step.rows[0] // n == view]
            views.append(run_tail(output, steps, channels_last=self.device.channels_last))
        return Views(views, n)

    def close(self) -> None:
        """Frees the pipeline."""
        self._pipeline = None


def _of_view(step: TailStep, n: int) -> TailStep:
    rows = tuple(number % n for number in step.rows or ())
    return replace(step, rows=None if len(rows) == n else rows)
