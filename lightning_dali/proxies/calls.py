"""What a proxy records: torchvision's (or torchaudio's) functional by name, with the arguments it was drawn with.

Runs in the worker; its values travel to the rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One recorded functional call."""

    name: str
    """The functional's own name, for instance ``"resized_crop"``."""
    kwargs: Mapping[str, Any]
    """Its arguments by name, without the image."""


class SharedArguments(dict[str, Any]):
    """Arguments of a call that many samples record: what is made of them is kept with them. They must not be changed."""

    __slots__ = ("made",)

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        super().__init__(kwargs)
        self.made: dict[tuple[str, str], Any] = {}
        """By its maker's name and the call's."""

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def shared(call: Call) -> Call:
    """The call, for many samples to record."""
    return call if type(call.kwargs) is SharedArguments else Call(call.name, SharedArguments(call.kwargs))


@functools.cache
def _parameter_names(functional: Callable[..., Any]) -> tuple[str, ...]:
    """The functional's parameters after the input."""
    return tuple(inspect.signature(functional).parameters)[1:]


def bind(functional: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Gives positional arguments their names.

    Args:
        functional: The public functional, whose first parameter is the input.
        args: Positional arguments after the input.
        kwargs: Keyword arguments.
    """
    bound = dict(zip(_parameter_names(functional), args, strict=False))
    bound.update(kwargs)
    return bound


_TO_TENSOR = frozenset({"to_image", "pil_to_tensor", "to_dtype", "normalize"})


def meets_pil(calls: Sequence[Call], before: bool = True) -> bool:
    """Whether the call after `calls` would meet a PIL image, as datasets hand it out, and not a tensor.

    Args:
        calls: What came before.
        before: Whether the first of them met one.
    """
    for call in reversed(calls):
        if call.name in _TO_TENSOR:
            return False
        if call.name == "to_pil_image":
            return True
    return before
