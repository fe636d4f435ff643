"""How large torchvision's results are, and which windows its crops look through.

Runs in the worker and, where a batch is planned again, in the rank. Nothing here touches a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Size = tuple[int, int]
"""(H, W)."""
Kwargs = Mapping[str, Any]


def resized_size(old: Size, size: Any, max_size: int | None = None) -> Size:
    """The `(H, W)` that `torchvision.transforms.v2.functional.resize` gives.

    One number is the shorter side, the longer one is truncated, as in torchvision's documentation of `Resize`.
    """
    if size is not None and not isinstance(size, int):
        size = [int(side) for side in size]
        if len(size) == 2:
            return size[0], size[1]
        size = size[0]
    height, width = old
    short, long = sorted(old)
    if size is None:
        assert max_size is not None
        new_short, new_long = int(max_size * short / long), max_size
    else:
        new_short, new_long = int(size), int(size * long / short)
        if max_size is not None and new_long > max_size:
            new_short, new_long = int(max_size * new_short / new_long), max_size
    return (new_short, new_long) if height <= width else (new_long, new_short)


def padding_of(padding: Any) -> tuple[int, int, int, int]:
    """torchvision's padding argument as (left, top, right, bottom)."""
    if isinstance(padding, int):
        return padding, padding, padding, padding
    values = [int(value) for value in padding]
    if len(values) == 1:
        values *= 4
    elif len(values) == 2:
        values *= 2
    left, top, right, bottom = values
    return left, top, right, bottom


def pair(size: Any) -> Size:
    """One number or a sequence of one or two as `(H, W)`."""
    if isinstance(size, int):
        return size, size
    values = [int(value) for value in size]
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


def five_crop_boxes(old: Size, size: Any) -> list[tuple[int, int, int, int]]:
    """(top, left, height, width) of the four corners and the centre, in torchvision's order."""
    height, width = old
    crop_height, crop_width = pair(size)
    if crop_height > height or crop_width > width:
        raise ValueError(f"Requested crop size {(crop_height, crop_width)} is bigger than input size {old}")
    bottom, right = height - crop_height, width - crop_width
    # torchvision's center_crop rounds the half, Python's way (to even)
    middle = (round(bottom / 2.0), round(right / 2.0))
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), middle]
    return [(top, left, crop_height, crop_width) for top, left in corners]


def center_crop_window(old: Size, size: Any) -> tuple[int, int, int, int]:
    """The window (top, left, height, width) of `center_crop`, which may stick out of the image (filled with zeros).

    torchvision pads first when the image is smaller: floor on the left and top side, ceil on the right and bottom side.
    """
    height, width = old
    crop_height, crop_width = pair(size)

    def start(full: int, wanted: int) -> int:
        if wanted > full:
            return -((wanted - full) // 2)
        return round((full - wanted) / 2.0)

    return start(height, crop_height), start(width, crop_width), crop_height, crop_width


def pad_size(old: Size, kwargs: Kwargs) -> Size:
    left, top, right, bottom = padding_of(kwargs["padding"])
    return old[0] + top + bottom, old[1] + left + right


def _quarter_turns(size: Size) -> tuple[tuple[int, ...], ...]:
    """Pillow's transpositions for 0, 90, 180 and 270 degrees, as matrices from output to input pixels."""
    height, width = size
    return (1, 0, 0, 0, 1, 0), (0, -1, width, 1, 0, 0), (-1, 0, width, 0, -1, height), (0, 1, 0, -1, 0, height)


def pil_rotation(
    size: Size, angle: float, center: Sequence[float] | None, expand: bool
) -> tuple[list[float], tuple[int, int]]:
    """What `PIL.Image.Image.rotate` does: the matrix from output to input pixels, and the (H, W) of the result.

    Pillow rounds the sines to fifteen digits, so that quarter turns are exact, and widens the canvas to whole pixels.
    """
    height, width = size
    angle %= 360.0
    if center is None and (angle % 180 == 0 or (angle % 90 == 0 and (expand or width == height))):
        turned = (height, width) if angle % 180 == 0 else (width, height)
        return list(map(float, _quarter_turns(size)[int(angle // 90)])), turned
    turn = -math.radians(angle)
    sine, cosine = round(math.sin(turn), 15), round(math.cos(turn), 15)
    matrix = [cosine, sine, 0.0, -sine, cosine, 0.0]

    def through(x: float, y: float) -> tuple[float, float]:
        a, b, c, d, e, f = matrix
        return a * x + b * y + c, d * x + e * y + f

    middle_x, middle_y = (width / 2.0, height / 2.0) if center is None else center
    x, y = through(-middle_x, -middle_y)
    matrix[2], matrix[5] = x + middle_x, y + middle_y
    if not expand:
        return matrix, size
    xs, ys = zip(*(through(x, y) for x, y in ((0, 0), (width, 0), (width, height), (0, height))), strict=True)
    new_width, new_height = math.ceil(max(xs)) - math.floor(min(xs)), math.ceil(max(ys)) - math.floor(min(ys))
    matrix[2], matrix[5] = through(-(new_width - width) / 2.0, -(new_height - height) / 2.0)
    return matrix, (new_height, new_width)
