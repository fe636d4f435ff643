"""What an index says of a video, and what it says of files that are none."""

import pickle
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lightning_dali.media import ClipSampler, MediaError, VideoError, VideoIndex, build_index, cut, decode_frames
from lightning_dali.media.bitstream import Start, nal_units, start_kind, with_joint
from tests.media.video_files import make_video, read_number, read_numbers, rewrite


def video(folder: Path, codec: str = "h264", suffix: str = "mp4", **options: Any) -> bytes:
    path = make_video(folder / f"{codec}.{suffix}", codec, **({"width": 96, "height": 80, "num_frames": 20} | options))
    data: bytes = path.read_bytes()
    return data


def test_facts(tmp_path: Path) -> None:
    index = build_index(video(tmp_path, b_frames=2, gop=10, width=102))
    assert (index.codec, index.pix_fmt, index.chroma, index.bit_depth) == ("h264", "yuv420p", "420", 8)
    assert (index.width, index.height, index.size, index.rotation) == (102, 80, (80, 102), 0)
    assert (index.num_frames, index.keyframes.tolist(), index.sample_aspect_ratio) == (20, [0, 10], 1)
    assert index.duration_seconds == pytest.approx(2.0) and index.average_rate == pytest.approx(10)
    assert index.container == "mov,mp4,m4a,3gp,3g2,mj2" and not index.truncated and index.header_num_frames == 20
    assert repr(index) == "VideoIndex(20 frames, 2.000 s, 2 key frames, h264 yuv420p 102x80, rotation=0)"
    ten = build_index(video(tmp_path, "hevc", pix_fmt="yuv422p10le"))
    assert (ten.chroma, ten.bit_depth, ten.profile) == ("422", 10, "Rext")


@pytest.mark.parametrize(("codec", "suffix"), [("h264", "mp4"), ("hevc", "ts"), ("vp9", "webm"), ("mpeg4", "avi")])
def test_bytes_and_back(codec: str, suffix: str, tmp_path: Path) -> None:
    index = build_index(video(tmp_path, codec, suffix, b_frames=2, pts_jitter=(0, 30) if suffix != "avi" else (0,)))
    again = VideoIndex.from_bytes(index.to_bytes())
    assert again == index and hash(again) == hash(index) and pickle.loads(pickle.dumps(index)) == index
    np.testing.assert_array_equal(again.packets.ids, index.packets.ids)
    np.testing.assert_array_equal(again.keyframes, index.keyframes)
    assert again != VideoIndex(pts=[0], time_base=Fraction(1, 10)) and again != "index"
    with pytest.raises(ValueError, match="not a video index of this version"):
        VideoIndex.from_bytes(b"lightning-dali video index 0\n")


def test_large_steps_survive(tmp_path: Path) -> None:
    for pts in ([0], [5, 5], [-3, 0, 2**40], [0, 2**15, 2**15 + 1]):
        index = VideoIndex(pts=pts, time_base=Fraction(1, 90000))
        assert VideoIndex.from_bytes(index.to_bytes()).pts.tolist() == pts


def test_hand_made_indexes_are_checked() -> None:
    with pytest.raises(VideoError, match="zero frames"):
        VideoIndex(pts=[], time_base=Fraction(1, 10))
    with pytest.raises(ValueError, match="must not decrease"):
        VideoIndex(pts=[2, 1], time_base=Fraction(1, 10))


# -- files that are no videos ----------------------------------------------------------------------------------------


def _sound(folder: Path) -> bytes:
    path = folder / "sound.mp4"
    with av.open(path, "w") as out:
        stream: Any = out.add_stream("aac", rate=48000)
        for k in range(4):
            frame = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
            frame.sample_rate, frame.pts = 48000, 1024 * k
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path.read_bytes()


def _picture(_: Path) -> bytes:
    from io import BytesIO

    from PIL import Image

    buffer = BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "png")
    return buffer.getvalue()


def _two_sizes(folder: Path, codec: str, suffix: str) -> bytes:
    small = video(folder, codec, suffix, num_frames=10)
    return small + video(folder, codec, suffix, num_frames=10, width=128, start=1000)


def _two_sizes_remuxed(folder: Path, codec: str) -> bytes:
    video(folder, codec, "mkv", num_frames=10)
    (folder / f"{codec}.mkv").rename(folder / "small.mkv")
    video(folder, codec, "mkv", num_frames=10, width=128)
    target = folder / "both.mkv"
    rewrite(folder / "small.mkv", target, lambda _, data: data, more=folder / f"{codec}.mkv", gap=1000)
    return target.read_bytes()


