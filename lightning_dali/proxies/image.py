"""`ProxyImage` stands in for an image's pixels while torchvision decides what to do with them.

Runs in the worker. It has the image's true `(C, H, W)`, its encoded bytes and the calls recorded so far; the tensor
below it is one byte with strides of zero. Whatever really needs pixels (a lambda, numpy, an unknown torch function)
*materialises* it: decode on the CPU, replay the recorded calls with torchvision, go on eagerly.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch._C import DisableTorchFunctionSubclass
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies.calls import Call, meets_pil
from lightning_dali.proxies.pil_face import PILFace
from lightning_dali.proxies.scope import no_capture
from lightning_dali.proxies.source import ImageSource, channels_of_mode

# What may be asked of a stand-in without touching a pixel.
METADATA_FUNCTIONS: set[Any] = {
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
IDENTITY_FUNCTIONS: set[Any] = {
    torch.Tensor.contiguous,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.cpu,
    torch.Tensor.requires_grad_,
    torch.clone,
    torch.detach,
}
DIVISIONS: set[Any] = {
    torch.Tensor.div,
    torch.Tensor.true_divide,
    torch.Tensor.__truediv__,
    torch.div,
    torch.true_divide,
}
UNSCALED = {"dtype": torch.float32, "scale": False}


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that shape and dtype over a single element."""
    return _stand_in(tuple(shape), dtype)


@functools.lru_cache(maxsize=4096)
def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        return torch.zeros((), dtype=dtype).expand(shape)


