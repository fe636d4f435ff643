"""Tail steps by CUDA kernels of ours (`tail.cu`), a launch or two for each step, in place. Runs in the rank's server thread.

The same steps in torch (`graph.levels`, `graph.pillow`, `graph.color`, `graph.geometry`) are some thirty launches each, and the
thread that starts them has DALI to feed. Here all that the host knows of several steps travels in one copy. What is not
listed in `_STEPS`, and everything where the kernels did not compile, is torch's.
"""

# Over 300 lines: a step is a few lines, and what they share is above them.

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from typing import Any

import numpy as np
import torch

from lightning_dali.graph import color, geometry, levels, pillow
from lightning_dali.graph.arguments import Arguments
from lightning_dali.graph.functionals import PILLOW, arguments, bound_call, merge_family
from lightning_dali.graph.nvrtc import Launch, compile_kernels
from lightning_dali.graph.plan import TailStep
from lightning_dali.graph.tail import apply_alike

logger = logging.getLogger(__name__)

KERNELS = (
    *("measure", "look_up", "saturation", "hue", "put_back", "sharpness", "flip", "erase"),
    *("warp_pil_nearest", "warp_pil_bilinear", "warp_nearest", "warp_bilinear"),
)
MAX_VALUES = 1 << 30
"""Of an image: the kernels count them in 32 bits."""
_THREADS = 256
_MANY_THREADS = 1024  # of a block that reads a whole image
_MOST_BLOCKS = 64  # of an image: the threads go on with what is left
_MOST_IMAGES = 65_535  # of a launch: CUDA's limit of a grid's second dimension
_ALIGNMENT = 16

Array = np.ndarray[Any, Any]
Rows = Array
"""Numbers of images, int32."""


def source() -> str:
    """The kernels, CUDA C++."""
    return (files(__package__) / "tail.cu").read_text()


def load_kernels(device: torch.device) -> TailKernels | None:
    """The kernels for a device, compiled once a process in a second; None where that fails, which is said once, and on the CPU."""
    return None if device.type == "cpu" else _load(device.index)


@functools.lru_cache
def _load(device: int) -> TailKernels | None:
    try:
        kernels = TailKernels(compile_kernels(source(), KERNELS, device=device))
        check(kernels, torch.device("cuda", device))
    except (OSError, RuntimeError) as error:
        logger.info("Augmentations run in torch, more slowly, since the kernels for the GPU cannot be used: %s", error)
        return None
    return kernels


def check(kernels: TailKernels, device: torch.device) -> None:
    """Compares each kernel with torch's arithmetic on the CPU, on a few small images.

    Raises:
        RuntimeError: They differ by more than a level, as with a compiler or a device that has a fault.
    """
    x = torch.randint(0, 256, (2, 3, 12, 10), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for name, kwargs in _CHECKED:
        key, row = bound_call(merge_family(name), {**kwargs, "_call": name} if merge_family(name) != name else kwargs)
        step = TailStep(key[0], None, arguments(key[0], [row] * len(x)))
        found = x.to(device, copy=True)
        kernels.run(found, [step])
        wanted = apply_alike(step.name, x, step.arguments)
        if (found.cpu().int() - wanted.int()).abs().max() > 1:
            raise RuntimeError(f"{name} does not give what it gives on the CPU")


_MOVED = {"angle": 17.0, "translate": [1.0, 2.0], "scale": 0.8, "shear": [5.0, 3.0], "fill": [7.0]}
_CHECKED: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"adjust_contrast{kind}", {"contrast_factor": 0.4}) for kind in ("", PILLOW)),
    *((f"autocontrast{kind}", {}) for kind in ("", PILLOW)),
    *((name, {}) for name in ("equalize", "invert", "horizontal_flip", "vertical_flip")),
    *((f"adjust_saturation{kind}", {"saturation_factor": 0.3}) for kind in ("", PILLOW)),
    *((f"adjust_hue{kind}", {"hue_factor": 0.2}) for kind in ("", PILLOW)),
    ("adjust_sharpness", {"sharpness_factor": 1.7}),
    *(
        (f"affine{kind}", {**_MOVED, "interpolation": mode})
        for kind in ("", PILLOW)
        for mode in ("nearest", "bilinear")
    ),
    ("erase", {"i": 2, "j": 3, "h": 4, "w": 5, "v": [1, 2, 3]}),
)
"""A call for each way through the kernels."""


