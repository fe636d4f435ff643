"""Pillow's arithmetic on a batch, against torchvision's functionals on PIL images: the same numbers, sample by sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.functionals import pillow_name
from lightning_dali.graph.tail import apply_call
from lightning_dali.proxies.sizes import pil_rotation

NEAREST, BILINEAR, BICUBIC = InterpolationMode.NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC
CORNERS = [[0, 0], [52, 0], [52, 36], [0, 36]]
EXACT: list[tuple[str, list[dict[str, Any]]]] = [
    ("adjust_brightness", [{"brightness_factor": f} for f in (0.0, 0.31, 1.0, 1.77)]),
    ("adjust_contrast", [{"contrast_factor": f} for f in (0.0, 0.31, 1.0, 1.77)]),
    ("adjust_saturation", [{"saturation_factor": f} for f in (0.0, 0.31, 1.0, 1.77)]),
    ("adjust_hue", [{"hue_factor": f} for f in (-0.5, -0.083, 0.0, 0.27)]),
    ("adjust_gamma", [{"gamma": g, "gain": 1.3} for g in (0.4, 1.0, 1.7, 3.0)]),
    ("rgb_to_grayscale", [{"num_output_channels": 1}]),
    ("rgb_to_grayscale", [{"num_output_channels": 3}]),
    ("rotate", [{"angle": a, "fill": 7} for a in (-90.0, 0.0, 17.3, 180.0)]),
    ("rotate", [{"angle": 270.0, "expand": True}]),
    ("rotate", [{"angle": 90.0, "expand": True}]),
    ("rotate", [{"angle": 33.0, "expand": True, "fill": [1, 2, 3]}]),
    ("rotate", [{"angle": 90.0, "expand": True, "interpolation": BILINEAR}]),
    ("rotate", [{"angle": a, "center": [10, 5]} for a in (5.0, 90.0, 180.0, 270.0)]),
    ("affine", [{"angle": a, "translate": [3, -2], "scale": 1.2, "shear": [4.0, 2.0]} for a in (0.0, 9.0, -30.0, 90.0)]),
    ("perspective", [{"startpoints": CORNERS, "endpoints": [[4, 3], [50, 1], [47, 33], [2, 30]], "interpolation": NEAREST}]),
    ("resize", [{"size": [21, 33], "interpolation": NEAREST}]),
    ("resize", [{"size": [40, 80], "interpolation": NEAREST}]),
    ("resized_crop", [{"top": t, "left": 2, "height": 20, "width": 30, "size": [17, 19], "interpolation": NEAREST} for t in range(4)]),
]  # fmt: skip
ROUNDED = [
    ("rotate", [{"angle": a, "fill": 9, "interpolation": BILINEAR} for a in (-90.0, 1.0, 17.3, 180.0)]),
    ("affine", [{"angle": a, "translate": [3, -2], "scale": 0.8, "shear": [4.0, 2.0], "interpolation": BILINEAR} for a in (0.0, 9.0, -30.0, 90.0)]),
    ("perspective", [{"startpoints": CORNERS, "endpoints": [[4, 3], [50, 1], [47, 33], [2, 30]], "fill": [9]}]),
    ("resize", [{"size": [21, 33], "interpolation": BILINEAR, "antialias": False}]),
    ("resize", [{"size": [21, 33], "interpolation": BICUBIC}]),
]  # fmt: skip


def _pictures(mode: str) -> list[Image.Image]:
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (37, 53, 3), dtype=np.uint8) for _ in range(2)]
    few = random.integers(0, 3, (37, 53, 3), dtype=np.uint8) * 127  # many grays and ties
    smooth = np.asarray(Image.fromarray(random.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize((53, 37)))
    return [Image.fromarray(pixels).convert(mode) for pixels in (*noise, few, smooth)]


def _both(name: str, rows: list[dict[str, Any]], mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    pictures = _pictures(mode)
    each = rows * len(pictures) if len(rows) == 1 else rows
    wanted = torch.stack(
        [F.pil_to_tensor(getattr(F, name)(one, **row)) for one, row in zip(pictures, each, strict=True)]
    )
    batch = torch.stack([F.pil_to_tensor(one) for one in pictures])
    return apply_call(pillow_name(name), batch, rows), wanted


@pytest.mark.parametrize(("name", "rows"), EXACT, ids=lambda value: value if isinstance(value, str) else "")
def test_colours_and_nearest_pixels_are_pillows(name: str, rows: list[dict[str, Any]]) -> None:
    for mode in ("RGB", "L"):
        if mode == "L":
            rows = [{**row, "fill": 7} if "fill" in row else row for row in rows]
        found, wanted = _both(name, rows, mode)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"{name} {mode}")


@pytest.mark.parametrize(("name", "rows"), ROUNDED, ids=lambda value: value if isinstance(value, str) else "")
def test_filtered_pixels_are_pillows_within_a_rounding(name: str, rows: list[dict[str, Any]]) -> None:
    # noise is the worst case: float32 positions may move a value across a whole number; resizing rounds its weights
    found, wanted = _both(name, rows, "RGB")
    difference = (found.int() - wanted.int()).abs().float()
    assert difference.max() <= (2 if name == "resize" else 1)
    assert difference.mean() < (0.5 if name == "resize" else 0.01)


def test_a_rotated_canvas_has_pillows_size() -> None:
    for size in ((37, 53), (40, 40), (1, 7), (40, 47)):
        picture = Image.new("L", size[::-1])
        for angle in (*range(-180, 181, 15), 0.1, 44.9, 89.99):
            wanted = picture.rotate(angle, expand=True)
            assert pil_rotation(size, angle, None, True)[1] == (wanted.height, wanted.width), (size, angle)


def test_a_filter_that_only_pillow_has_is_refused_by_name() -> None:
    batch = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="nearest or bilinear"):
        apply_call("rotate_pil", batch, [{"angle": math.pi, "interpolation": BICUBIC}])
