"""Frame exactness: a number painted in every frame is read back, through `cut` and through `decode_frames`.

For every codec, constant and variable rate, B-frames, open groups of pictures and a single key frame, and for what
makes containers hard: edit lists, negative times, transport and program streams, fragments, raw streams, hidden frames.
"""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from lightning_dali.media import ClipSampler, CutClip, VideoIndex, build_index, cut, decode_frames
from lightning_dali.media.video_plan import plan, starts_open
from tests.media.video_files import make_video, read_number, read_numbers, rewrite

REAL = Path(__file__).parents[3] / "shared" / "media" / "video"
NUM_FRAMES = 40
JITTER = (0, 30, 60)  # percent of the time between frames, which is 100 ms unless told otherwise: case 25
CONTAINERS = {"vp9": "webm", "vp8": "webm", "mjpeg": "avi", "mpeg4": "avi"}  # the others: mp4
CODECS = ("h264", "hevc", "vp9", "vp8", "mpeg4", "mjpeg", "av1")
STRUCTURES: dict[str, dict[str, Any]] = {
    "b_frames": {"gop": 10, "b_frames": 3},
    "open_gop": {"gop": 10, "b_frames": 3, "open_gop": True},
    "one_key_frame": {"gop": 1000, "b_frames": 2},
}


