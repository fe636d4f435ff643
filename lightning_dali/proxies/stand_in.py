"""What `ProxyImage` and `ProxyVideo` share: a tensor's face without its numbers.

Runs in the worker. A stand-in has a true shape and dtype, a source (encoded bytes) and the calls recorded so far; the tensor
below it is one number with strides of zero. What torch asks of it is answered from that, recorded, or, where it really needs
pixels (a lambda, numpy, an unknown function), computed on them: the stand-in is *materialised*.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import PIL.Image
import torch
from torch._C import DisableTorchFunctionSubclass
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies.calls import Call

# What may be asked of a stand-in without touching a pixel.
_METADATA: set[Any] = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
    torch.is_tensor,
    torch.is_floating_point,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("requires_grad", "is_cuda", "layout", "is_sparse", "is_quantized")
    ),
}
# What leaves the pixels as they are.
_IDENTITY: set[Any] = {
    torch.Tensor.contiguous,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.cpu,
    torch.Tensor.requires_grad_,
    torch.clone,
    torch.detach,
}
_DIVISIONS: set[Any] = {
    torch.Tensor.div,
    torch.Tensor.true_divide,
    torch.Tensor.__truediv__,
    torch.div,
    torch.true_divide,
}
_UNSCALED = {"dtype": torch.float32, "scale": False}


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that shape and dtype over a single element."""
    return _stand_in(tuple(shape), dtype)


@functools.lru_cache(maxsize=4096)
def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        return torch.zeros((), dtype=dtype).expand(shape)


class StaysHere:
    """Something of one worker's, which copies of its sample share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} stays in its worker: it cannot be pickled")


class StandIn(StaysHere):
    """The tensor half of `ProxyImage` and `ProxyVideo`, which say how they are made, recorded on and decoded."""

    KIND: ClassVar[type]
    """The tv_tensor that it stands in for."""
    STACK: ClassVar[type[Stack]]
    """What several of them become."""

    if TYPE_CHECKING:
        source: Any
        calls: tuple[Call, ...]
        shape: torch.Size
        dtype: torch.dtype

        def record(self, name: str, kwargs: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> Any: ...
        def with_calls(self, calls: tuple[Call, ...], *, dtype: torch.dtype) -> Any: ...
        def materialise(self, reason: str | None = None) -> Any: ...
        def materialise_tensor(self, reason: str | None = None) -> torch.Tensor: ...

    @classmethod
    def stack(cls, items: list[Any]) -> Any:
        """What collating makes of several."""
        return cls.STACK(items)

    def as_subclass(self, cls: type) -> Any:
        """The proxy itself: torch's own does not pass through `__torch_function__` and would hand out the stand-in."""
        if cls in (torch.Tensor, self.KIND, tv_tensors.TVTensor, type(self)):
            return self
        # a mask is a target, whose place is the worker
        reason = "" if issubclass(cls, tv_tensors.Mask) else f"as_subclass({cls.__name__})"
        return self.materialise_tensor(reason).as_subclass(cls)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.materialise())
        return array if dtype is None else array.astype(dtype)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type[torch.Tensor], ...],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _IDENTITY:
            return args[0]
        if func is torch.stack and (stacked := stacked_along_0(cls, args, kwargs)) is not None:
            return cls.stack(stacked)
        first = args[0] if args else None
        if isinstance(first, StandIn):
            recorded = first._recorded(func, args[1:], kwargs)
            if recorded is not None:
                return recorded
        reason = who_needs_pixels(func)
        real, more = real_arguments(args, kwargs, StandIn, lambda proxy: proxy.materialise_tensor(reason))
        result = func(*real, **more)
        if isinstance(first, StandIn) and _changes_in_place(func):
            first.source, first.calls = type(first.source).from_result(real[0]), ()
            return first if result is real[0] else result
        return result

    def _recorded(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What people write for `to_dtype`, recorded: `image.float()` and `image / 255`; None for everything else."""
        if func is torch.Tensor.float or (func is torch.Tensor.to and tuple(args) == (torch.float32,) and not kwargs):
            return self if self.dtype == torch.float32 else self.record("to_dtype", _UNSCALED, dtype=torch.float32)
        if func not in _DIVISIONS or tuple(args) not in ((255,), (255.0,)) or kwargs:
            return None
        calls = self.calls
        if self.dtype == torch.float32 and calls and calls[-1] == Call("to_dtype", _UNSCALED):
            calls = calls[:-1]
        elif self.dtype != torch.uint8:
            return None
        return self.with_calls((*calls, Call("to_dtype", {**_UNSCALED, "scale": True})), dtype=torch.float32)

    def __repr__(self, **_: Any) -> str:
        steps = ", ".join(call.name for call in self.calls)
        return f"{type(self).__name__}({self.source!r}, shape={tuple(self.shape)}, dtype={self.dtype}, calls=[{steps}])"


class Stack:
    """Several stand-ins that were stacked: they become one tensor in the rank, with one or more leading dimensions."""

    def __init__(self, items: list[Any], lead: tuple[int, ...] | None = None) -> None:
        self.items = items
        self.lead = lead
        """The leading dimensions where there are several: (B, N)."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*(self.lead or (len(self.items),)), *self.items[0].shape))

    def __len__(self) -> int:
        return self.shape[0]


def stacked_along_0(kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """What `torch.stack(*args, **kwargs)` stacks, if that is nothing but `kind` along a new first dimension."""
    items = kwargs.get("tensors", args[0] if args else ())
    if kwargs.get("dim", (*args, 0, 0)[1]) or not all(isinstance(item, kind) for item in items):
        return None
    return list(items)


def real_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], kind: type, real: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """A function's arguments with `real(one)` for each `kind` in them, also inside lists and tuples."""

    def made_real(value: Any) -> Any:
        if isinstance(value, kind):
            return real(value)
        return type(value)(map(made_real, value)) if type(value) in (list, tuple) else value

    return [made_real(value) for value in args], {key: made_real(value) for key, value in kwargs.items()}


_TENSOR_ONLY = frozenset({"to_dtype", "normalize", "erase", "gaussian_noise", "jpeg", "permute_channels"})


def replay(pixels: Any, calls: Sequence[Call]) -> Any:
    """Runs recorded calls on real pixels with torchvision's own functionals.

    Args:
        pixels: A PIL image, an array `(H, W[, C])` or a `tv_tensors.Video`.
        calls: In order.

    Returns:
        A PIL image as long as no call turned it into a tensor, else a tensor `(..., C, H, W)`.
    """
    for call in calls:
        functional = getattr(F, call.name)
        if not isinstance(pixels, torch.Tensor) and (
            call.name in _TENSOR_ONLY or (not isinstance(pixels, PIL.Image.Image) and call.name != "to_image")
        ):
            pixels = F.to_image(pixels)
        kwargs = {key: value for key, value in call.kwargs.items() if key != "seed"}
        pixels = functional(pixels, **kwargs)
    if isinstance(pixels, np.ndarray):
        pixels = F.to_image(pixels)
    return pixels


_AUGMENTED = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def _changes_in_place(func: Any) -> bool:
    """Whether a torch function writes into its first argument: then the proxy must stand for what was written."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))


def who_needs_pixels(func: Any = None) -> str:
    """Names what asked for pixels: the nearest transform on the call stack, else the torch function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and not isinstance(owner, torch.Tensor):
            return type(owner).__name__
        frame = frame.f_back
    return getattr(func, "__name__", None) or "numpy"
