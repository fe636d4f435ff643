"""The samples that did not fill a worker's last batch, on their way to another worker.

Runs in the worker. Stand-ins refuse to be pickled, since nothing should carry them out of a worker by accident; here it is meant.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass

from lightning_dali.proxies.stand_in import stand_in
from lightning_dali.sampling import Rest
from lightning_dali.streams.cursor import Drawn


def pack_rest(drawn: list[Drawn], is_proxy: Callable[[Any], bool]) -> Rest:
    """Samples that another worker may use; those that cannot be pickled stay with this one."""
    numbers = tuple(number for number, _ in drawn)
    stream = io.BytesIO()
    try:
        _Pickler(stream, is_proxy).dump([sample for _, sample in drawn])
    except Exception:  # a sample may hold anything, and raise anything
        return Rest(numbers)
    return Rest(numbers, np.frombuffer(stream.getvalue(), np.uint8))


def unpack_rest(rest: Rest) -> list[Drawn]:
    """The samples of `pack_rest`, or of a part of them."""
    samples = pickle.loads(rest.packed)
    return list(zip(rest.numbers, samples[rest.first : rest.first + len(rest)], strict=True))


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, is_proxy: Callable[[Any], bool]) -> None:
        super().__init__(stream, protocol=5)
        self._is_proxy = is_proxy

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not self._is_proxy(obj):
            return NotImplemented
        with DisableTorchFunctionSubclass():
            return _proxy, (type(obj), tuple(obj.shape), obj.dtype, dict(obj.__dict__))


def _proxy(cls: Any, shape: tuple[int, ...], dtype: torch.dtype, attributes: dict[str, Any]) -> Any:
    proxy = torch.Tensor._make_subclass(cls, stand_in(shape, dtype))
    proxy.__dict__.update(attributes)
    return proxy