@dataclass(frozen=True)
class _Part:
    """Bytes of what is uploaded."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Scratch:
    """Memory for that many bytes, which no later launch reads again."""

    size: int


@dataclass
class _Batch:
    """What the images are, and the launches that have been written for them."""

    number: int
    channels: int
    height: int
    width: int
    channels_last: bool
    dtype: torch.dtype
    parts: list[tuple[int, Array]] = field(default_factory=list)
    num_bytes: int = 0
    launches: list[tuple[str, tuple[int, int], int, tuple[Any, ...]]] = field(default_factory=list)
    scratch: int = 0

    @property
    def pixels(self) -> int:
        return self.height * self.width

    @property
    def steps(self) -> tuple[int, int]:
        """`channel_step` and `pixel_step` of tail.cu."""
        return (1, self.channels) if self.channels_last else (self.pixels, 1)

    def put(self, array: Array, *, size: int = 0) -> _Part:
        """Lets an array travel, to where there is room for `size` bytes at least."""
        place = _Part(self.num_bytes, self.num_bytes + max(size, array.nbytes))
        self.parts.append((place.start, array))
        self.num_bytes = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
        return place

    def launch(self, name: str, images: int, work: int, *args: Any) -> None:
        """A launch with `work` items for each of `images` images, args after `x`."""
        blocks = max(1, min(-(-work // _THREADS), _MOST_BLOCKS))
        self.launches.append((name, (blocks, images), _THREADS, args))

    def measure(self, entries: _Part, number: int, tables: _Part) -> None:
        """A block for each entry and channel."""
        grid = (number, self.channels)
        self.launches.append(
            ("measure", grid, _MANY_THREADS, (entries, tables, self.channels, self.pixels, *self.steps))
        )

    def move(self, name: str, rows: Rows, by: Sequence[Array], *more: int) -> None:
        """A launch that makes new images for its rows, by arrays of arguments, and one that puts them in their place."""
        size = self.channels * self.pixels
        out, placed = _Scratch(len(rows) * size), self.put(rows)
        self.scratch = max(self.scratch, out.size)
        arrays = [self.put(array) for array in by]
        sizes = (self.channels, self.height, self.width, *self.steps)
        self.launch(name, len(rows), self.pixels, placed, *arrays, out, *sizes, *more)
        words = size // 8 if size % 8 == 0 else 0
        self.launch("put_back", len(rows), words or size, placed, out, words, size - 8 * words)


class TailKernels:
    """Runs tail steps.

    Args:
        kernels: Those of `KERNELS`.
    """

    def __init__(self, kernels: Mapping[str, Launch]) -> None:
        self._kernels = kernels

    def num_leading(self, x: torch.Tensor, steps: Sequence[TailStep]) -> int:
        """How many of the first steps the kernels take for images such as `x`, `(B, C, H, W)` or `(B, T, C, H, W)`."""
        if x.ndim not in (4, 5) or x.numel() == 0 or x[0].numel() > MAX_VALUES:
            return 0
        if len(x) * (x.shape[1] if x.ndim == 5 else 1) > _MOST_IMAGES:
            return 0
        for number, step in enumerate(steps):
            if step.name not in _STEPS or not _STEPS[step.name][1](x, step.arguments):
                return number
        return len(steps)

    def run(self, x: torch.Tensor, steps: Sequence[TailStep]) -> None:
        """Starts the steps on torch's current stream and returns.

        Args:
            x: Dense in the order of its shape or with its channels last, on the kernels' device; it is written into.
            steps: Such that `num_leading` counts them all.

        Raises:
            ValueError: An argument is out of range; as from the functional.
        """
        images = x.flatten(0, 1) if x.ndim == 5 else x
        number, channels, height, width = images.shape
        batch = _Batch(number, channels, height, width, not images.is_contiguous(), x.dtype)
        for step in steps:
            rows = np.arange(len(x)) if step.rows is None else np.array(step.rows)
            arguments = step.arguments
            if x.ndim == 5:
                frames = x.shape[1]
                rows = (rows[:, None] * frames + np.arange(frames)).reshape(-1)
                arguments = arguments.repeat(frames)
            _STEPS[step.name][0](batch, rows.astype(np.int32), arguments)
        self._start(images, batch)

    def _start(self, x: torch.Tensor, batch: _Batch) -> None:
        on_gpu = x.device.type == "cuda"
        # torch takes the memory back only when it has been read
        host = torch.empty(batch.num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        memory = host.numpy()
        for start, array in batch.parts:
            memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with torch.cuda.device(x.device) if on_gpu else nullcontext():
            data = host.to(x.device, non_blocking=True)
            scratch = torch.empty(batch.scratch, dtype=torch.uint8, device=x.device)

            def given(arg: Any) -> torch.Tensor | int:
                if isinstance(arg, _Part):
                    return data[arg.start : arg.stop]
                return scratch if isinstance(arg, _Scratch) else int(arg)

            for name, grid, threads, args in batch.launches:
                self._kernels[name](grid, (threads, 1), [x, *map(given, args)])


def is_dense(x: torch.Tensor) -> bool:
    """Whether images `(..., C, H, W)` lie in memory as `TailKernels.run` takes them."""
    return x.is_contiguous() or x.movedim(-3, -1).is_contiguous()


# --- levels -----------------------------------------------------------------------------------------------------------

_LOOK_UP = np.dtype([("table", np.int32), ("step", np.int32)])
_MEASURED = np.dtype(
    [("row", np.int32), ("table", np.int32), ("call", np.int32), ("factor", np.float32), ("rest", np.float32)]
)
_CALLS = {
    "adjust_contrast_pil": 0,
    "adjust_contrast": 1,
    "autocontrast_pil": 2,
    "autocontrast": 3,
    "equalize_pil": 4,
    "equalize": 4,
}
"""Of images whose tables depend on their pixels; the numbers are tail.cu's."""


