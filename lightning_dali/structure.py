"""Walks over samples and batches: tuples, lists, dicts, named tuples and dataclasses keep their type.

Runs in the worker and in the rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]
"""Keys and positions from the root of a sample to a leaf."""


@functools.lru_cache(maxsize=4096)
def _kind(cls: type) -> str:
    """What sort of container a class is; kept, since asking `Mapping` and `dataclasses` costs more than the walk."""
    if issubclass(cls, Mapping):
        return "mapping"
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return "namedtuple"
    if issubclass(cls, (tuple, list)):
        return "sequence"
    return "dataclass" if dataclasses.is_dataclass(cls) else "leaf"


def map_leaves(function: Callable[[Any], Any], value: Any, *, leaf: Callable[[Any], bool] | None = None) -> Any:
    """Applies `function` to every leaf and rebuilds the containers around the results.

    Args:
        function: Called with a leaf.
        value: A leaf or a nesting of containers.
        leaf: Says which containers count as leaves, for instance a named tuple with a meaning of its own.
    """
    kind = _kind(type(value))  # type: ignore[arg-type]  # mypy: a type is not Hashable
    if kind == "leaf" or (leaf is not None and leaf(value)):
        return function(value)
    if kind == "mapping":
        items = {key: map_leaves(function, item, leaf=leaf) for key, item in value.items()}
        return items if type(value) is dict else _rebuild_mapping(value, items)
    if kind == "namedtuple":
        return type(value)(*(map_leaves(function, item, leaf=leaf) for item in value))
    if kind == "sequence":
        mapped = [map_leaves(function, item, leaf=leaf) for item in value]
        return mapped if type(value) is list else type(value)(mapped)
    names = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **{name: map_leaves(function, getattr(value, name), leaf=leaf) for name in names})


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(original)(items)  # type: ignore[call-arg]  # most mappings' constructors take a dict
    except TypeError:  # a mapping type with another constructor, such as defaultdict
        return items


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every leaf with its path, depth first."""
    kind = _kind(type(value))  # type: ignore[arg-type]  # mypy: a type is not Hashable
    if kind == "mapping":
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif kind in ("sequence", "namedtuple"):
        for position, item in enumerate(value):
            yield from leaves(item, (*path, position))
    elif kind == "dataclass":
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), (*path, field.name))
    else:
        yield path, value


def field_name(path: Path) -> str:
    """The name under which messages and lanes speak of a leaf: ``"0"``, ``"image"``, ``"views/1"``."""
    return "/".join(map(str, path)) or "sample"
