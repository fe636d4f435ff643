"""The proxy of a user's own pipeline: called anywhere in a dataset, it remembers its arguments and returns stand-ins.

Runs in the worker. A call becomes one row of a lane; the pipeline itself stays in the rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_dali.proxies.stand_in import stacked_along_0

MAX_PATH_BYTES = 4096
"""Linux' PATH_MAX: a longer input is no file name."""


class ProxyInputError(TypeError):
    """A proxy was called with other inputs than its pipeline has."""


@dataclass(frozen=True)
class Input:
    """One named `external_source` of a pipeline."""

    name: str
    """Its name, the keyword under which the proxy takes it."""
    dtype: str | None = None
    """NumPy's name of the dtype that the pipeline declares; None if it takes what comes."""
    ndim: int | None = None
    """The number of dimensions that it declares."""


@dataclass(frozen=True)
class PipelineProxy:
    """What a dataset calls instead of decoding; a value, so it may be sent to any worker.

    `proxy(x=..., y=...)` with the names of the pipeline's inputs, or `proxy(value)` where there is one, returns a stand-in
    for the pipeline's output on this sample: a tuple of them where the pipeline has several outputs. A value may be an
    array, a tensor, a number, encoded bytes, a PIL image, or a string or path (its UTF-8 bytes, for `fn.io.file.read`).
    """

    name: str
    """The pipeline's name among those of its datamodule."""
    inputs: tuple[Input, ...]
    """What it must be called with."""
    num_outputs: int = 1
    """How many stand-ins a call returns."""
    draws: bool = False
    """Whether the pipeline draws random numbers of its own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        arrays, path = {}, None
        for one in self.inputs:
            arrays[one.name], file = as_array(values[one.name], one, self.name)
            path = path or file
        call = ProxyCall(self, arrays, path)
        outputs = tuple(ProxyOutput(call, number) for number in range(self.num_outputs))
        return outputs[0] if len(outputs) == 1 else outputs

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = [one.name for one in self.inputs]
        if len(args) == 1 and not kwargs and len(names) == 1:
            return {names[0]: args[0]}
        if args or kwargs.keys() != set(names):
            got = [*(f"<positional {type(value).__name__}>" for value in args), *kwargs]
            missing = [name for name in names if name not in kwargs]
            surplus = [name for name in kwargs if name not in names]
            raise ProxyInputError(
                f"pipeline {self.name!r} has the inputs {names}, its proxy was called with {got}: missing {missing}, "
                f"surplus {surplus}. Call it by keyword with exactly these names (one positional value is enough where "
                "there is one input), or name the pipeline's fn.external_source(name=...) after them."
            )
        return kwargs


class Proxies(Mapping[str, PipelineProxy]):
    """The proxies of several pipelines, by name: `proxies["image"](...)` or `proxies.image(...)`."""

    def __init__(self, proxies: Mapping[str, PipelineProxy]) -> None:
        self._proxies = dict(proxies)

    def __getitem__(self, name: str) -> PipelineProxy:
        return self._proxies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._proxies)

    def __len__(self) -> int:
        return len(self._proxies)

    def __getattr__(self, name: str) -> PipelineProxy:
        if name.startswith("_") or name not in self._proxies:
            raise AttributeError(f"there is no pipeline {name!r}; there are {', '.join(map(repr, self))}")
        return self._proxies[name]


class ProxyCall:
    """One call of a proxy: one row for its pipeline."""

    __slots__ = ("inputs", "path", "proxy")

    def __init__(self, proxy: PipelineProxy, inputs: dict[str, np.ndarray], path: str | None) -> None:
        self.proxy, self.inputs, self.path = proxy, inputs, path

    def file(self) -> str | None:
        """The file behind it, for messages: the path it was called with, or bytes that spell one."""
        if self.path is not None:
            return self.path
        for array in self.inputs.values():
            if array.ndim == 1 and array.dtype.itemsize == 1 and 0 < array.size <= MAX_PATH_BYTES:
                try:
                    text = array.tobytes().decode()
                except UnicodeDecodeError:
                    continue
                if os.sep in text and text.isprintable():
                    return text
        return None


class ProxyOutput:
    """Stands for one output of a pipeline on one sample until DALI has run; not a dataclass, so that it is a leaf."""

    __slots__ = ("call", "output")

    def __init__(self, call: ProxyCall, output: int) -> None:
        self.call, self.output = call, output

    @classmethod
    def stack(cls, items: Sequence[ProxyOutput]) -> ProxyOutputs:
        """What a collate function makes of several."""
        return ProxyOutputs(list(items))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.stack and (stacked := stacked_along_0(cls, args, kwargs or {})) is not None:
            return cls.stack(stacked)
        raise TypeError(
            f"{getattr(func, '__name__', func)} was called on the output of a proxy, which has no values in the worker: the "
            "pipeline runs later, in the training process. Only torch.stack along dimension 0 is possible here; do the "
            "rest inside the pipeline, in batch_transform, or in the model."
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the output of a proxy has no {name!r} in the worker: the pipeline runs later, in the training process"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.call, self.output)

    def __repr__(self) -> str:
        return f"ProxyOutput(pipeline={self.call.proxy.name!r}, output={self.output})"


class ProxyOutputs:
    """Several outputs, stacked: they become one tensor `(B, ...)`, or a list where sizes differ."""

    def __init__(self, items: list[ProxyOutput]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"ProxyOutputs({len(self.items)} of {self.items[0]!r})"


def _collate_outputs(batch: list[ProxyOutput], *, collate_fn_map: Any = None) -> ProxyOutputs:
    return ProxyOutput.stack(batch)


# PyTorch's documented way to teach `default_collate` a type, for collate functions that call it.
default_collate_fn_map[ProxyOutput] = _collate_outputs


def as_array(value: Any, to: Input, pipeline: str) -> tuple[np.ndarray, str | None]:
    """An input's value as DALI takes it, and the path where the value is one.

    Python numbers become int32 and float32, DALI's own constants' dtypes, unless the input declares another.

    Raises:
        ProxyInputError: It is no array, or not of the declared dtype or number of dimensions.
    """
    path: str | None = None
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        value = path.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        array = np.frombuffer(value, np.uint8)
        if path is not None and to.dtype == "int8":
            array = array.view(np.int8)
    elif isinstance(value, torch.Tensor):
        array = value.detach().as_subclass(torch.Tensor).cpu().numpy()
    else:
        array = np.asarray(value)
        if isinstance(value, (bool, int, float, list, tuple)):
            array = _plain_numbers(array, to.dtype)
    found = str(array.dtype)
    if array.dtype.kind not in "biuf" or found == "float128":
        found = f"{type(value).__name__} (as an array: {array.dtype})"
    elif to.dtype in (None, found) and to.ndim in (None, array.ndim):
        return array, path
    raise ProxyInputError(
        f"pipeline {pipeline!r}, input {to.name!r}: expected {describe(to.dtype or 'numbers', to.ndim)}, found "
        f"{describe(found, array.ndim)}. Convert it in the dataset, or change what fn.external_source declares."
    )


def _plain_numbers(array: np.ndarray, declared: str | None) -> np.ndarray:
    """Python's numbers in DALI's dtypes."""
    dtype = declared or {"i": "int32", "f": "float32"}.get(array.dtype.kind)
    if dtype is None or array.dtype.kind not in "biuf":
        return array
    converted = array.astype(dtype)
    if array.dtype.kind == "i" and not np.array_equal(converted, array):
        raise ProxyInputError(
            f"{array} does not fit into {dtype}: pass np.int64(value) and let the pipeline take int64."
        )
    return converted


def describe(dtype: str, ndim: int | None) -> str:
    """A dtype and a number of dimensions in words."""
    return dtype if ndim is None else f"{dtype} with {ndim} dimension{'' if ndim == 1 else 's'}"
