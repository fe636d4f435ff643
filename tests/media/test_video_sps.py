"""What is read from H.264 sequence parameter sets, against FFmpeg's decoder; and clips that show all that is coded.

About 5 s.
"""

from __future__ import annotations

import io
import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lightning_dali.media import VideoError, VideoIndex, build_index, cut
from lightning_dali.media.bitstream import nal_length_bytes, nal_units, parameter_sets
from lightning_dali.media.video_sps import CodedPicture, parameter_units, read_sps, uncroppable
from tests.media.test_video import STRUCTURES, make
from tests.media.video_files import rewrite

QUIET = "scenecut=0:keyint=10:log-level=none"


def x264(params: str = "", **options: Any) -> dict[str, Any]:
    """Options of `make` for an encoder with these parameters."""
    return {"options": {"preset": "medium", "x264-params": f"{QUIET}:{params}".rstrip(":")}, **options}


def picture(path: Path) -> tuple[CodedPicture, VideoIndex]:
    """What is read from the one parameter set in a file's header, and what FFmpeg decodes."""
    with av.open(str(path)) as container:
        extradata = container.streams.video[0].codec_context.extradata
    (unit,) = parameter_units(parameter_sets("h264", extradata, nal_length_bytes("h264", extradata)), 0)
    return read_sps(unit), build_index(path)


# -- reading ---------------------------------------------------------------------------------------------------------

