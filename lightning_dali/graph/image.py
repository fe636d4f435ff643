"""The DALI graph of an image lane: decode, window, resize, window, flip, finish; then the tail.

`ImageSpec` is written in the worker; building and running it happens in the rank. DALI is imported when it is built.
"""

# Over 300 lines: the template's stages, their parameters and the graph that runs them are read side by side.

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_dali.graph.plan import Finish, Head
from lightning_dali.graph.run import run_tail
from lightning_dali.graph.spec import Device, Executor, LaneSpec

if TYPE_CHECKING:
    from lightning_dali.wire import Lane


@dataclass(frozen=True)
class ImageSpec(LaneSpec):
    """Which stages of the image template a lane needs."""

    mode: str = "RGB"
    """"RGB" or "L"."""
    encoded: bool = True
    """Whether items are encoded bytes; else arrays (H, W, C) of uint8."""
    first: bool = False
    """Whether some item cuts a window before resizing."""
    first_pads: bool = False
    """Whether such a window may stick out of the image."""
    resize: bool = False
    """Whether some item is resized."""
    interpolation: str = "bilinear"
    antialias: bool = True
    float_resize: bool = False
    """Whether the resized image is kept unrounded."""
    second: bool = False
    """Whether some item cuts a window after resizing (it may stick out)."""
    hflip: bool = False
    """Whether some item is mirrored."""
    vflip: bool = False
    """Whether some item is turned upside down."""
    fill: tuple[float, ...] = (0.0,)
    """Colour outside of the image, one or one per channel."""
    finish: Finish | None = None
    """The last stage, if the lane's items share it."""

    @classmethod
    def of_head(cls, head: Head, *, mode: str, encoded: bool) -> ImageSpec:
        """The spec that one item needs."""
        first = head.first
        pads = first is not None and (
            first[0] < 0 or first[1] < 0 or first[0] + first[2] > head.size[0] or first[1] + first[3] > head.size[1]
        )
        return _image_spec(
            mode,
            encoded,
            first is not None,
            pads,
            head.resized is not None,
            head.interpolation or "bilinear",
            head.antialias,
            head.float_resize,
            head.second is not None,
            head.hflip,
            head.vflip,
            head.fill or (0.0,),
            head.finish,
        )

    def merge(self, other: LaneSpec) -> ImageSpec | None:
        """Stages have identity parameters, so the union serves both; what is static must agree."""
        if not isinstance(other, ImageSpec):
            return None
        if (self.mode, self.encoded, self.finish) != (other.mode, other.encoded, other.finish):
            return None
        pads = (self.first_pads or self.second) and (other.first_pads or other.second)
        if pads and self.fill != other.fill:
            return None
        kernel = ("interpolation", "antialias", "float_resize")
        if self.resize and other.resize and any(getattr(self, name) != getattr(other, name) for name in kernel):
            return None
        resampling = self if self.resize else other
        return replace(
            self,
            first=self.first or other.first,
            first_pads=self.first_pads or other.first_pads,
            resize=self.resize or other.resize,
            **{name: getattr(resampling, name) for name in kernel},
            second=self.second or other.second,
            hflip=self.hflip or other.hflip,
            vflip=self.vflip or other.vflip,
            fill=self.fill if self.first_pads or self.second else other.fill,
        )

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the DALI pipeline."""
        return ImageExecutor(self, device, max_batch_size=max_batch_size)

    def describe(self) -> list[tuple[str, str]]:
        """The stages in order."""
        steps = ["decode" if self.encoded else "pixels from memory"]
        steps += ["window" + (f" (fill {self.fill})" if self.first_pads else "")] if self.first else []
        antialias = ", antialias" if self.antialias else ""
        steps += [f"resize ({self.interpolation}{antialias})"] if self.resize else []
        steps += ["window"] if self.second else []
        steps += ["flip"] if self.hflip or self.vflip else []
        if self.finish is not None:
            steps.append(f"to {self.finish.dtype}" + (" and normalize" if self.finish.mean else ""))
        return [(step, "DALI") for step in steps]


@functools.lru_cache(maxsize=256)
def _image_spec(*fields: Any) -> ImageSpec:
    """One object for all items that need the same; in the order of the fields."""
    return ImageSpec(*fields)


def head_inputs(spec: ImageSpec, heads: list[Head]) -> dict[str, np.ndarray]:
    """The per-item parameters of every stage that `spec` has, identity where an item does not use it.

    Returns:
        int32 arrays: `decoded` `(n, 2)`, the decoded sizes; windows `(n, 2)` twice; flips `(n,)`. float32 `size` `(n, 2)`.
    """
    n = len(heads)
    inputs: dict[str, np.ndarray] = {"decoded": np.array([head.size for head in heads], np.int32).reshape(n, 2)}
    if spec.first:
        windows = np.array([head.first or (0, 0, *head.size) for head in heads], np.int32).reshape(n, 4)
        inputs["first_start"], inputs["first_shape"] = windows[:, :2].copy(), windows[:, 2:].copy()
    if spec.resize:
        cut = inputs.get("first_shape", inputs["decoded"]).tolist()
        resized = [head.resized or size for head, size in zip(heads, cut, strict=True)]
        inputs["size"] = np.array(resized, np.float32).reshape(n, 2)
    if spec.second:
        whole = _size_before(inputs, "second_shape").tolist()
        windows = np.array(
            [head.second or (0, 0, *size) for head, size in zip(heads, whole, strict=True)], np.int32
        ).reshape(n, 4)
        inputs["second_start"], inputs["second_shape"] = windows[:, :2].copy(), windows[:, 2:].copy()
    if spec.hflip:
        inputs["hflip"] = np.array([head.hflip for head in heads], np.int32)
    if spec.vflip:
        inputs["vflip"] = np.array([head.vflip for head in heads], np.int32)
    return inputs


_SIZES_IN_ORDER = ("decoded", "first_shape", "size", "second_shape")


def _size_before(inputs: dict[str, np.ndarray], stage: str) -> np.ndarray:
    """The items' sizes `(n, 2)` that come into a stage."""
    known = [name for name in _SIZES_IN_ORDER[: _SIZES_IN_ORDER.index(stage)] if name in inputs]
    return inputs[known[-1]]


