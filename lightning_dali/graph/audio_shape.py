"""Steps that cut, pad, pick and compute element by element, on a padded batch. Runs in the rank, on any device."""

from __future__ import annotations

import torch

from lightning_dali.graph.audio_rows import Rows
from lightning_dali.graph.audio_wave import Drawn, Settings


def channel(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """One channel, `(B, C, ...)` to `(B, 1, ...)`."""
    return Rows(rows.data[:, settings["index"] : settings["index"] + 1], rows.lengths)


def squeeze(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`(B, 1, ...)` to `(B, ...)`."""
    return Rows(rows.data.squeeze(1), rows.lengths)


def unsqueeze(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`(B, ...)` to `(B, 1, ...)`."""
    return Rows(rows.data.unsqueeze(1), rows.lengths)


def window(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`[start, stop)` of every row, its own numbers; zeros outside of the row, and they count as its own."""
    starts = [row["start"] for row in drawn]
    lengths = tuple(row["stop"] - row["start"] for row in drawn)
    longest, size = max(lengths), rows.data.shape[-1]
    if len(set(starts)) == 1:
        data = torch.nn.functional.pad(rows.data, (-starts[0], starts[0] + longest - size))
        return Rows(data, lengths).cleaned()
    at = rows.host(starts, torch.int64) + torch.arange(longest, device=rows.device)
    inside = (at >= 0) & (at < size)
    data = rows.data.gather(-1, at.clamp(0, size - 1).expand(*rows.data.shape[:-1], -1)) * inside
    return Rows(data, lengths).cleaned()


def pointwise(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torch.<op>(row, *values)`."""
    return Rows(getattr(torch, settings["op"])(rows.data, *settings["values"]), rows.lengths).cleaned()