KEYS = {"encryption_key": "0123456789abcdef" * 2, "encryption_kid": "1" * 32}
BAD: dict[str, tuple[Any, str]] = {
    "audio only": (_sound, r"^no video stream \(audio only: aac\)$"),
    "random bytes": (lambda _: np.random.default_rng(0).bytes(4000), "^not a video: Invalid data"),
    "no bytes": (lambda _: b"", "^empty file$"),
    "text": (lambda _: b"hello\n" * 500, "^not a video"),
    "picture": (_picture, r"^not a video: a picture or text \(png_pipe\)$"),
    "index cut off": (lambda p: video(p)[:-200], r"^truncated: its index is missing \(no moov box\)$"),
    "data cut off": (
        lambda p: video(p, container_options={"movflags": "faststart"})[:1500],
        "^truncated: zero frames of 20$",
    ),
    "header cut off": (lambda p: video(p, "vp9", "webm")[:200], "^truncated: Input/output error$"),
    "header only": (lambda p: build_index(video(p)).header, "^zero frames$"),
    "encrypted": (
        lambda p: video(p, container_options={"encryption_scheme": "cenc-aes-ctr", **KEYS}),
        r"^encrypted \(h264\)$",
    ),
    "other size, H.264": (lambda p: _two_sizes(p, "h264", "ts"), "^changes size on the way: 96x80, then 128x80"),
    "other size, H.265": (lambda p: _two_sizes(p, "hevc", "ts"), "^changes size on the way: 96x80, then 128x80"),
    "other size, VP8": (lambda p: _two_sizes_remuxed(p, "vp8"), "^changes size on the way: 96x80, then 128x80"),
    "other size, VP9": (lambda p: _two_sizes_remuxed(p, "vp9"), "^changes size on the way: 96x80, then 128x80"),
    "other size, MJPEG": (lambda p: _two_sizes_remuxed(p, "mjpeg"), "^changes size on the way: 96x80, then 128x80"),
    "joined recordings": (lambda p: 2 * video(p, suffix="ts", gop=10), r"^time jumps back by .* remux it$"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("as_bytes", [True, False], ids=["bytes", "path"])
def test_bad_files_say_why(kind: str, as_bytes: bool, tmp_path: Path) -> None:
    make, reason = BAD[kind]
    data = make(tmp_path)
    path = tmp_path / "bad.mp4"
    path.write_bytes(data)
    with pytest.raises(VideoError, match=reason) as caught:
        build_index(data if as_bytes else path)
    assert isinstance(caught.value, MediaError)
    assert str(path) not in str(caught.value)  # whoever knows the path adds it
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_playlists_fetch_nothing(tmp_path: Path) -> None:
    video(tmp_path, suffix="ts")
    playlist = tmp_path / "list.m3u8"
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nh264.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(VideoError, match="not a video: a playlist"):
        build_index(playlist)


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build_index(tmp_path / "missing.mp4")
    with pytest.raises(IsADirectoryError):
        build_index(tmp_path)


def test_odd_names(tmp_path: Path) -> None:
    for name in ("50%d.mp4", "a:b.mp4", "concat|x.mp4", "http:x.mp4", "é ü.mp4"):
        (tmp_path / name).write_bytes(video(tmp_path))
        path = str(tmp_path / name)
        assert read_number(decode_frames(path, build_index(path), [3])[0]) == 3


# -- files that are cut off, or changed ------------------------------------------------------------------------------


CUT_OFF = {"vp9": ("webm", 90, 60), "h264": ("ts", 90, 30), "mpeg4": ("avi", 60, 30), "hevc": ("mkv", 90, 80)}


@pytest.mark.parametrize("percent", [0, 1], ids=["more", "less"])
@pytest.mark.parametrize("codec", CUT_OFF)
def test_cut_off_files_have_the_frames_that_are_there(codec: str, percent: int, tmp_path: Path) -> None:
    """Case 26: a file cut to 90 % gives, for 8 frames from the tenth, as many real ones as there are, and says so."""
    suffix, *percents = CUT_OFF[codec]
    whole = video(tmp_path, codec, str(suffix), gop=5)
    data = whole[: len(whole) * int(percents[percent]) // 100]
    index = build_index(data)
    expected = read_numbers(data)[: index.num_frames]  # FFmpeg may show a last frame that is not all there
    assert 0 < index.num_frames <= 20
    assert [read_number(p) for p in decode_frames(data, index, range(index.num_frames))] == expected
    if index.num_frames > 10:
        clip = ClipSampler(frames=range(10, 18), pad="constant").sample(index)
        assert clip.num_real == min(index.num_frames, 18) - 10
        pixels = decode_frames(data, index, clip.frames)
        assert [read_number(p) for p in pixels[clip.mask]] == list(range(10, 10 + clip.num_real))
        assert not pixels[~clip.mask].any()


def test_cut_off_mp4_is_found_out(tmp_path: Path) -> None:
    data = video(tmp_path, gop=5, container_options={"movflags": "faststart"})
    index = build_index(data[: len(data) * 9 // 10])
    assert index.truncated and index.header_num_frames == 20 and 10 < index.num_frames < 20
    whole = build_index(data)
    lying = bytearray(index.to_bytes())
    assert VideoIndex.from_bytes(bytes(lying)).num_frames == index.num_frames < whole.num_frames


def test_header_that_lies_about_the_number(tmp_path: Path) -> None:
    data = bytearray(video(tmp_path, "mpeg4", "avi"))
    struct.pack_into("<I", data, data.index(b"avih") + 24, 999)  # dwTotalFrames
    struct.pack_into("<I", data, data.index(b"strh") + 40, 999)  # dwLength
    index = build_index(bytes(data))
    assert index.header_num_frames == 999 and index.num_frames == 20


@pytest.mark.parametrize("use", [cut, decode_frames])
@pytest.mark.parametrize(("codec", "suffix"), [("h264", "mp4"), ("vp9", "webm")])
def test_index_of_another_file(codec: str, suffix: str, use: Any, tmp_path: Path) -> None:
    data = video(tmp_path, codec, suffix)
    index = build_index(data)
    with pytest.raises(VideoError, match=r"changed since it was indexed: \d+ bytes then, \d+ now"):
        use(data + b"\0", index, [3])


def test_frames_that_do_not_decode(tmp_path: Path) -> None:
    data = bytearray(video(tmp_path, gop=5))
    index = build_index(bytes(data))
    table = index.packets
    for packet in range(10, 15):  # one group of pictures
        start = int(table.positions[packet])
        data[start : start + int(table.sizes[packet])] = bytes(int(table.sizes[packet]))
    with pytest.raises(VideoError, match=r"frames \[11, 12\] of 20 do not decode: damaged or truncated"):
        decode_frames(bytes(data), index, [3, 11, 12, 17])
    assert [read_number(p) for p in decode_frames(bytes(data), index, [3, 17])] == [3, 17]


# -- bits ------------------------------------------------------------------------------------------------------------


def test_start_kinds(tmp_path: Path) -> None:
    def kinds(codec: str, suffix: str, **options: Any) -> list[int]:
        path = tmp_path / f"kinds.{suffix}"
        make_video(path, codec, num_frames=30, gop=10, b_frames=2, width=96, height=80, rate=25, **options)
        return build_index(path).packets.start_kinds.tolist()

    assert kinds("h264", "mp4") == [Start.CLEAN] * 3
    assert kinds("h264", "ts", open_gop=True) == [Start.CLEAN, Start.OPEN, Start.OPEN, Start.OPEN][:3]
    assert kinds("hevc", "mkv") == [Start.CLEAN] * 3
    assert set(kinds("hevc", "mp4", open_gop=True)[1:]) == {Start.JOIN}
    assert set(kinds("mpeg4", "avi")) == {Start.JOIN}
    assert set(kinds("vp9", "webm")) == {Start.CLEAN}


def test_nal_units_by_length_and_by_start_code() -> None:
    lengths = b"\0\0\0\2\x67\1" + b"\0\0\0\3\x65\2\3"
    codes = b"\0\0\0\1\x67\1" + b"\0\0\1\x65\2\3"
    assert [lengths[a:b] for a, b in nal_units(lengths, 4)] == [b"\x67\1", b"\x65\2\3"]
    assert [codes[a:b] for a, b in nal_units(codes, 0)] == [b"\x67\1", b"\x65\2\3"]
    assert list(nal_units(b"", 4)) == list(nal_units(b"", 0)) == []
    assert [b for _, b in nal_units(b"\0\0\xff\xff\x65", 4)] == [5]  # a length that lies
    assert start_kind("h264", lengths, 4) == start_kind("h264", codes, 0) == Start.CLEAN
    assert start_kind("h264", b"\0\0\0\2\x41\x9a", 4) == Start.NONE  # a P slice


def test_joint_makes_a_cra_picture_a_bla_picture() -> None:
    cra = b"\0\0\0\3" + bytes([21 << 1, 1, 7])
    assert with_joint("hevc", cra, 4) == b"\0\0\0\3" + bytes([18 << 1, 1, 7])
    assert with_joint("h264", b"\0\0\0\1\x65", 4) == b"\0\0\0\2\x09\xf0\0\0\0\1\x65"
    assert with_joint("vp9", b"x", 0) == b"x"