def identity_input(name: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """What a stage that no item of a batch uses is fed, so that it changes nothing."""
    if name.endswith("_start"):
        return np.zeros_like(inputs["decoded"])
    if name.endswith("_shape"):
        return _size_before(inputs, name).astype(np.int32)
    if name == "size":
        return _size_before(inputs, name).astype(np.float32)
    return np.zeros(len(inputs["decoded"]), np.int32)


class ImageExecutor:
    """One DALI pipeline for an image lane."""

    def __init__(self, spec: ImageSpec, device: Device, *, max_batch_size: int) -> None:
        from lightning_dali.graph.dali import new_pipeline

        self.spec, self.device = spec, device
        self._pipeline = new_pipeline(device, max_batch_size=max_batch_size)
        with self._pipeline:
            self._pipeline.set_outputs(_graph(spec, device))
        self._pipeline.build()
        self._inputs = [name for name in stage_inputs(spec)]

    def feed(self, lane: Lane) -> None:
        """Hands one batch to DALI; returns at once."""
        from lightning_dali.graph.dali import tensors

        self._pipeline.feed_input("data", tensors(lane.data))
        for name in self._inputs:  # some stage may have been added for other batches than this one
            if name not in lane.inputs:
                lane.inputs[name] = identity_input(name, lane.inputs)
            self._pipeline.feed_input(name, lane.inputs[name])
        self._pipeline._run_once()  # `schedule_run` would wait for a full prefetch queue first

    def collect(self, lane: Lane) -> torch.Tensor | list[torch.Tensor]:
        """The oldest batch: `(n, C, H, W)`, or a list of `(C, H, W)` when sizes differ."""
        from lightning_dali.graph.dali import collect

        (output,) = collect(self._pipeline, self.device)
        if self.spec.finish is None or self.device.channels_last:
            output = [channels_first(item) for item in output] if isinstance(output, list) else channels_first(output)
        return run_tail(output, lane.tail, channels_last=self.device.channels_last)

    def close(self) -> None:
        """Frees the pipeline."""
        self._pipeline = None


def channels_first(pixels: torch.Tensor) -> torch.Tensor:
    """(..., H, W, C) seen as (..., C, H, W)."""
    return pixels.movedim(-1, -3)


def stage_inputs(spec: ImageSpec) -> list[str]:
    """Names of the inputs beside the data, in feeding order."""
    names: deque[str] = deque()
    if spec.first:
        names.extend(["first_start", "first_shape"])
    if spec.resize:
        names.append("size")
    if spec.second:
        names.extend(["second_start", "second_shape"])
    if spec.hflip:
        names.append("hflip")
    if spec.vflip:
        names.append("vflip")
    return list(names)


def _graph(spec: ImageSpec, device: Device) -> Any:
    """Builds the template inside the current pipeline."""
    from nvidia.dali import fn

    layout = "HWC" if device.channels_last else "CHW"
    if not spec.encoded:
        images = fn.external_source(name="data", device="cpu", no_copy=True, layout="HWC")
        return stages(images if device.index is None else images.gpu(), spec, layout=layout)
    if device.index is None and spec.first and not spec.first_pads:
        # on the CPU decoding only the window pays; on the GPU it keeps the hardware decoder idle
        window = {"start": source("first_start"), "shape": source("first_shape"), "axis_names": "HW"}
        images = fn.decoders.image_slice(source("data"), device="cpu", **window, **_decoding(spec.mode))
        return stages(images, spec, layout=layout, cut_done=True)
    return stages(decoded(spec.mode, device), spec, layout=layout)


def _decoding(mode: str) -> dict[str, Any]:
    from nvidia.dali import types

    kind = types.RGB if mode == "RGB" else types.GRAY
    return {"output_type": kind, "adjust_orientation": False, "use_fast_idct": False}


def decoded(mode: str, device: Device) -> Any:
    """Whole images (HWC) from the encoded files in the input `data`."""
    from nvidia.dali import fn

    if device.index is None:
        return fn.decoders.image(source("data"), device="cpu", **_decoding(mode))
    return fn.decoders.image(
        source("data"),
        device="mixed",
        hw_decoder_load=device.hw_decoder_load,
        # libjpeg's chroma upsampling, as PIL has it: also the faster and steadier one (docs/decisions/0002)
        jpeg_fancy_upsampling=True,
        **_decoding(mode),
    )


def source(name: str) -> Any:
    """An input that is fed from host memory."""
    from nvidia.dali import fn

    return fn.external_source(name=name, device="cpu", no_copy=True)


def stages(images: Any, spec: ImageSpec, *, layout: str, cut_done: bool = False, prefix: str = "") -> Any:
    """The template after decoding.

    Args:
        images: Decoded images (HWC), or clips of frames (FHWC): every frame gets the same.
        spec: Which stages there are.
        layout: Order of the axes that the finish gives.
        cut_done: Whether decoding has cut the first window already.
        prefix: Of its inputs' names, where a graph has several templates.
    """
    from nvidia.dali import fn, types

    fill = [float(value) for value in spec.fill]
    if spec.first and not cut_done:
        images = _cut(
            images, source(f"{prefix}first_start"), source(f"{prefix}first_shape"), fill, pads=spec.first_pads
        )
    if spec.resize:
        interpolation = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}[spec.interpolation]
        images = fn.resize(
            images,
            size=source(f"{prefix}size"),
            interp_type=interpolation,
            antialias=spec.antialias,
            **({"dtype": types.FLOAT} if spec.float_resize else {}),
        )
    if spec.second:
        images = _cut(images, source(f"{prefix}second_start"), source(f"{prefix}second_shape"), fill, pads=True)
    mirror = source(f"{prefix}hflip") if spec.hflip else 0
    if spec.vflip:
        images = fn.flip(images, horizontal=mirror, vertical=source(f"{prefix}vflip"))
    elif spec.hflip and spec.finish is None:
        images = fn.flip(images, horizontal=mirror)
    if spec.finish is None:
        return images
    return _finish(images, spec.finish, layout, mirror=0 if spec.vflip else mirror)


def _cut(images: Any, start: Any, shape: Any, fill: list[float], *, pads: bool) -> Any:
    from nvidia.dali import fn

    policy = {"out_of_bounds_policy": "pad", "fill_values": fill} if pads else {}
    return fn.slice(images, start=start, shape=shape, axis_names="HW", **policy)


def _finish(images: Any, finish: Finish, layout: str, *, mirror: Any) -> Any:
    """to_dtype, normalize, the order of the axes, and mirroring on the way, in DALI's one operator."""
    from nvidia.dali import fn, types

    top = 255.0 if finish.scale else 1.0
    mean = [top * value for value in finish.mean or (0.0,)]
    std = [top * value for value in finish.std or (1.0,)]
    return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout=layout, mean=mean, std=std, mirror=mirror)