def make(folder: Path, codec: str, *, variable: bool = False, suffix: str = "", **options: Any) -> Path:
    # AVI has one rate for good, so a variable one goes into MP4
    suffix = suffix or ("mp4" if variable and CONTAINERS.get(codec) == "avi" else CONTAINERS.get(codec, "mp4"))
    between = 1000 // options.get("rate", 10)
    jitter = [late * between // 100 if variable else 0 for late in JITTER]
    size = {"width": 96, "height": 80} | {k: options.pop(k) for k in ("width", "height") if k in options}
    path: Path = make_video(
        folder / f"video.{suffix}", codec, **({"num_frames": NUM_FRAMES, "pts_jitter": jitter} | size | options)
    )
    return path


def cut_numbers(source: Any, index: VideoIndex, frames: Any, **options: Any) -> list[int]:
    """The numbers that a clip has after cutting and decoding the cut; -1 for padding."""
    clip = cut(source, index, frames, **options)
    shown = read_numbers(clip.data)
    assert len(shown) == clip.num_frames
    return [shown[position] if position >= 0 else -1 for position in clip.frames]


def check(source: Any, expected: list[int] | None = None, *, tries: int = 6) -> VideoIndex:
    """Frame k of the index shows the k-th expected number, however it is got at."""
    index = build_index(source)
    expected = list(range(NUM_FRAMES)) if expected is None else expected
    assert index.num_frames == len(expected)
    choices = [[*range(index.num_frames)], [index.num_frames - 1, 0], [0, -1, 0]]
    choices += [random.sample(range(index.num_frames), min(4, index.num_frames)) for _ in range(tries)]
    choices += [[*range(start, index.num_frames, 4)] for start in (0, 13)]
    for frames in filter(None, choices):
        wanted = [expected[frame] if frame >= 0 else -1 for frame in frames]
        assert cut_numbers(source, index, frames) == wanted, frames
        pixels = decode_frames(source, index, frames)
        assert [read_number(p) if f >= 0 else -1 for p, f in zip(pixels, frames, strict=True)] == wanted, frames
    return index


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("variable", [False, True], ids=["constant", "variable"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(codec: str, variable: bool, structure: str, tmp_path: Path) -> None:
    path = make(tmp_path, codec, variable=variable, **STRUCTURES[structure])
    index = check(path, tries=2)
    times = [k / 10 + (JITTER[k % 3] / 1000 if variable else 0) for k in range(NUM_FRAMES)]
    np.testing.assert_allclose(index.seconds - index.start_seconds, times, atol=6e-4)  # WebM rounds to milliseconds
    samplers = [
        *(ClipSampler(4, stride=3, mode=mode) for mode in ("random", "start", "center", "uniform", "all")),
        ClipSampler(5, stride=4, mode="uniform", num_clips=3),
        ClipSampler(4, fps=5, mode="random"),
        ClipSampler(9, fps=8, mode="all", pad="reflect_101"),
        ClipSampler(4, start_seconds=1.0, end_seconds=2.0, pad="constant"),
        ClipSampler(frames=[0, 7, 3, 19]),
        ClipSampler(seconds=[0.5 + index.start_seconds]),
    ]
    for sampler in samplers:
        for number in range(sampler.count(index)):
            clip = sampler.sample(index, clip=number)
            assert cut_numbers(path, index, clip.frames) == clip.frames.tolist()
    assert clip.frames.tolist() == [4 if variable else 5]


ODD_FILES: dict[str, Callable[[Path], Path]] = {
    "transport stream": lambda p: make(p, "h264", suffix="ts", gop=10, b_frames=2, audio=True),
    "transport stream, variable": lambda p: make(p, "hevc", suffix="ts", variable=True, gop=10, b_frames=2),
    "program stream": lambda p: make(p, "mpeg2video", suffix="mpg", rate=25, gop=8, b_frames=2, audio=False),
    "fragments": lambda p: make(
        p, "h264", gop=10, b_frames=2, audio=True, container_options={"movflags": "frag_keyframe+empty_moov"}
    ),
    "interleaved sound": lambda p: make(p, "h264", gop=10, b_frames=2, audio=True),
    "MOV": lambda p: make(p, "mpeg4", suffix="mov", gop=10, b_frames=2, audio=True),
    "Matroska": lambda p: make(p, "hevc", suffix="mkv", gop=10, b_frames=3, open_gop=True, audio=True),
    "FLV": lambda p: make(p, "h264", suffix="flv", gop=10, b_frames=2),
    "AVI without display times": lambda p: make(p, "h264", suffix="avi", gop=10, b_frames=3),
    "AVI with B-frames": lambda p: make(p, "mpeg4", suffix="avi", gop=10, b_frames=2),
    "raw H.264": lambda p: make(p, "h264", suffix="h264", gop=10, b_frames=2),
    "raw H.265": lambda p: make(p, "hevc", suffix="hevc", gop=10, b_frames=2),
    "starts at 5 s": lambda p: make(p, "h264", gop=10, b_frames=2, start=5000),
    "29.97 Matroska": lambda p: make(p, "h264", suffix="mkv", rate=30, gop=10, b_frames=2),
    "4:2:2": lambda p: make(p, "h264", gop=10, b_frames=2, pix_fmt="yuv422p"),
    "10 bits": lambda p: make(p, "hevc", gop=10, b_frames=2, pix_fmt="yuv420p10le"),
    "odd size": lambda p: make(p, "h264", gop=10, width=102, height=78),
    "lossless": lambda p: make(p, "ffv1", suffix="mkv", gop=10),
    "ProRes": lambda p: make(p, "prores_ks", suffix="mov", pix_fmt="yuv422p10le"),
}


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("as_bytes", [False, True], ids=["path", "bytes"])
def test_odd_files(kind: str, as_bytes: bool, tmp_path: Path) -> None:
    path = ODD_FILES[kind](tmp_path)
    check(path.read_bytes() if as_bytes else path, tries=2)


def test_edit_list_hides_what_a_player_hides(tmp_path: Path) -> None:
    """Frames before time zero are decoded, since others refer to them, and have no number."""
    path = make(tmp_path, "h264", gop=10, b_frames=2, start=-500)
    index = check(path, list(range(5, NUM_FRAMES)))
    assert index.start_seconds == 0 and index.keyframes.tolist() == [5, 15, 25]


def test_stream_that_begins_between_key_frames(tmp_path: Path) -> None:
    """Recordings begin anywhere; with open groups of pictures not even all after the first key frame decodes."""
    for codec in ("h264", "hevc"):
        whole = make(tmp_path, codec, suffix="ts", rate=25, gop=10, b_frames=2, open_gop=True)
        path = rewrite(whole, tmp_path / f"{codec}.ts", lambda number, data: data if number >= 15 else None)
        assert build_index(path).num_frames == len([number for number in read_numbers(str(path)) if number >= 0])
        check(path, list(range(20, NUM_FRAMES)))


def test_hidden_frames_are_not_counted(tmp_path: Path) -> None:
    """VP8's alternate references are packets without a picture (RFC 6386, 9.1: show_frame)."""
    hidden = {7, 12, 13, 25}

    def hide(number: int, data: bytes) -> bytes:
        return bytes([data[0] & ~16, *data[1:]]) if number in hidden else data

    path = rewrite(make(tmp_path, "vp8", gop=10), tmp_path / "hidden.webm", hide)
    index = check(path, [k for k in range(NUM_FRAMES) if k not in hidden])
    assert len(index.packets) == NUM_FRAMES


def test_intra_refresh_starts_only_where_it_can(tmp_path: Path) -> None:
    """The container marks key frames in the middle of a refresh; H.264's slice types tell."""
    params = {"preset": "ultrafast", "x264-params": "intra-refresh=1:keyint=10:bframes=0:log-level=none"}
    assert check(make(tmp_path, "h264", options=params)).keyframes.tolist() == [0]


def test_far_apart_frames_are_joined_not_bridged(tmp_path: Path) -> None:
    for codec in ("h264", "hevc", "vp9", "av1", "mpeg4"):
        path = make(tmp_path, codec, num_frames=240, rate=30, gop=10, b_frames=2, open_gop=codec == "hevc")
        index = build_index(path)
        frames = [3, 100, 101, 199, 239]
        assert cut_numbers(path, index, frames) == frames
        assert cut(path, index, frames).num_frames < 50
        assert [read_number(pixels) for pixels in decode_frames(path, index, frames)] == frames
    path = make(tmp_path, "h264", num_frames=240, rate=30, gop=10, b_frames=2, open_gop=True)
    index = build_index(path)
    assert len(plan(index, np.array(frames))) == 1  # recovery points may not be joined
    assert cut_numbers(path, index, frames) == frames


def test_cost_does_not_grow_with_the_video(tmp_path: Path) -> None:
    sizes = []
    for num_frames in (60, 2000):
        path = make(tmp_path, "h264", num_frames=num_frames, rate=30, gop=30, b_frames=2, audio=True)
        index, frames = build_index(path), [num_frames - 31 + k for k in (0, 8, 16)]
        sizes.append(len(cut(path, index, frames).data))
        assert [read_number(pixels) for pixels in decode_frames(path, index, frames)] == [f % 2048 for f in frames]
    assert sizes[1] < 1.5 * sizes[0]


def test_unreferenced_frames_are_left_out(tmp_path: Path) -> None:
    for codec in ("h264", "hevc", "mjpeg"):
        path = make(tmp_path, codec, gop=40, b_frames=3)
        index, frames = build_index(path), [0, 4, 8, 12, 16, 20]
        clip = cut(path, index, frames)
        assert clip.num_frames < 16 and cut_numbers(path, index, frames) == frames


@pytest.mark.skipif(not REAL.exists(), reason="no shared media")
@pytest.mark.parametrize("name", sorted(path.name for path in REAL.glob("*")) if REAL.exists() else [])
def test_real_files_count_as_they_decode(name: str) -> None:
    path = REAL / name
    index = build_index(path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        times = [frame.time for frame in container.decode(stream)]
        claimed = float(stream.duration * stream.time_base) if stream.duration else container.duration / 1e6
    assert index.num_frames == len(times)
    np.testing.assert_allclose(index.seconds, times, atol=1e-6)
    assert index.duration_seconds == pytest.approx(claimed, abs=0.2)  # WebM's header has only the longest stream's
    clip = ClipSampler(8, stride=4).sample(index)
    pixels = decode_frames(path, index, clip.frames)
    assert pixels.shape == (8, *index.size, 3)
    small = cut(path, index, clip.frames)
    with av.open(io.BytesIO(small.data)) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    np.testing.assert_array_equal(pixels, np.stack([shown[position] for position in small.frames]))


def dali_numbers(clip: CutClip, device: str) -> list[int]:
    """The numbers in the wanted frames that DALI's video decoder gives."""
    positions = clip.frames.tolist()
    fn = pytest.importorskip("nvidia.dali.fn")
    from nvidia.dali import pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None if device == "cpu" else 0, exec_dynamic=True)
    def decode() -> Any:
        encoded = fn.external_source(lambda: [np.frombuffer(clip.data, np.uint8)])
        return fn.decoders.video(encoded, device=device, frames=sorted(set(positions)))

    pipeline = decode()
    pipeline.build()
    (decoded,) = pipeline.run()
    frames = np.array(decoded.as_cpu().at(0))
    assert frames.shape[1:] == (clip.height, clip.width, 3)
    top, left, height, width = clip.window or (0, 0, clip.height, clip.width)
    shown = [read_number(frame) for frame in frames[:, top : top + height, left : left + width]]
    return [shown[sorted(set(positions)).index(position)] for position in positions]


def test_dali_reads_the_cuts(tmp_path: Path) -> None:
    """On the CPU DALI decodes VP8, VP9 and MJPEG, from MP4 and from Matroska in memory."""
    for codec, suffix in (("vp9", "webm"), ("vp9", "mp4"), ("vp8", "webm"), ("mjpeg", "avi")):
        path = make(tmp_path, codec, suffix=suffix, num_frames=240, rate=30, gop=10)
        index, frames = build_index(path), [3, 7, 100, 231]
        clip = cut(path, index, frames)
        assert dali_numbers(clip, "cpu") == frames, codec


@pytest.mark.gpu
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("codec", ["h264", "hevc", "mpeg4"])
def test_nvdec_reads_the_cuts(codec: str, structure: str, tmp_path: Path) -> None:
    """Left-out pictures, joints, and H.264's and H.265's leading pictures, for a decoder that is not FFmpeg."""
    size = {"width": 330, "height": 250} if codec == "h264" else {"width": 336, "height": 256}
    path = make(tmp_path, codec, variable=True, num_frames=240, rate=30, **size, **STRUCTURES[structure])
    index = build_index(path)
    for frames in ([3, 7, 11, 15], [*range(13, 77, 4)], [*range(60, 76)], [5, 100, 101, 231], [239, 30, 30]):
        if starts_open(index, np.array(frames)):  # DALI is not given those
            assert codec == "h264" and structure == "open_gop"
            continue
        for uncrop in (False, True) if codec == "h264" else (False,):
            clip = cut(path, index, frames, uncrop=uncrop)
            assert (clip.window is not None) == uncrop
            assert dali_numbers(clip, "mixed") == frames


@pytest.mark.parametrize("frames", [[], [-1], [40], [-2, 0], [[0]]], ids=str)
@pytest.mark.parametrize("use", [cut, decode_frames])
def test_frames_that_are_not_there(use: Any, frames: Any, tmp_path: Path) -> None:
    path = make(tmp_path, "h264")
    with pytest.raises(ValueError, match="frames must"):
        use(path, build_index(path), frames)
