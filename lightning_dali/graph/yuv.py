"""NVDEC's own picture format to RGB, with the arithmetic of FFmpeg's swscale, so that every decoder gives the same colours.

Runs in the rank, on any device. Chroma is taken from the nearest sample, as swscale does at a frame's own size.
"""

from __future__ import annotations

import torch

RED_BLUE_WEIGHTS = {
    "bt709": (0.2126, 0.0722),
    "bt601": (0.299, 0.114),
    "bt2020": (0.2627, 0.0593),
    "smpte240m": (0.212, 0.087),
    "fcc": (0.30, 0.11),
}
"""Kr and Kb of ITU-R BT.709, BT.601, BT.2020, SMPTE 240M and FCC; unspecified is BT.601, swscale's default."""

_TRUNCATION = {False: (-0.25, -0.85), True: (0.1, -0.4)}
"""Added before rounding down, for red and blue, and for green: swscale truncates each of its products where exact arithmetic
would add 0.5. Measured, so that the mean difference is zero; `tests/graph/test_yuv.py` holds it."""


def rgb_from_nv12(pictures: torch.Tensor, *, matrix: str = "unspecified", full_range: bool = False) -> torch.Tensor:
    """RGB of NV12 pictures: (T, H, W, 3) uint8 from (T, H * 3 / 2, W) uint8.

    Args:
        pictures: H rows of luma, then H / 2 rows of interleaved chroma; H and W are even.
        matrix: One of `RED_BLUE_WEIGHTS`, else BT.601.
        full_range: Whether luma is 0 to 255 (JPEG's range), not 16 to 235.
    """
    rows, width = pictures.shape[1:]
    height = rows * 2 // 3
    luma = pictures[:, :height].to(torch.float32)
    chroma = pictures[:, height:].reshape(-1, height // 2, width // 2, 2).to(torch.float32).sub_(128.0)
    red_weight, blue_weight = RED_BLUE_WEIGHTS.get(matrix, RED_BLUE_WEIGHTS["bt601"])
    green_weight = 1.0 - red_weight - blue_weight
    luma_scale, chroma_scale = (1.0, 1.0) if full_range else (255 / 219, 255 / 224)
    if not full_range:
        luma.sub_(16.0).mul_(luma_scale)
    # ITU-R BT.709, section 3: how far each component is from luma, of the two colour differences
    blue_difference = 2 * (1 - blue_weight) * chroma_scale * chroma[..., 0]
    red_difference = 2 * (1 - red_weight) * chroma_scale * chroma[..., 1]
    green_difference = -(blue_weight * blue_difference + red_weight * red_difference) / green_weight
    out = torch.empty((*luma.shape, 3), dtype=torch.uint8, device=pictures.device)
    cells = luma.view(-1, height // 2, 2, width // 2, 2)
    for channel, difference in enumerate((red_difference, green_difference, blue_difference)):
        values = cells + difference[:, :, None, :, None]
        bias = _TRUNCATION[full_range][channel == 1]
        out[..., channel] = values.add_(bias).floor_().clamp_(0, 255).view(-1, height, width).to(torch.uint8)
    return out
