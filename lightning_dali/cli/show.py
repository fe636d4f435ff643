"""What the commands print: rich tables. Runs in the rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_dali.cli.bench import Bench, Rate
from lightning_dali.cli.doctor import Check
from lightning_dali.explain import Explanation
from lightning_dali.failures import BadSample
from lightning_dali.throughput import STAGES

__all__ = ["bad_samples", "checks", "explanation", "rates"]

SHOWN = 50
"""Bad samples in the table; the JSON has all."""


def explanation(told: Explanation) -> Group:
    """A table of steps, one of what the model gets, and the numbers."""
    steps = Table("field", "step", "where", "samples", title=f"{told.stage}: what runs where")
    for plan in told.fields:
        for number, graph in enumerate(plan.graphs):
            name = plan.field if len(plan.graphs) == 1 else f"{plan.field} (graph {number + 1} of {len(plan.graphs)})"
            for row, step in enumerate(graph):
                cells = (name if row == 0 else "", step.name, step.where, "some" if step.sometimes else "all")
                steps.add_row(*map(escape, cells))
            steps.add_section()
    for name, reason in told.materialised:
        steps.add_row(escape(name), escape(f"decode: {reason} needs pixels or samples"), "[yellow]worker[/]", "some")
    outputs = Table("field", "dtype", "shape", "device", "MB a batch", title="what the model gets")
    for output in told.outputs:
        shape = " x ".join(map(str, output.shape))
        outputs.add_row(escape(output.field), output.dtype, shape, output.device, f"{output.nbytes / 1e6:.2f}")
    lines = [line.strip() for line in str(told).splitlines()]
    kept = [*lines[:2], next(line for line in lines if line.startswith("in flight"))]
    parts: list[Any] = [steps, outputs, *map(Text, kept)]
    if told.problem:
        parts.append(Text(f"problem: {told.problem}", style="red"))
    return Group(*parts)


def rates(made: Bench) -> Table:
    """Samples a second, each with what it is compared to."""
    table = Table("what", "samples/s", "batches", "remark", title="bench")
    plain = made.plain
    ratio = (
        "" if plain is None else f"{made.loader.samples_per_second / plain.samples_per_second:.1f} x torch's DataLoader"
    )
    stages = ", ".join(f"{name} {1000 * made.totals.per_batch(name):.1f}" for name in STAGES)
    _add(table, "loader alone", made.loader, ratio)
    table.add_row("", "", "", f"ms a batch: {stages}")
    _add(table, "torch's DataLoader", plain, "as many workers")
    _add(table, "model, cached batches", made.cached, "the ideal")
    if made.live is not None:
        share = f"{100 * (made.of_ideal or 0):.0f} % of the ideal; waits {100 * made.live.wait_share:.0f} % of the time"
        _add(table, "model, live batches", made.live, share)
    return table


def _add(table: Table, name: str, rate: Rate | None, remark: str) -> None:
    if rate is not None:
        table.add_row(name, f"{rate.samples_per_second:,.0f}", str(rate.batches), remark)


def bad_samples(found: Sequence[BadSample]) -> Table:
    """Index, file and reason."""
    table = Table("index", "file", "reason", title=f"{len(found)} bad")
    for one in found[:SHOWN]:
        table.add_row(str(one.dataset_index), escape(one.path or ""), escape(one.reason))
    if len(found) > SHOWN:
        table.add_row("...", f"{len(found) - SHOWN} more", "see the report")
    return table


def checks(made: Sequence[Check]) -> Table:
    """One line a check."""
    table = Table("", "what", "found", "advice", title="doctor")
    for one in made:
        table.add_row("[yellow]![/]" if one.advice else "[green]OK[/]", *map(escape, (one.name, one.found, one.advice)))
    return table
