"""Which of an item's calls the DALI graph does (the *head*), and which follow on the device (the *tail*).

Pure functions over recorded calls; they run in the worker, where the sizes are known, and import no DALI. The head is a
fixed template, `decode -> window -> resize -> window -> flip -> finish`, every stage of which has identity parameters, so
a call that only some samples drew needs no conditional. Windows may stick out of the image (then `fill` shows): pad, crop
and centre crop are all windows. Flips commute with windows (mirrored) and with resizing, so they come last.
"""

# Over 300 lines: what goes into the head decides what is left for the tail; the rules of both are one argument.

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_dali.graph.arguments import Arguments
from lightning_dali.graph.functionals import PILLOW, arguments, bound_call, pillow_name
from lightning_dali.proxies.calls import Call, meets_pil
from lightning_dali.proxies.sizes import Size, center_crop_window, padding_of, resized_size

Window = tuple[int, int, int, int]
"""top, left, height, width; may be negative or larger than what it looks at."""

HEAD_INTERPOLATIONS = ("bilinear", "bicubic")
"""Where DALI's resize gives torchvision's result within one level (docs/decisions)."""
IDENTITY_CALLS = ("to_image", "to_pil_image", "pil_to_tensor")


@dataclass(frozen=True)
class Finish:
    """The last stage: pixels to floating point, normalised, channels first."""

    dtype: torch.dtype = torch.float32
    """dtype of the result."""
    scale: bool = True
    """Whether 255 becomes 1."""
    mean: tuple[float, ...] | None = None
    """Subtracted per channel after scaling."""
    std: tuple[float, ...] | None = None
    """Divided by per channel after that."""


@dataclass
class Head:
    """What the head does to one item."""

    size: Size
    """(H, W) of the decoded image."""
    first: Window | None = None
    """Cut before resizing."""
    resized: Size | None = None
    """(H, W) to resize to."""
    second: Window | None = None
    """Cut after resizing."""
    hflip: bool = False
    vflip: bool = False
    fill: tuple[float, ...] | None = None
    """What a window shows outside of the image; None as long as none sticks out."""
    interpolation: str | None = None
    antialias: bool = True
    float_resize: bool = False
    """Whether the image was floating point when it was resized (no rounding then)."""
    finish: Finish | None = None
    as_float: bool = field(default=False)
    """Whether a scaling conversion to float32 was already passed over."""

    @property
    def out_size(self) -> Size:
        """(H, W) after the head."""
        if self.second is not None:
            return self.second[2:]
        if self.resized is not None:
            return self.resized
        return self.first[2:] if self.first is not None else self.size


def plan_item(size: Size, calls: Sequence[Call], channels: int, *, pil: bool = False) -> tuple[Head, tuple[Call, ...]]:
    """Splits an item's calls into its head and its tail.

    Args:
        size: (H, W) of the decoded image.
        calls: As recorded.
        channels: Of the decoded image.
        pil: Whether the first call met a PIL image: until one makes a tensor the arithmetic is then Pillow's.
    """
    head = Head(size)
    if pil:
        calls = _met_pil(calls)
    for position, call in enumerate(calls):
        if call.name not in IDENTITY_CALLS and not _absorb(head, call):
            return _absorb_finish(head, list(calls[position:]), channels)
    return _absorb_finish(head, [], channels)


def _met_pil(calls: Sequence[Call]) -> list[Call]:
    """Those that met a PIL image by Pillow's names; it is never resized without antialiasing."""
    renamed, pil = [], True
    for call in calls:
        name, kwargs = call
        if pil:
            if name in ("resize", "resized_crop"):
                kwargs = {**kwargs, "antialias": True}
            renamed.append(Call(pillow_name(name), kwargs))
        else:
            renamed.append(call)
        pil = meets_pil((call,), pil)
    return renamed


def _absorb(head: Head, call: Call) -> bool:
    """Tries to take `call` into the head; False leaves the head as it was."""
    name, kwargs = call.name.removesuffix(PILLOW), call.kwargs
    if name == "horizontal_flip":
        head.hflip = not head.hflip
    elif name == "vertical_flip":
        head.vflip = not head.vflip
    elif name == "crop":
        return _window(head, (kwargs["top"], kwargs["left"], kwargs["height"], kwargs["width"]), 0)
    elif name == "center_crop":
        return _window(head, center_crop_window(head.out_size, kwargs["output_size"]), 0)
    elif name == "pad":
        return _pad(head, **kwargs)
    elif name == "resize":
        return _resize(head, **kwargs)
    elif name == "resized_crop":
        return _resized_crop(head, **kwargs)
    elif name == "to_dtype" and not head.as_float:
        if kwargs.get("dtype") != torch.float32 or not kwargs.get("scale"):
            return False
        head.as_float = True
    else:
        return False
    return True


def _fill_values(fill: Any) -> tuple[float, ...]:
    if fill is None:
        return (0.0,)
    return tuple(map(float, fill)) if isinstance(fill, (list, tuple)) else (float(fill),)


def _sticks_out(window: Window, size: Size) -> bool:
    top, left, height, width = window
    return top < 0 or left < 0 or top + height > size[0] or left + width > size[1]


def _covers(window: Window, size: Size) -> bool:
    top, left, height, width = window
    return top <= 0 and left <= 0 and top + height >= size[0] and left + width >= size[1]


