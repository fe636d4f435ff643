"""`ProxyImage` stands in for an image's pixels while torchvision decides what to do with them.

Runs in the worker. It has the image's true `(C, H, W)`, its encoded bytes and the calls recorded so far. Whatever really
needs pixels *materialises* it: decode on the CPU, replay the recorded calls with torchvision, go on eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lightning_dali.proxies.stand_in import Stack, StandIn, replay, stand_in, who_needs_pixels


class ProxyStack(Stack):
    """Several proxies that were stacked: they become one tensor `(B, C, H, W)`, or `(B, N, C, H, W)`, in the rank."""

    @classmethod
    def join(cls, stacks: Sequence[ProxyStack]) -> ProxyStack | None:
        """Stacks of one length, stacked; None if their lengths differ."""
        inner = {stack.lead or (len(stack.items),) for stack in stacks}
        if len(inner) > 1:
            return None
        return cls([item for stack in stacks for item in stack.items], (len(stacks), *inner.pop()))


class ProxyImage(PILFace, StandIn, tv_tensors.Image):
    """An image whose pixels are still encoded; see the module."""

    source: ImageSource
    calls: tuple[Call, ...]
    mode: str
    KIND = tv_tensors.Image
    STACK = ProxyStack

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

    def with_calls(self, calls: tuple[Call, ...], *, dtype: torch.dtype) -> ProxyImage:
        """A new proxy with `calls` instead of this one's, none of which changes the shape."""
        return type(self).make(self.source, calls=calls, shape=self.shape, dtype=dtype, mode=self.mode)

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
