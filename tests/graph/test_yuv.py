"""NV12 to RGB against FFmpeg's swscale, through PyAV."""

from __future__ import annotations

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorRange, Colorspace

from lightning_dali.graph.yuv import rgb_from_nv12

MATRICES = {"bt709": Colorspace.ITU709, "bt601": Colorspace.ITU601, "unspecified": None}


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
def test_colours_are_swscales(matrix: str, full_range: bool) -> None:
    """Within 2 levels (swscale computes in fixed point), and on average within half a one."""
    rng = np.random.default_rng(0)
    low, high = (0, 256) if full_range else (16, 236)
    picture = np.concatenate(
        [rng.integers(low, high, (64, 96), dtype=np.uint8), rng.integers(70, 190, (32, 96), dtype=np.uint8)]
    )
    bounds = ColorRange.JPEG if full_range else ColorRange.MPEG
    frame = av.VideoFrame.from_ndarray(picture, format="nv12")
    frame.color_range = bounds
    # what software decoders give, planes apart, is what NVDEC must look like
    planar = frame.reformat(format="yuv420p", src_color_range=bounds, dst_color_range=bounds)
    planar.color_range = bounds
    options = {} if MATRICES[matrix] is None else {"src_colorspace": MATRICES[matrix]}
    expected = planar.reformat(format="rgb24", **options).to_ndarray()
    found = rgb_from_nv12(torch.from_numpy(picture)[None], matrix=matrix, full_range=full_range)[0].numpy()
    off = np.abs(found.astype(int) - expected.astype(int))
    assert off.max() <= 2 and off.mean() < 0.5, (off.max(), off.mean())