def _write_levels(batch: _Batch, rows: Rows, arguments: Arguments) -> None:
    """`levels.levels`: the tables that depend on arguments alone travel, the device makes the others."""
    entries = np.zeros(len(rows), _LOOK_UP)
    known: list[Array] = []
    measured: list[tuple[slice, Array]] = []
    begin = num_tables = 0
    for call, members in groupby(arguments.column("_call")):
        part = slice(begin, begin + sum(1 for _ in members))
        begin, given = part.stop, arguments[part]
        if call not in _CALLS:
            tables, which = levels.point_tables(call, given)
            entries["table"][part] = num_tables + np.array(which)
            num_tables += len(tables)
            known.append(tables)
            continue
        made = np.zeros(len(given), _MEASURED)
        made["row"], made["call"] = rows[part], _CALLS[call]
        if call.startswith("adjust_contrast"):
            made["factor"], made["rest"] = _factors(given, "contrast_factor", pil=call.endswith(PILLOW))
        measured.append((part, made))
    for part, made in measured:
        made["table"] = entries["table"][part] = num_tables + np.arange(len(made)) * batch.channels
        entries["step"][part] = 1
        num_tables += len(made) * batch.channels
    place = batch.put(np.concatenate(known) if known else np.empty(0, np.uint8), size=num_tables * levels.LEVELS)
    if measured:
        together = np.concatenate([made for _, made in measured])
        batch.measure(batch.put(together), len(together), place)
    batch.launch(
        "look_up", len(rows), batch.pixels, batch.put(rows), batch.put(entries), place, batch.channels, batch.pixels,
        *batch.steps,
    )  # fmt: skip


def _factors(arguments: Arguments, name: str, *, pil: bool) -> tuple[Array, Array]:
    """A factor of each row, and one minus it, float32."""
    values = pillow.factors(arguments, name) if pil else color.checked_values(arguments, name)
    factors = np.array(values, np.float64)
    return factors.astype(np.float32), (1.0 - factors).astype(np.float32)


# --- colour -----------------------------------------------------------------------------------------------------------


def _write_saturation(batch: _Batch, rows: Rows, arguments: Arguments, *, pil: bool) -> None:
    by = np.stack(_factors(arguments, "saturation_factor", pil=pil), -1)
    if batch.channels == 3:  # a gray picture stays as it is
        batch.launch(
            "saturation", len(rows), batch.pixels, batch.put(rows), batch.put(by), int(pil), batch.pixels, *batch.steps
        )


def _write_hue(batch: _Batch, rows: Rows, arguments: Arguments, *, pil: bool) -> None:
    factors = color.checked_values(arguments, "hue_factor", -0.5, 0.5)
    shifts = np.array([int(factor * 255) % 256 for factor in factors] if pil else factors, np.float32)
    if batch.channels == 3:
        batch.launch(
            "hue", len(rows), batch.pixels, batch.put(rows), batch.put(shifts), int(pil), batch.pixels, *batch.steps
        )


def _write_sharpness(batch: _Batch, rows: Rows, arguments: Arguments) -> None:
    _, rests = _factors(arguments, "sharpness_factor", pil=False)
    if batch.height > 2 and batch.width > 2:
        batch.move("sharpness", rows, [rests])


# --- warps ------------------------------------------------------------------------------------------------------------


def _write_warp_pil(batch: _Batch, rows: Rows, arguments: Arguments) -> None:
    """`pillow.warp`, of images that keep their size."""
    distinct, which = arguments.distinct()
    matrices = pillow.matrices(distinct, (batch.height, batch.width))[0][which]
    bilinear = pillow.is_bilinear(arguments[0]["interpolation"])
    table = matrices if bilinear else pillow.fixed_matrices(matrices)
    fill = np.clip(np.trunc(_fill(batch, arguments)), 0, 255)
    name = "warp_pil_bilinear" if bilinear else "warp_pil_nearest"
    batch.move(name, rows, [table, fill])


