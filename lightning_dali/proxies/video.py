"""`ProxyVideo` stands in for a clip's frames, as `ProxyImage` does for an image's pixels.

Runs in the worker. It has the clip's true `(T, C, H, W)`; torchvision's video kernels record, with one draw for all frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from lightning_dali.proxies.calls import Call
from lightning_dali.proxies.kernels import register
from lightning_dali.proxies.scope import no_capture
from lightning_dali.proxies.stand_in import Stack, StandIn, replay, stand_in, who_needs_pixels
from lightning_dali.proxies.video_source import VideoSource


class VideoStack(Stack):
    """Several clips that were stacked: they become one tensor `(B, T, C, H, W)` in the rank."""


class ProxyVideo(StandIn, tv_tensors.Video):
    """A clip whose frames are still encoded; see the module."""

    source: VideoSource
    calls: tuple[Call, ...]
    KIND = tv_tensors.Video
    STACK = VideoStack
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

    def with_calls(self, calls: tuple[Call, ...], *, dtype: torch.dtype) -> ProxyVideo:
        """A new proxy with `calls` instead of this one's, none of which changes the shape."""
        return type(self).make(self.source, calls=calls, shape=self.shape, dtype=dtype)

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

    def materialise_tensor(self, reason: str | None = None) -> torch.Tensor:
        """Like `materialise`, as a plain tensor `(T, C, H, W)`."""
        plain: torch.Tensor = self.materialise(reason).as_subclass(torch.Tensor)
        return plain

    def _recorded(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return None if self.source.result is not None else super()._recorded(func, args, kwargs)


def _uniform_temporal_subsample(inpt: ProxyVideo, num_samples: int) -> Any:
    """Every other call treats all frames alike, so frames may as well be chosen before decoding."""
    if inpt.source.result is not None:
        return F.uniform_temporal_subsample(inpt.materialise("uniform_temporal_subsample"), num_samples)
    positions = torch.linspace(0, inpt.shape[0] - 1, num_samples).long().numpy()
    shape = (num_samples, *inpt.shape[1:])
    return type(inpt).make(inpt.source.subset(positions), calls=inpt.calls, shape=shape, dtype=inpt.dtype)


register(ProxyVideo, kind="video", own={"uniform_temporal_subsample": _uniform_temporal_subsample})
