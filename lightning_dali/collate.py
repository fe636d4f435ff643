"""The default collate: PyTorch's structure, with a sentence instead of a surprise when samples do not match.

Runs in the worker. Tensors of one field must agree in dtype and shape. Detection targets come back as lists, one entry a
sample, always, since their number differs: `tv_tensors.BoundingBoxes` and `KeyPoints` (which keep their type), every tensor
beside them that has one row a box (labels, areas, instance masks), and lists of annotations whose lengths differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torchvision import tv_tensors

from lightning_dali.proxies import ProxyImage, ProxyStack
from lightning_dali.structure import field_name, leaves


class CollateError(ValueError):
    """Samples of one batch do not fit together."""


def describe_sample(sample: Any) -> Iterator[tuple[str, Any]]:
    """Yields (field, leaf)."""
    for path, leaf in leaves(sample):
        yield field_name(path), leaf


def collate(
    samples: Sequence[Any], indices: Sequence[int], *, is_proxy: Callable[[Any], bool], ragged: bool = False
) -> Any:
    """Joins samples into a batch of the same structure.

    Args:
        samples: From the dataset, proxies in the places of media.
        indices: Their dataset indices, for messages.
        is_proxy: Which leaves are proxies; they are stacked.
        ragged: Whether tensors of different shapes become a list instead of an error.

    Raises:
        CollateError: Samples differ in structure, or a field in type, dtype or shape; names field and index.
    """
    return _Collater(indices, is_proxy, ragged)(list(samples), ())


class _Collater:
    def __init__(self, indices: Sequence[int], is_proxy: Callable[[Any], bool], ragged: bool) -> None:
        self.indices, self.is_proxy, self.ragged = indices, is_proxy, ragged

    def __call__(self, values: list[Any], path: tuple[Any, ...]) -> Any:
        first = values[0]
        if any(self.is_proxy(value) for value in values):
            return self._proxies(values, path)
        if all(isinstance(value, ProxyStack) for value in values):
            return ProxyStack.join(values) or values
        if isinstance(first, (torch.Tensor, np.ndarray)):
            return self._tensors(values, path)
        if isinstance(first, Mapping):
            self._same(values, path, "keys", lambda value: sorted(map(str, value)))
            counts = [_count(value.values()) for value in values]
            return {key: self._column([value[key] for value in values], counts, (*path, key)) for key in first}
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            self._same(values, path, "type", lambda value: type(value).__name__)
            names = [item.name for item in dataclasses.fields(first) if item.init]
            counts = [_count(getattr(value, name) for name in names) for value in values]
            columns = {name: [getattr(value, name) for value in values] for name in names}
            joined = {name: self._column(column, counts, (*path, name)) for name, column in columns.items()}
            return dataclasses.replace(first, **joined)
        if isinstance(first, (tuple, list)):
            return self._sequences(values, path)
        self._same(
            values,
            path,
            "type",
            lambda value: "number" if isinstance(value, (int, float, np.number)) else type(value).__name__,
        )
        try:
            return default_collate(values)
        except TypeError:  # a type that PyTorch leaves to the user: hand it on
            return values

    def _sequences(self, values: list[Any], path: tuple[Any, ...]) -> Any:
        first = values[0]
        if path and all(isinstance(value, list) for value in values) and len({len(value) for value in values}) > 1:
            return values  # annotations, whose number differs: one list a sample
        self._same(
            values,
            path,
            "length",
            lambda value: len(value) if isinstance(value, (tuple, list)) else type(value).__name__,
        )
        counts = [_count(value) for value in values]
        columns = enumerate(zip(*values, strict=True))
        joined: list[Any] = [self._column(list(column), counts, (*path, n)) for n, column in columns]
        if hasattr(first, "_fields"):
            return type(first)(*joined)
        return joined if (not path and isinstance(first, list)) or isinstance(first, list) else tuple(joined)

    def _column(self, values: list[Any], counts: list[int | None], path: tuple[Any, ...]) -> Any:
        """One field of all samples: left as it is where it has one row a box (`counts` of them)."""
        if counts[0] is not None and all(map(_has_rows, values, counts)) and not any(map(self.is_proxy, values)):
            return values
        return self(values, path)

    def _proxies(self, values: list[Any], path: tuple[Any, ...]) -> Any:
        if any(isinstance(value, ProxyImage) for value in values):  # some samples drew what needs pixels, others not
            values = [ProxyImage.of_result(v) if type(v) in (torch.Tensor, tv_tensors.Image) else v for v in values]
        of_result = getattr(next(type(value) for value in values if self.is_proxy(value)), "of_result", None)
        if of_result is not None:
            values = [of_result(value) if type(value) is torch.Tensor else value for value in values]
        self._same(values, path, "kind", lambda value: type(value).__name__ if self.is_proxy(value) else _kind(value))
        self._same(values, path, "dtype", lambda value: str(value.dtype))
        stack = getattr(type(values[0]), "stack", None)
        return values if stack is None else stack(values)

    def _tensors(self, values: list[Any], path: tuple[Any, ...]) -> Any:
        self._same(values, path, "kind", _kind)
        self._same(values, path, "dtype", lambda value: str(value.dtype))
        self._same(values, path, "number of dimensions", lambda value: value.ndim)
        kind = type(values[0])
        tensors = [torch.as_tensor(value) for value in values]
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            if self.ragged or (path and issubclass(kind, tv_tensors.Mask)) or self._counts(tensors, path):
                return values
            self._same(values, path, "shape", lambda value: tuple(value.shape))
        with torch._C.DisableTorchFunctionSubclass():
            stacked = torch.stack([tensor.as_subclass(torch.Tensor) for tensor in tensors])
        return stacked

    def _counts(self, tensors: list[torch.Tensor], path: tuple[Any, ...]) -> bool:
        """Whether a field of a dict of targets differs only in its first length: labels, areas, one a box."""
        in_mapping = any(isinstance(key, str) for key in path)
        return in_mapping and len({tensor.shape[1:] for tensor in tensors}) == 1

    def _same(self, values: list[Any], path: tuple[Any, ...], what: str, of: Callable[[Any], Any]) -> None:
        def safe(value: Any) -> Any:
            try:
                return of(value)
            except (TypeError, AttributeError):
                return type(value).__name__

        expected = safe(values[0])
        for index, value in zip(self.indices, values, strict=True):
            found = safe(value)
            if found != expected:
                raise CollateError(
                    f"field {field_name(path)!r}: {what} differs in one batch: expected {expected} (as dataset index "
                    f"{self.indices[0]}), found {found} at dataset index {index}. Make the dataset return the same for every "
                    "index, or pass a collate_fn that joins what it returns."
                )


def _count(fields: Iterable[Any]) -> int | None:
    """How many boxes or objects with keypoints a sample has; None where it has no such field."""
    kinds = (tv_tensors.BoundingBoxes, tv_tensors.KeyPoints)
    return next((len(field) for field in fields if isinstance(field, kinds)), None)


def _has_rows(value: Any, count: int | None) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0 and len(value) == count


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    return "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
