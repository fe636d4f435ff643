"""`ProxyVideo` stands in for a clip's frames, as `ProxyImage` does for an image's pixels.

Runs in the worker. It has the clip's true `(T, C, H, W)`; torchvision's video kernels record, with one draw for all frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass
from torchvision import tv_tensors

from lightning_dali.media import Clip, VideoIndex, decode_frames
from lightning_dali.proxies.calls import Call
from lightning_dali.proxies.image import IDENTITY_FUNCTIONS, METADATA_FUNCTIONS, replay, stand_in, who_needs_pixels
from lightning_dali.proxies.kernels import register
from lightning_dali.proxies.scope import no_capture


@dataclass(frozen=True, eq=False)
class VideoSource:
    """A clip that is not decoded yet."""

    video: str | bytes
    """Path, or a whole file."""
    index: VideoIndex
    """What demuxing told of the file."""
    clip: Clip
    """Which frames."""
    settled: list[np.ndarray] = field(default_factory=list)
    """The decoded frames, where they had to be decoded here."""
    materialised: list[str] = field(default_factory=list)
    """Why pixels were needed in the worker, if they were."""

    @property
    def path(self) -> str | None:
        """The file, where there is one."""
        return self.video if isinstance(self.video, str) else None

    def frames(self) -> np.ndarray:
        """The decoded frames `(T, H, W, 3)` uint8, upright."""
        if not self.settled:
            self.settled.append(decode_frames(self.video, self.index, self.clip.frames))
        return self.settled[0]

    def __repr__(self) -> str:
        what = os.path.basename(self.path) if self.path else f"{len(self.video)} bytes"
        return f"{what}, {self.index.codec} {self.index.size[1]}x{self.index.size[0]}, {len(self.clip.frames)} frames"


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
            shape = (len(source.clip.frames), 3, *source.index.size)
        self: ProxyVideo = torch.Tensor._make_subclass(cls, stand_in(shape, dtype))
        self.source, self.calls = source, calls
        return self

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
        if reason:
            self.source.materialised.append(reason)
        with no_capture():
            frames = torch.from_numpy(self.source.frames()).permute(0, 3, 1, 2)
            video: tv_tensors.Video = replay(tv_tensors.Video(frames), self.calls)
        return video

    def as_subclass(self, cls: type) -> Any:  # type: ignore[override]
        """The proxy itself: torch's own does not pass through `__torch_function__` and would hand out the stand-in."""
        if cls in (torch.Tensor, tv_tensors.Video, tv_tensors.TVTensor, type(self)):
            return self
        return self.materialise(f"as_subclass({cls.__name__})").as_subclass(cls)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.materialise().as_subclass(torch.Tensor).numpy()
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
        reason = who_needs_pixels(func)

        def pixels(value: Any) -> Any:
            if isinstance(value, ProxyVideo):
                return value.materialise(reason).as_subclass(torch.Tensor)
            return type(value)(map(pixels, value)) if isinstance(value, (list, tuple)) else value

        return func(*(pixels(value) for value in args), **{key: pixels(value) for key, value in kwargs.items()})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
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


register(ProxyVideo, kind="video")
