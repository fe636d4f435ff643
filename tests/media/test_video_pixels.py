"""Rotation, colours and sizes of decoded frames."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from lightning_dali.media import build_index, cut, decode_frames
from tests.media.test_video import make
from tests.media.video_files import paint_number, read_number


@pytest.mark.parametrize("rotation", [90, 180, -90])
@pytest.mark.parametrize("suffix", ["mp4", "mov"])
def test_rotation_is_applied_by_decoding_and_left_to_the_caller_by_cutting(
    rotation: int, suffix: str, tmp_path: Path
) -> None:
    path = make(tmp_path, "h264", suffix=suffix, rotation=rotation, width=96, height=48)
    index = build_index(path)
    assert index.rotation == rotation % 360 and index.size == ((48, 96) if rotation == 180 else (96, 48))
    upright = decode_frames(path, index, [7])[0]
    assert upright.shape == (*index.size, 3)
    turned = np.rot90(paint_number(7, 96, 48), rotation // 90)
    assert np.abs(upright.astype(int) - turned).mean() < 8
    assert decode_frames(path, index, [7], size=(60, 20)).shape == (1, 60, 20, 3)
    clip = cut(path, index, [7])
    with av.open(io.BytesIO(clip.data)) as container:
        frame = next(container.decode(video=0))
        assert (frame.rotation, frame.width, frame.height) == (0, 96, 48)


def _yuv_to_rgb(y: int, u: int, v: int, red: float, blue: float, full: bool) -> np.ndarray:
    """The formulas of BT.601 / BT.709 / BT.2020, with their luma weights of red and blue."""
    luma = y / 255 if full else (y - 16) / 219
    cb, cr = ((c - 128) / (255 if full else 224) for c in (u, v))
    r, b = luma + 2 * (1 - red) * cr, luma + 2 * (1 - blue) * cb
    return np.clip(255 * np.array([r, (luma - red * r - blue * b) / (1 - red - blue), b]), 0, 255)


@pytest.mark.parametrize("color_range", ["limited", "full", "unspecified"])
@pytest.mark.parametrize(
    ("matrix", "tag", "weights"),
    [("bt601", 6, (0.299, 0.114)), ("bt709", 1, (0.2126, 0.0722)), ("unspecified", 2, (0.299, 0.114))],
)
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p"])
def test_colours(
    matrix: str, tag: int, weights: tuple[float, float], color_range: str, pix_fmt: str, tmp_path: Path
) -> None:
    """Within 2 of 255 of the formulas, and what PyAV gives to the bit."""
    path = tmp_path / "colour.mp4"
    yuv = (120, 90, 170)
    with av.open(path, "w") as out:
        stream: Any = out.add_stream("libx264", rate=10, options={"qp": "0", "preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, pix_fmt
        context = stream.codec_context
        context.color_range = {"unspecified": 0, "limited": 1, "full": 2}[color_range]
        context.colorspace = tag
        for _ in range(3):
            frame = av.VideoFrame(64, 64, pix_fmt)
            for plane, value in zip(frame.planes, yuv, strict=True):
                plane.update(bytes([value]) * plane.buffer_size)
            frame.color_range, frame.colorspace = context.color_range, tag
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    index = build_index(path)
    assert index.color_matrix == matrix and index.chroma == pix_fmt[3:6]
    # x264 writes a range where it writes a matrix, and none for limited where it does not
    assert index.color_range in ({"full"} if color_range == "full" else {"limited", "unspecified"})
    pixels = decode_frames(path, index, [1])[0]
    expected = _yuv_to_rgb(*yuv, *weights, color_range == "full")
    assert np.abs(pixels[8:-8, 8:-8] - expected).max() <= 2
    with av.open(path) as container:
        np.testing.assert_array_equal(pixels, next(container.decode(video=0)).to_ndarray(format="rgb24"))
    assert np.abs(decode_frames(path, index, [1], size=(32, 48))[0, 4:-4, 4:-4] - expected).max() <= 3


def test_resizing_is_near_torchvisions(tmp_path: Path) -> None:
    from torchvision.transforms.v2 import functional

    path = make(tmp_path, "h264", width=320, height=240)
    index = build_index(path)
    whole = torch.from_numpy(decode_frames(path, index, [7])).permute(0, 3, 1, 2)
    theirs = functional.resize(whole, [96, 128], antialias=True)[0].permute(1, 2, 0).numpy().astype(int)
    ours = decode_frames(path, index, [7], size=(96, 128))[0]
    assert np.abs(ours - theirs).mean() < 2.5  # blocks of black and white are the worst case
    assert read_number(ours) == 7