def _window(head: Head, window: Window, fill: Any) -> bool:
    """Looks through `window` at what the head gives so far."""
    now = head.out_size
    top, left, height, width = (int(edge) for edge in window)
    if height <= 0 or width <= 0:
        return False
    fills = _fill_values(fill)
    before = head.second if head.resized is not None else head.first
    canvas = head.resized if head.resized is not None else head.size
    out = _sticks_out((top, left, height, width), now)
    if out:
        if (head.fill is not None and head.fill != fills) or (head.as_float and any(fills)):
            return False
        if before is not None and not _covers(before, canvas):
            return False  # what the first window cut away must stay hidden
    if head.hflip:
        left = now[1] - left - width
    if head.vflip:
        top = now[0] - top - height
    offset = before[:2] if before is not None else (0, 0)
    result = (offset[0] + top, offset[1] + left, height, width)
    if out:
        head.fill = fills
    if head.resized is not None:
        head.second = result
    else:
        head.first = result
    return True


def _pad(head: Head, padding: Any, fill: Any = None, padding_mode: str = "constant", **_: Any) -> bool:
    left, top, right, bottom = padding_of(padding)
    if padding_mode != "constant":
        return False
    height, width = head.out_size
    return _window(head, (-top, -left, height + top + bottom, width + left + right), fill)


def _resize(
    head: Head, size: Any, interpolation: Any = "bilinear", max_size: int | None = None, antialias: Any = True, **_: Any
) -> bool:
    now = head.out_size
    new = resized_size(now, size, max_size)
    if new == now:
        return True
    name = str(getattr(interpolation, "value", interpolation))
    if name not in HEAD_INTERPOLATIONS or head.resized is not None or head.second is not None:
        return False
    head.resized, head.interpolation = new, name
    head.antialias = antialias is not False
    head.float_resize = head.as_float
    return True


def _resized_crop(head: Head, top: int, left: int, height: int, width: int, size: Any, **options: Any) -> bool:
    if head.resized is not None:
        return False
    saved = (head.first, head.fill)
    if _window(head, (top, left, height, width), 0) and _resize(head, size=size, **options):
        return True
    head.first, head.fill = saved
    return False


def _absorb_finish(head: Head, rest: list[Call], channels: int) -> tuple[Head, tuple[Call, ...]]:
    """Takes `to_dtype` and `normalize` at the front of the tail into the head's last stage."""
    as_float = head.as_float
    if not as_float and rest and rest[0].name == "to_dtype":
        kwargs = rest[0].kwargs
        if kwargs.get("dtype") is torch.float32 and kwargs.get("scale"):
            as_float, rest = True, rest[1:]
    if not as_float:
        return head, tuple(rest)
    mean = std = ()
    if rest and rest[0].name == "normalize":
        mean, std = (tuple(rest[0].kwargs[key]) for key in ("mean", "std"))
        if len(mean) in (1, channels) and len(std) in (1, channels) and all(std):
            rest = rest[1:]
        else:
            mean = std = ()
    head.as_float = True
    head.finish = _finish(mean, std)
    return head, tuple(rest)


@functools.lru_cache(maxsize=64)
def _finish(mean: tuple[float, ...], std: tuple[float, ...]) -> Finish:
    """One object for all items that finish alike."""
    return Finish(torch.float32, True, tuple(map(float, mean)) or None, tuple(map(float, std)) or None)


def unfinish(head: Head) -> tuple[Call, ...]:
    """The calls that `head.finish` stands for, to be run in the tail when the batch does not share a finish."""
    if head.finish is None:
        return ()
    calls = [Call("to_dtype", {"dtype": head.finish.dtype, "scale": head.finish.scale})]
    if head.finish.mean is not None:
        calls.append(Call("normalize", {"mean": list(head.finish.mean), "std": list(head.finish.std or ())}))
    return tuple(calls)


@dataclass(frozen=True)
class TailStep:
    """One functional on the rows of a lane that recorded it."""

    name: str
    """The functional's name."""
    rows: tuple[int, ...] | None
    """Which rows; None means all."""
    arguments: Arguments
    """Its arguments, for each of those rows."""


def plan_tail(tails: Sequence[Sequence[Call]]) -> list[TailStep]:
    """Aligns the rows' tails into few steps that each run on many rows.

    Every row's calls keep their order. Greedy: first come calls that no row has further back; where every candidate is
    still to come in some row, the one whose rows have most left to do. So a `normalize` waits for the rows that are
    still being augmented, and runs once.

    Args:
        tails: The calls of each row, by the names of their families (`functionals.merge_family`).
    """
    keyed = [[bound_call(*call) for call in calls] for calls in tails]
    at = [0] * len(keyed)
    ahead: dict[Any, list[int]] = {}
    behind: Counter[Any] = Counter()
    for row, calls in enumerate(keyed):
        if calls:
            ahead.setdefault(calls[0][0], []).append(row)
        behind.update(k for k, _ in calls[1:])
    steps: list[TailStep] = []
    while ahead:
        chosen = max(ahead, key=lambda k: (not behind[k], max(len(keyed[r]) - at[r] for r in ahead[k]), len(ahead[k])))
        rows = sorted(ahead.pop(chosen))
        steps.append(_tail_step(chosen[0], [(row, keyed[row][at[row]][1]) for row in rows], len(keyed)))
        for row in rows:
            at[row] += 1
            if at[row] < len(keyed[row]):
                following = keyed[row][at[row]][0]
                behind[following] -= 1
                ahead.setdefault(following, []).append(row)
    return steps


def _tail_step(name: str, members: list[tuple[int, dict[str, Any]]], num_rows: int) -> TailStep:
    """One step from rows and their bound arguments; what a family's kernel does for several rows at once lies together."""
    members = sorted(members, key=lambda member: (member[1].get("_call", ""), member[0]))
    rows = tuple(row for row, _ in members)
    in_order = rows == tuple(range(num_rows))
    return TailStep(name, None if in_order else rows, arguments(name, [kwargs for _, kwargs in members]))
