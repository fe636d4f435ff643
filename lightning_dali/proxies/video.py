"""`ProxyVideo` stands in for a clip's frames, as `ProxyImage` does for an image's pixels.

Runs in the worker. It has the clip's true `(T, C, H, W)`; torchvision's video kernels record, with one draw for all frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies.calls import Call
from lightning_dali.proxies.image import (
    DIVISIONS,
    IDENTITY_FUNCTIONS,
    METADATA_FUNCTIONS,
    UNSCALED,
    changes_in_place,
    replay,
    stand_in,
    who_needs_pixels,
)
from lightning_dali.proxies.kernels import register
from lightning_dali.proxies.scope import no_capture
from lightning_dali.proxies.video_source import VideoSource


class ProxyVideo(tv_tensors.Video):
    """A clip whose frames are still encoded; see the module."""

    source: VideoSource
    calls: tuple[Call, ...]
    SIZE_ADVICE = (
        "Add a transform that fixes the size, such as v2.Resize((H, W)) or v2.RandomResizedCrop(size), and a ClipSampler with "
        "a fixed number of frames; or pass ragged='list' to get a list of tensors."
    )

    @classmethod
    def make(
        cls,
        source: VideoSource,
        *,
        calls: tuple[Call, ...] = (),
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> ProxyVideo:
        """Builds a proxy over `source`, with the shape `(T, C, H, W)` and dtype that it has after `calls`."""
        if shape is None:
            shape = (len(source.clip.frames), 3, *source.size)
        self: ProxyVideo = torch.Tensor._make_subclass(cls, stand_in(shape, dtype))
        self.source, self.calls = source, calls
        return self

    @classmethod
    def of_result(cls, result: torch.Tensor) -> ProxyVideo:
        """A proxy around a finished tensor, so that it may stand in a batch beside proxies."""
        plain = result.detach().as_subclass(torch.Tensor)
        return cls.make(VideoSource.from_result(plain), shape=plain.shape, dtype=plain.dtype)

    @classmethod
    def of_frames(cls, frames: torch.Tensor) -> ProxyVideo:
        """A proxy around decoded frames `(T, 3, H, W)` uint8: what follows is recorded all the same."""
        pixels = frames.detach().as_subclass(torch.Tensor).permute(0, 2, 3, 1).contiguous().numpy()
        return cls.make(VideoSource.from_frames(pixels))

    def record(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> ProxyVideo:
        """A new proxy on which `name(video, **kwargs)` was recorded, of `shape` and `dtype` (this one's by default)."""
        return type(self).make(
            self.source,
            calls=(*self.calls, Call(name, kwargs)),
            shape=self.shape if shape is None else shape,
            dtype=self.dtype if dtype is None else dtype,
        )

    def materialise(self, reason: str | None = None) -> tv_tensors.Video:
        """Decodes and replays the recorded calls with torchvision."""
        reason = who_needs_pixels() if reason is None else reason
        source = self.source
        if reason and source.result is None:
            source.note_materialised(reason)
        with no_capture():
            if source.result is not None:
                pixels = source.result.clone()
            else:
                pixels = torch.from_numpy(source.frames()).permute(0, 3, 1, 2).clone()  # the user may write to it
            video: tv_tensors.Video = replay(tv_tensors.Video(pixels), self.calls)
        return video

    def as_subclass(self, cls: type) -> Any:
        """The proxy itself: torch's own does not pass through `__torch_function__` and would hand out the stand-in."""
        if cls in (torch.Tensor, tv_tensors.Video, tv_tensors.TVTensor, type(self)):
            return self
        return self.materialise(f"as_subclass({cls.__name__})").as_subclass(cls)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array: np.ndarray = self.materialise().as_subclass(torch.Tensor).numpy()
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
            if all(isinstance(item, ProxyVideo) for item in tensors) and not kwargs.get("dim", (*args, 0, 0)[1]):
                return VideoStack(list(tensors))
        first = args[0] if args else None
        if isinstance(first, ProxyVideo):
            recorded = first._recorded(func, args[1:], kwargs)
            if recorded is not None:
                return recorded
        reason = who_needs_pixels(func)

        def pixels(value: Any) -> Any:
            if isinstance(value, ProxyVideo):
                return value.materialise(reason).as_subclass(torch.Tensor)
            return type(value)(map(pixels, value)) if isinstance(value, (list, tuple)) else value

        real = [pixels(value) for value in args]
        result = func(*real, **{key: pixels(value) for key, value in kwargs.items()})
        if isinstance(first, ProxyVideo) and changes_in_place(func):
            first.source, first.calls = VideoSource.from_result(real[0]), ()
            return first if result is real[0] else result
        return result

    def _recorded(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProxyVideo | None:
        """What people write for `to_dtype`: `video.float()` and `video / 255`."""
        if kwargs or self.source.result is not None:
            return None
        if func is torch.Tensor.float or (func is torch.Tensor.to and tuple(args) == (torch.float32,)):
            return self if self.dtype == torch.float32 else self.record("to_dtype", UNSCALED, dtype=torch.float32)
        if func not in DIVISIONS or tuple(args) not in ((255,), (255.0,)):
            return None
        calls = self.calls
        if calls and calls[-1] == Call("to_dtype", UNSCALED):
            calls = calls[:-1]
        elif self.dtype != torch.uint8:
            return None
        scaled = Call("to_dtype", {**UNSCALED, "scale": True})
        return type(self).make(self.source, calls=(*calls, scaled), shape=self.shape, dtype=torch.float32)

    def __repr__(self, **_: Any) -> str:
        steps = ", ".join(call.name for call in self.calls)
        return f"ProxyVideo({self.source!r}, shape={tuple(self.shape)}, dtype={self.dtype}, calls=[{steps}])"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProxyVideo:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ProxyVideo stays in its worker: it cannot be pickled")

    @classmethod
    def stack(cls, values: list[Any]) -> Any:
        """What the default collate makes of a field of clips."""
        return VideoStack(values)


class VideoStack:
    """Several clips that a collate function stacked: they become one tensor `(B, T, C, H, W)` in the rank."""

    def __init__(self, items: list[ProxyVideo]) -> None:
        self.items = items

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.items), *self.items[0].shape))

    def __len__(self) -> int:
        return len(self.items)


def _uniform_temporal_subsample(inpt: ProxyVideo, num_samples: int) -> Any:
    """Every other call treats all frames alike, so frames may as well be chosen before decoding."""
    if inpt.source.result is not None:
        return F.uniform_temporal_subsample(inpt.materialise("uniform_temporal_subsample"), num_samples)
    positions = torch.linspace(0, inpt.shape[0] - 1, num_samples).long().numpy()
    shape = (num_samples, *inpt.shape[1:])
    return type(inpt).make(inpt.source.subset(positions), calls=inpt.calls, shape=shape, dtype=inpt.dtype)


register(ProxyVideo, kind="video", own={"uniform_temporal_subsample": _uniform_temporal_subsample})
