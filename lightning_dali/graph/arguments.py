"""What a functional is called with, sample by sample, kept by name: it travels small, and kernels read whole columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch


@dataclass(frozen=True)
class Arguments(Sequence[Mapping[str, Any]]):
    """The keyword arguments of one functional for each of `size` samples; as a sequence, one mapping a sample.

    A name that only some samples have (an `affine` and a `rotate` in one warp) is None for the others.
    """

    size: int
    """Number of samples."""
    shared: dict[str, Any]
    """What is the same for all of them."""
    columns: dict[str, list[Any]]
    """What differs, one value a sample."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Arguments:
        """Columns of those `names` whose values differ; the first row speaks for all in everything else."""
        columns = {name: [row.get(name) for row in rows] for name in names if any(name in row for row in rows)}
        equal = {name: values[0] for name, values in columns.items() if _all_equal(values)}
        rest = {name: value for name, value in rows[0].items() if name not in columns}
        return cls(len(rows), rest | equal, {k: values for k, values in columns.items() if k not in equal})

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> Arguments: ...
    def __getitem__(self, at: int | slice) -> dict[str, Any] | Arguments:
        if isinstance(at, slice):
            columns = {name: values[at] for name, values in self.columns.items()}
            return Arguments(len(range(*at.indices(self.size))), self.shared, columns)
        if not -self.size <= at < self.size:
            raise IndexError(at)
        return self.shared | {name: values[at] for name, values in self.columns.items()}

    def has(self, name: str) -> bool:
        """Whether any sample has such an argument."""
        return name in self.shared or name in self.columns

    def column(self, name: str) -> list[Any]:
        """One value a sample."""
        values = self.columns.get(name)
        return [self.shared[name]] * self.size if values is None else values

    def distinct(self) -> tuple[Arguments, list[int]]:
        """The rows that differ from each other, in the order in which they come, and which of them each row is."""
        columns = [
            [tuple(value) if isinstance(value, list) else value for value in values] for values in self.columns.values()
        ]
        numbers: dict[tuple[Any, ...], int] = {}
        keys = zip(*columns, strict=True) if columns else [()] * self.size
        which = [numbers.setdefault(key, len(numbers)) for key in keys]
        firsts = dict(zip(reversed(which), range(self.size - 1, -1, -1), strict=True))
        places = [firsts[number] for number in range(len(numbers))]
        kept = {name: [values[place] for place in places] for name, values in self.columns.items()}
        return Arguments(len(places), self.shared, kept), which

    def repeat(self, times: int) -> Arguments:
        """Each sample's arguments `times` times in a row, as for the frames of clips."""
        columns = {name: [value for value in values for _ in range(times)] for name, values in self.columns.items()}
        return Arguments(self.size * times, self.shared, columns)


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    return not isinstance(first, torch.Tensor) and all(
        value is first or (type(value) is type(first) and value == first) for value in values
    )
