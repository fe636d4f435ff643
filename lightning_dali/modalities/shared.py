"""What several modalities do alike. Runs in the worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lightning_dali.graph.pixels import PixelSpec
from lightning_dali.wire import Blobs, Lane


class OfSources:
    """The part of a modality that only asks a proxy's source."""

    def path(self, proxy: Any) -> str | None:
        """The file behind it."""
        path: str | None = proxy.source.path
        return path

    def notes(self, proxy: Any) -> Iterable[str]:
        """What needed pixels, or samples, in the worker."""
        notes: Iterable[str] = proxy.source.materialised
        return notes


def finished_lane(
    items: Sequence[tuple[str, int, Any]], positions: list[int], results: list[torch.Tensor]
) -> tuple[Lane, list[int]]:
    """A lane of what was finished in the worker, and its positions.

    Args:
        items: (field, dataset index, proxy) of a batch.
        positions: Which of them are in the lane.
        results: Theirs.
    """
    lane = Lane(
        field=items[positions[0]][0],
        spec=PixelSpec(),
        data=Blobs(),
        inputs={},
        heads=results,
        tail=[],
        indices=[items[position][1] for position in positions],
        paths=[items[position][2].source.path for position in positions],
    )
    return lane, positions