SIZES = [
    (48, 16),
    (64, 48),
    (66, 50),
    (102, 78),
    (176, 144),
    (182, 150),
    (340, 256),
    (344, 256),
    (640, 360),
    (1920, 1080),
]
PROFILES: dict[str, dict[str, Any]] = {
    "baseline": {"options": {"preset": "ultrafast", "x264-params": QUIET}},
    "main": {"options": {"preset": "medium", "profile": "main", "x264-params": QUIET}},
    "high, B-frames": x264("bframes=3"),
    "high, no reordering": x264("bframes=0"),
    "gray": x264(pix_fmt="gray"),
    "4:2:2": x264(pix_fmt="yuv422p"),
    "4:4:4": x264(pix_fmt="yuv444p"),
    "10 bit": x264(pix_fmt="yuv420p10le"),
    "4:2:2, 10 bit": x264(pix_fmt="yuv422p10le"),
    "lossless": x264("qp=0"),
    "level 5.1, intra": x264("level=51:keyint=1"),
}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "{}x{}".format(*size))
def test_sizes(size: tuple[int, int], tmp_path: Path) -> None:
    width, height = size
    found, index = picture(make(tmp_path, "h264", width=width, height=height, num_frames=2))
    assert found.window == (0, 0, height, width) == (0, 0, index.height, index.width)
    assert (found.width, found.height) == (-width // 16 * -16, -height // 16 * -16)
    assert (found.width, found.height) == (index.coded_width, index.coded_height)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(name: str, tmp_path: Path) -> None:
    found, index = picture(make(tmp_path, "h264", width=102, height=78, num_frames=3, **PROFILES[name]))
    chroma = 0 if name == "gray" else {"420": 1, "422": 2, "444": 3}[index.chroma]  # FFmpeg gives gray as 4:2:0
    assert found == CodedPicture(112, 80, (0, 0, 78, 102), chroma, index.bit_depth, True)


def test_fields(tmp_path: Path) -> None:
    """Coded by pairs of rows of macroblocks, and cropped by four rows of 4:2:0."""
    found, index = picture(make(tmp_path, "h264", width=102, height=76, num_frames=3, **x264("tff=1:weightp=0")))
    assert found == CodedPicture(112, 96, (0, 0, 76, 102), 1, 8, False)
    assert (index.coded_width, index.coded_height, index.width, index.height) == (112, 96, 102, 76)


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv422p", "yuv444p"])
def test_rectangles_anywhere(pix_fmt: str, tmp_path: Path) -> None:
    """FFmpeg rounds what it crops at the left down, so that pointers stay aligned."""
    made = make(tmp_path, "h264", width=192, height=96, num_frames=3, **x264("crop-rect=64,4,6,8", pix_fmt=pix_fmt))
    found, index = picture(made)
    assert found.window == (4, 64, 84, 122)
    assert (found.window[2:], (found.width, found.height)) == ((index.height, index.width), (192, 96))


def golomb(value: int) -> str:
    """ue(v)."""
    code = f"{value + 1:b}"
    return "0" * (len(code) - 1) + code


def signed(value: int) -> str:
    """se(v)."""
    return golomb(2 * value - 1 if value > 0 else -2 * value)


def to_bits(nal: bytes) -> str:
    """The payload up to its stop bit."""
    payload = nal[1:].replace(b"\0\0\3", b"\0\0")
    return "".join(f"{byte:08b}" for byte in payload).rstrip("0")[:-1]


def to_nal(bits: str) -> bytes:
    """The way back."""
    bits += "1" + "0" * (-(len(bits) + 1) % 8)
    payload = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return b"\x67" + re.sub(rb"\0\0(?=[\0-\3])", b"\0\0\3", payload)


def scaling_lists(count: int) -> str:
    """Present ones, absent ones, one that ends at once (the default) and one that ends early."""
    varied = "".join(signed((-1) ** k * (k % 5)) for k in range(16))
    lists = ["1" + varied, "0", "1" + signed(-8), "1" + signed(3) + signed(-11), "0", "0"]
    large = "".join(signed(1 if k % 2 else -1) for k in range(64))
    return "".join(lists) + "".join(("1" + large, "0")[k % 2] for k in range(count - 6))


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv444p"])
def test_what_stands_before_the_size(pix_fmt: str, tmp_path: Path) -> None:
    """Scaling lists, the order of pictures told by a cycle, and bytes that prevent start codes: FFmpeg reads the same."""
    options = x264("bframes=0:weightp=0", pix_fmt=pix_fmt)
    data = make(tmp_path, "h264", suffix="h264", width=102, height=78, num_frames=5, **options).read_bytes()
    (plain,) = parameter_units(data, 0)
    head, lists = ("1010110", 8) if pix_fmt == "yuv420p" else ("1001000110", 12)
    before, order = head + "0" + "1", golomb(2)  # no lists, log2_max_frame_num_minus4, pic_order_cnt_type
    bits = to_bits(plain)
    assert bits[24:].startswith(before + order)
    cycle = golomb(1) + "1" + signed(1 << 28) + signed(-(1 << 28)) + golomb(3) + 3 * signed(2)
    changed = to_nal(bits[:24] + head + "1" + scaling_lists(lists) + "1" + cycle + bits[24 + len(before + order) :])
    assert changed.count(b"\0\0\3", 0, 140) > 1
    assert read_sps(changed) == read_sps(plain)
    index = build_index(data.replace(plain, changed))
    assert (index.coded_width, index.coded_height, index.width, index.height) == (112, 80, 102, 78)
    assert index.num_frames == 5


def test_damaged_ones() -> None:
    after = golomb(0) + golomb(2) + golomb(1) + "0" + 2 * golomb(6) + "110"
    whole = to_nal(f"{66:08b}{0:08b}{30:08b}" + golomb(0) + after)
    assert read_sps(whole) == CodedPicture(112, 112, (0, 0, 112, 112), 1, 8, True)
    for size in range(1, len(whole) - 1):
        with pytest.raises(VideoError, match="its sequence parameter set ends early"):
            read_sps(whole[:size])
    crops = to_nal(to_bits(whole)[:-1] + "1" + golomb(28) * 2 + golomb(0) * 2)
    with pytest.raises(VideoError, match="its sequence parameter set crops 112x112 to nothing"):
        read_sps(crops)
    fifth = to_nal(f"{100:08b}{0:08b}{30:08b}" + golomb(0) + golomb(4) + 2 * golomb(0) + "00" + after)
    with pytest.raises(VideoError, match="its sequence parameter set has chroma_format_idc 4, of 0 to 3"):
        read_sps(fifth)


# -- which are uncropped ---------------------------------------------------------------------------------------------

CROPPED = {"width": 102, "height": 78, "num_frames": 12}
DECIDED: dict[str, tuple[bool, dict[str, Any]]] = {
    "baseline": (True, PROFILES["baseline"]),
    "high": (True, x264("bframes=3")),
    "Matroska": (True, x264(suffix="mkv")),
    "transport stream": (True, x264(suffix="ts")),
    "cropped at the top": (True, x264("crop-rect=0,4,6,8", width=112, height=96)),
    "cropped at the left, as FFmpeg does": (True, x264("crop-rect=64,4,6,8", width=192, height=96)),
    "cropped at the left, not as FFmpeg does": (False, x264("crop-rect=2,0,0,0", width=112, height=80)),
    "not cropped": (False, x264(width=112, height=80)),
    "fields": (False, x264("tff=1:weightp=0", height=76)),
    "4:2:2": (False, PROFILES["4:2:2"]),
    "4:4:4": (False, PROFILES["4:4:4"]),
    "gray": (False, PROFILES["gray"]),
    "10 bit": (False, PROFILES["10 bit"]),
}


@pytest.mark.parametrize("name", DECIDED)
def test_which_are_uncropped(name: str, tmp_path: Path) -> None:
    expected, options = DECIDED[name]
    path = make(tmp_path, "h264", **{**CROPPED, **options})
    index = build_index(path)
    clip = cut(path, index, [1, 7], uncrop=True)
    assert (clip.window is not None) == expected
    top, left, height, width = clip.window or (0, 0, index.height, index.width)
    shown = decoded(clip.data)[clip.frames, top : top + height, left : left + width]
    np.testing.assert_array_equal(shown, decoded(path)[[1, 7]])


def test_a_rectangle_of_the_container_alone(tmp_path: Path) -> None:
    """Some files say only in their header that 1088 coded rows are 1080."""
    path = make(tmp_path, "h264", width=112, height=80, num_frames=4)
    data = bytearray(path.read_bytes())
    entry = data.rfind(b"avc1")
    assert struct.unpack_from(">2H", data, entry + 28) == (112, 80)
    struct.pack_into(">2H", data, entry + 28, 106, 76)
    index = build_index(bytes(data))
    assert (index.width, index.height, index.coded_width, index.coded_height) == (106, 76, 112, 80)
    assert cut(bytes(data), index, [2], uncrop=True).window == (0, 0, 76, 106)


def test_several_parameter_sets(tmp_path: Path) -> None:
    """In one packet, changing on the way, and of a multiview stream; repeated ones are one."""
    path = make(tmp_path, "h264", suffix="h264", **{**CROPPED, "num_frames": 24}, **x264("keyint=8:bframes=0"))
    data = path.read_bytes()
    (unit,) = parameter_units(data, 0)
    assert cut(data, build_index(data), [1, 20], uncrop=True).window
    other = to_nal(to_bits(unit)[:24] + golomb(1) + to_bits(unit)[25:])
    both = b"\0\0\0\1" + other + data
    assert cut(both, build_index(both), [1], uncrop=True).window is None
    third = [start for start, _ in nal_units(data, 0) if data[start] & 31 == 7][2]
    changing = data[:third] + bytes([unit[0], unit[1], unit[2] ^ 4, *data[third + 3 : third + 3]]) + data[third + 3 :]
    index = build_index(changing)
    assert index.num_frames == 24 and cut(changing, index, [1, 20], uncrop=True).window is None
    assert not uncroppable(index, {bytes([0x6F]) + unit[1:]}) and not uncroppable(index, set())
    assert uncroppable(index, {unit}) and not uncroppable(index, {unit[:6]})


def test_other_codecs_are_never_uncropped(tmp_path: Path) -> None:
    path = make(tmp_path, "hevc", width=150, height=146)
    index = build_index(path)
    with pytest.raises(ValueError, match="uncrop is for h264, the video is hevc"):
        cut(path, index, [0], uncrop=True)


# -- what an uncropped clip shows ------------------------------------------------------------------------------------


def decoded(source: Any) -> np.ndarray:
    """All frames as FFmpeg gives them, (T, H, W, 3)."""
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("suffix", ["mp4", "ts"])
def test_the_shown_rectangle_is_to_the_bit_what_it_was(suffix: str, structure: str, tmp_path: Path) -> None:
    """Also where clips begin with a recovery point, are joined, or leave pictures out."""
    path = make(tmp_path, "h264", suffix=suffix, width=102, height=78, num_frames=80, **STRUCTURES[structure])
    whole = decoded(path)
    index = build_index(path)
    for frames in [[k] for k in range(0, 80, 7)] + [[3, 7, 11, 15], [*range(13, 25)], [79, 5, 5, -1], [2, 41, 78]]:
        clip = cut(path, index, frames, uncrop=True)
        assert (clip.width, clip.height, clip.window) == (112, 80, (0, 0, 78, 102))
        pixels = decoded(clip.data)
        assert pixels.shape == (clip.num_frames, 80, 112, 3)
        for frame, position in zip(frames, clip.frames.tolist(), strict=True):
            assert position == -1 == frame or np.array_equal(pixels[position][:78, :102], whole[frame])


@pytest.mark.parametrize(("rect", "window"), [("0,4,6,8", (4, 0, 84, 186)), ("64,4,6,8", (4, 64, 84, 122))])
def test_rectangles_that_do_not_begin_at_the_corner(rect: str, window: Any, tmp_path: Path) -> None:
    path = make(tmp_path, "h264", width=192, height=96, num_frames=4, **x264(f"crop-rect={rect}:bframes=0"))
    clip = cut(path, build_index(path), [0, 1, 2, 3], uncrop=True)
    assert clip.window == window
    (top, left, height, width), pixels = window, decoded(clip.data)
    np.testing.assert_array_equal(pixels[:, top : top + height, left : left + width], decoded(path))


def test_nothing_else_changes(tmp_path: Path) -> None:
    """Colours, shape of a pixel, profile; and every place of the header has the coded size."""
    params = "colormatrix=bt709:fullrange=on:transfer=bt709:colorprim=bt709:sar=4/3"
    path = make(tmp_path, "h264", width=102, height=78, rotation=90, **x264(params))
    index = build_index(path)
    clip = cut(path, index, [2, 5], uncrop=True)
    plain, after = build_index(cut(path, index, [2, 5]).data), build_index(clip.data)
    assert (after.color_matrix, after.color_range, after.sample_aspect_ratio) == ("bt709", "full", Fraction(4, 3))
    names = ("profile", "pix_fmt", "color_matrix", "color_range", "sample_aspect_ratio", "rotation", "num_frames")
    assert [getattr(after, name) for name in names] == [getattr(plain, name) for name in names]
    assert (plain.width, plain.height, plain.cropped) == (102, 78, True)
    assert (after.width, after.height, after.cropped) == (112, 80, False)
    assert index.rotation == 90  # the caller's to apply, as before
    path = make(tmp_path, "h264", width=102, height=78)
    data = cut(path, build_index(path), [2, 5], uncrop=True).data
    track, entry = data.rfind(b"tkhd"), data.rfind(b"avc1")
    assert struct.unpack_from(">2I", data, track + 80) == (112 << 16, 80 << 16)
    assert struct.unpack_from(">2H", data, entry + 28) == (112, 80)


def test_parameter_sets_in_packets_are_rewritten_too(tmp_path: Path) -> None:
    """In transport streams, and in Matroska files that have them in both places."""
    stream = make(tmp_path, "h264", suffix="ts", width=102, height=78, num_frames=20, gop=5)
    both = rewrite(stream, tmp_path / "both.mkv", lambda _, data: data)
    for path in (stream, both):
        clip = cut(path, build_index(path), [2, 18], uncrop=True)
        with av.open(io.BytesIO(clip.data)) as container:
            inside = [parameter_units(bytes(packet), 4) for packet in container.demux(video=0) if packet.size]
        assert inside[0] and {read_sps(unit).window for unit in set.union(*inside)} == {(0, 0, 80, 112)}