def _write_warp(batch: _Batch, rows: Rows, arguments: Arguments) -> None:
    """`geometry.warp`."""
    distinct, which = arguments.distinct()
    matrices = geometry.inverse_matrices(distinct, (batch.height, batch.width))[which]
    half = np.repeat(np.array([0.5 * batch.width, 0.5 * batch.height], np.float32), 3)
    table = matrices.astype(np.float32) / half
    fill = _fill(batch, arguments)
    if geometry.sampling_mode(arguments[0]["interpolation"]) == "nearest":
        batch.move("warp_nearest", rows, [table, fill])
    else:
        batch.move("warp_bilinear", rows, [table, fill], int(arguments[0]["fill"] is not None))


def _fill(batch: _Batch, arguments: Arguments) -> Array:
    """One value a channel, float32."""
    fill = arguments[0]["fill"]
    values = [0] if fill is None else list(fill) if isinstance(fill, (list, tuple)) else [fill]
    return np.array(values * (batch.channels // len(values)), np.float32)


# --- whatever the values mean ------------------------------------------------------------------------------------------


def _write_flip(batch: _Batch, rows: Rows, arguments: Arguments, *, down: bool) -> None:
    batch.launch(
        "flip", len(rows), batch.pixels // 2, batch.put(rows), batch.channels, batch.height, batch.width, *batch.steps,
        int(down), batch.dtype.itemsize,
    )  # fmt: skip


def _write_erase(batch: _Batch, rows: Rows, arguments: Arguments) -> None:
    given = [value if isinstance(value, list) else [value] for value in arguments.column("v")]
    colors = torch.tensor([value * (batch.channels // len(value)) for value in given], dtype=batch.dtype)
    top, left, height, width = np.array([arguments.column(name) for name in "ijhw"], np.int64)
    first, last = np.maximum((top, left), 0), np.minimum((top + height, left + width), [[batch.height], [batch.width]])
    windows = np.concatenate((first, np.maximum(last - first, 0))).T.astype(np.int32)
    batch.launch(
        "erase", len(rows), batch.pixels // 4 + 1, batch.put(rows), batch.put(windows), batch.put(colors.view(torch.uint8).numpy()),
        batch.channels, batch.pixels, batch.width, *batch.steps, batch.dtype.itemsize,
    )  # fmt: skip


# --- what fits -------------------------------------------------------------------------------------------------------


def _has_size(x: torch.Tensor, arguments: Arguments) -> bool:
    return x.dtype.itemsize in (1, 2, 4) and not x.dtype.is_complex


def _paints(x: torch.Tensor, arguments: Arguments) -> bool:
    """Whether windows get colours, and not pixels of their own."""
    return _has_size(x, arguments) and all(
        isinstance(value, (int, float)) or (isinstance(value, list) and len(value) in (1, x.shape[-3]))
        for value in arguments.column("v")
    )


def _has_levels(x: torch.Tensor, arguments: Arguments) -> bool:
    """Gray or RGB; what else there is torchvision takes, or refuses in its own words."""
    return x.dtype == torch.uint8 and x.shape[-3] in (1, 3)


def _keeps_size(x: torch.Tensor, arguments: Arguments) -> bool:
    """Whether a warp's images do, and a fill has one level or one a channel."""
    fill = arguments.shared.get("fill")
    values = [0] if fill is None else list(fill) if isinstance(fill, (list, tuple)) else [fill]
    return (
        x.dtype == torch.uint8
        and not (arguments.has("expand") and any(arguments.column("expand")))
        and len(values) in (1, x.shape[-3])
        and all(0 <= value <= 255 for value in values)
    )


_Writer = Callable[[_Batch, Rows, Arguments], None]
_Fits = Callable[[torch.Tensor, Arguments], bool]
_STEPS: dict[str, tuple[_Writer, _Fits]] = {
    "levels": (_write_levels, _has_levels),
    "adjust_saturation": (functools.partial(_write_saturation, pil=False), _has_levels),
    "adjust_saturation_pil": (functools.partial(_write_saturation, pil=True), _has_levels),
    "adjust_hue": (functools.partial(_write_hue, pil=False), _has_levels),
    "adjust_hue_pil": (functools.partial(_write_hue, pil=True), _has_levels),
    "adjust_sharpness": (_write_sharpness, _has_levels),
    "adjust_sharpness_pil": (_write_sharpness, _has_levels),
    "warp": (_write_warp, _keeps_size),
    "warp_pil": (_write_warp_pil, _keeps_size),
    "horizontal_flip": (functools.partial(_write_flip, down=False), _has_size),
    "vertical_flip": (functools.partial(_write_flip, down=True), _has_size),
    "erase": (_write_erase, _paints),
}
"""How a step is written, and whether its kernels do for such images what its functional does."""