class ProxyImage(PILFace, tv_tensors.Image):
    """An image whose pixels are still encoded; see the module."""

    source: ImageSource
    calls: tuple[Call, ...]
    mode: str

    @classmethod
    def make(
        cls,
        source: ImageSource,
        *,
        calls: tuple[Call, ...] = (),
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.uint8,
        mode: str | None = None,
    ) -> ProxyImage:
        """Builds a proxy over `source`.

        Args:
            source: The encoded bytes or pixels, with the facts of their header.
            calls: What was recorded so far.
            shape: `(C, H, W)` after those calls; the source's own without any.
            dtype: dtype after those calls.
            mode: The PIL mode it shows; the source's own by default.
        """
        mode = source.mode if mode is None else mode
        if shape is None:
            shape = (channels_of_mode(mode), source.height, source.width)
        self: ProxyImage = torch.Tensor._make_subclass(cls, stand_in(shape, dtype))
        self.source, self.calls, self.mode = source, calls, mode
        return self

    @classmethod
    def of_result(cls, result: torch.Tensor) -> ProxyImage:
        """A proxy around a finished tensor, so that it may stand in a batch beside proxies."""
        return cls.make(ImageSource.from_result(result), shape=result.shape, dtype=result.dtype)

    def record(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> ProxyImage:
        """A new proxy on which `name(image, **kwargs)` was recorded, of `shape` and `dtype` (this one's by default)."""
        return type(self).make(
            self.source,
            calls=(*self.calls, Call(name, kwargs)),
            shape=self.shape if shape is None else shape,
            dtype=self.dtype if dtype is None else dtype,
            mode=self.mode,
        )

    def extend(self, calls: tuple[Call, ...], *, dtype: torch.dtype) -> ProxyImage:
        """A new proxy with more calls recorded, none of which changes the shape."""
        return type(self).make(self.source, calls=(*self.calls, *calls), shape=self.shape, dtype=dtype, mode=self.mode)

    def as_subclass(self, cls: type) -> Any:
        """The proxy itself: torch's own does not pass through `__torch_function__` and would hand out the stand-in."""
        if cls in (torch.Tensor, tv_tensors.Image, tv_tensors.TVTensor, type(self)):
            return self
        # a mask is a target, whose place is the worker
        reason = "" if issubclass(cls, tv_tensors.Mask) else f"as_subclass({cls.__name__})"
        return self.materialise_tensor(reason).as_subclass(cls)

    @property
    def meets_pil(self) -> bool:
        """Whether the next call would meet a PIL image: then its arithmetic is Pillow's."""
        return meets_pil(self.calls)

    # -- pixels, when they are really needed ---------------------------------------------------------------------

    def materialise(self, reason: str | None = None) -> Any:
        """Decodes and replays the recorded calls with torchvision: a PIL image or a `tv_tensors.Image`.

        Args:
            reason: What needs pixels; None looks for the transform that asks, "" says nothing.
        """
        reason = who_needs_pixels() if reason is None else reason
        if reason:
            self.source.note_materialised(reason)
        with no_capture():
            return replay(self.source.decode(), self.calls)

    def materialise_tensor(self, reason: str | None = None) -> torch.Tensor:
        """Like `materialise`, and always a tensor `(C, H, W)`."""
        pixels = self.materialise(reason)
        with no_capture():
            return pixels if isinstance(pixels, torch.Tensor) else F.pil_to_tensor(pixels)

    def materialise_pil(self, reason: str | None = None) -> PIL.Image.Image:
        """Like `materialise`, and always a PIL image."""
        pixels = self.materialise(reason)
        with no_capture():
            image: PIL.Image.Image = F.to_pil_image(pixels) if isinstance(pixels, torch.Tensor) else pixels
        return image

    def become(self, image: PIL.Image.Image) -> None:
        """Stands for another image from now on: this one was changed in place."""
        self.source = ImageSource.from_pixels(np.array(image), mode=image.mode)
        self.calls, self.mode = (), image.mode
        with DisableTorchFunctionSubclass():
            self.data = stand_in((channels_of_mode(image.mode), image.height, image.width), torch.uint8)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        pixels = self.materialise()
        array = np.asarray(pixels)
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
        if func in METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in IDENTITY_FUNCTIONS:
            return args[0]
        if func is torch.stack:
            tensors = kwargs.get("tensors", args[0] if args else ())
            if all(isinstance(item, ProxyImage) for item in tensors) and not kwargs.get("dim", (*args, 0, 0)[1]):
                return ProxyStack(list(tensors))
        if func is torch.Tensor.float or (
            func is torch.Tensor.to and tuple(args[1:]) == (torch.float32,) and not kwargs
        ):
            return args[0]._to_float()
        if func in DIVISIONS and args[1:] in ((255,), (255.0,)) and not kwargs and isinstance(args[0], ProxyImage):
            scaled = args[0]._divided_by_255()
            if scaled is not None:
                return scaled
        reason = who_needs_pixels(func)

        def pixels(value: Any) -> Any:
            if isinstance(value, ProxyImage):
                return value.materialise_tensor(reason)
            return type(value)(map(pixels, value)) if isinstance(value, (list, tuple)) else value

        real = [pixels(value) for value in args]
        result = func(*real, **{key: pixels(value) for key, value in kwargs.items()})
        if args and isinstance(args[0], ProxyImage) and changes_in_place(func):
            args[0].source, args[0].calls = ImageSource.from_result(real[0]), ()
            return args[0] if result is real[0] else result
        return result

    def _to_float(self) -> ProxyImage:
        if self.dtype == torch.float32:
            return self
        return self.record("to_dtype", UNSCALED, dtype=torch.float32)

    def _divided_by_255(self) -> ProxyImage | None:
        """`image / 255` and `image.float() / 255` are what `to_dtype` with `scale=True` does."""
        calls = self.calls
        if self.dtype == torch.float32 and calls and calls[-1] == Call("to_dtype", UNSCALED):
            calls = calls[:-1]
        elif self.dtype != torch.uint8:
            return None
        scaled = Call("to_dtype", {**UNSCALED, "scale": True})
        return type(self).make(
            self.source, calls=(*calls, scaled), shape=self.shape, dtype=torch.float32, mode=self.mode
        )

    def __repr__(self, **_: Any) -> str:
        steps = ", ".join(call.name for call in self.calls)
        return f"ProxyImage({self.source!r}, shape={tuple(self.shape)}, dtype={self.dtype}, calls=[{steps}])"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProxyImage:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ProxyImage stays in its worker: it cannot be pickled")


class ProxyStack:
    """Several proxies that were stacked: they become one tensor `(B, C, H, W)`, or `(B, N, C, H, W)`, in the rank."""

    def __init__(self, items: list[ProxyImage], lead: tuple[int, ...] | None = None) -> None:
        self.items = items
        self.lead = lead
        """The leading dimensions where there are several: (B, N)."""

    @classmethod
    def join(cls, stacks: Sequence[ProxyStack]) -> ProxyStack | None:
        """Stacks of one length, stacked; None if their lengths differ."""
        inner = {stack.lead or (len(stack.items),) for stack in stacks}
        if len(inner) > 1:
            return None
        return cls([item for stack in stacks for item in stack.items], (len(stacks), *inner.pop()))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*(self.lead or (len(self.items),)), *self.items[0].shape))

    def __len__(self) -> int:
        return self.shape[0]


def replay(pixels: Any, calls: Sequence[Call]) -> Any:
    """Runs recorded calls on real pixels with torchvision's own functionals.

    Args:
        pixels: A PIL image or an array `(H, W[, C])`.
        calls: In order.

    Returns:
        A PIL image as long as no call turned it into a tensor, else a tensor `(C, H, W)`.
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


_TENSOR_ONLY = frozenset({"to_dtype", "normalize", "erase", "gaussian_noise", "jpeg", "permute_channels"})


_AUGMENTED = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def changes_in_place(func: Any) -> bool:
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
