"""Which frame is which, for every codec, structure and container, through the datamodule; cases 25 and 26; real files.

A number is painted in every frame and read back.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import av
import pytest

from lightning_dali import ClipSampler
from lightning_dali.media import build_index
from tests.media.video_files import make_video
from tests.video.clips import Videos, batches, numbers
from tests.video.codecs import JITTER, KINDS, STRUCTURES, WANTED, Kind, decoder_on_gpu, shown, variable_rate

REAL = Path(__file__).parents[3] / "shared" / "media" / "video"
COMMON = [kind for kind in KINDS if kind.name in ("H.264", "HEVC", "VP8", "VP9", "AV1", "MPEG-4", "Motion JPEG")]


@pytest.mark.parametrize("variable", [False, True], ids=["constant", "variable"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_codec_gives_the_wanted_frames(kind: Kind, variable: bool, tmp_path: Path) -> None:
    sort = variable_rate(kind) if variable else kind
    if sort is None:
        pytest.skip("has no variable rate")
    path = sort.make(tmp_path)
    for frames in WANTED:
        assert shown(path, tmp_path, frames) == frames


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", COMMON, ids=lambda kind: kind.name)
def test_every_structure_gives_the_wanted_frames(kind: Kind, structure: str, tmp_path: Path) -> None:
    path = kind.make(tmp_path, **STRUCTURES[structure])
    for frames in WANTED:
        assert shown(path, tmp_path, frames) == frames


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "decoder", ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("nvdec", "dali", "auto"))]
)
def test_all_codecs_in_one_batch_with_every_decoder(decoder: str, structure: str, tmp_path: Path) -> None:
    if decoder in ("nvdec", "auto"):
        pytest.importorskip("PyNvVideoCodec")
    paths = []
    for kind in COMMON:
        for sort in (kind, variable_rate(kind)):
            assert sort is not None
            (folder := tmp_path / str(len(paths))).mkdir()
            paths.append(sort.make(folder, **STRUCTURES[structure]))
    frames = [0, 7, 3, 19, 29, 3, 11]
    options = {"decoder": decoder, "device": "cpu" if decoder == "cpu" else "cuda:0", "batch_size": len(paths)}
    ((clips, labels),) = batches(Videos(paths), tmp_path, clip=ClipSampler(frames=frames), **options)
    assert labels.tolist() == [*range(len(paths))]
    for clip, path in zip(clips, paths, strict=True):
        assert numbers(clip) == frames, path


@pytest.mark.gpu
@pytest.mark.parametrize("decoder", ["nvdec", "dali"])
def test_odd_sizes_and_rotation_on_the_gpu(decoder: str, tmp_path: Path) -> None:
    """Sizes that are no multiple of 16 fall off DALI's cliff, unless uncropped; a phone's video is turned."""
    if decoder == "nvdec":
        pytest.importorskip("PyNvVideoCodec")
    for n, (width, height, rotation) in enumerate(
        [(340, 256, None), (344, 256, None), (182, 150, None), (320, 240, 90)]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        for codec in ("h264", "hevc"):
            path = make_video(folder / f"{codec}.mp4", codec, width=width, height=height, rotation=rotation, gop=7)
            on_cpu, on_gpu = (
                batches(Videos([path]), folder, clip=ClipSampler(frames=[5, 13]), batch_size=1, **options)[0][0][0]
                for options in ({}, {"device": "cuda:0", "decoder": decoder})
            )
            assert on_cpu.shape == on_gpu.shape
            assert (on_cpu.float() - on_gpu.cpu().float()).abs().mean() < 3
            assert rotation or numbers(on_gpu) == [5, 13]


def test_case_25_variable_rate_by_index_and_by_time_in_any_order(tmp_path: Path) -> None:
    jittered = make_video(tmp_path / "vfr.webm", "vp9", num_frames=30, pts_jitter=JITTER)
    odd = make_video(tmp_path / "ntsc.mkv", "vp9", num_frames=30, rate=30)
    with av.open(str(odd)) as container:
        assert container.streams.video[0].average_rate is not None
    for paths in ([jittered, odd], [odd, jittered]):
        ((clips, _),) = batches(Videos(paths), tmp_path, clip=ClipSampler(frames=[0, 7, 3, 19]))
        assert [numbers(clip) for clip in clips] == [[0, 7, 3, 19]] * 2
        ((clips, _),) = batches(Videos(paths), tmp_path, clip=ClipSampler(3, stride=4, mode="start", start_seconds=0.3))
        assert [numbers(clip)[1] - numbers(clip)[0] for clip in clips] == [4, 4]
        found = batches(Videos(paths), tmp_path, clip=ClipSampler(seconds=[0.5]), with_times=True)
        for row, path in enumerate(paths):
            frame = numbers(found[0][0]["video"][row])[0]
            index = build_index(path)
            shown_at = float(found[0][0]["pts_seconds"][row, 0])
            assert shown_at == index.seconds[frame] <= 0.5 + 1e-3
            assert frame + 1 == index.num_frames or index.seconds[frame + 1] > 0.5


def test_case_26_routing(tmp_path: Path) -> None:
    """NVDEC gets what it knows, the worker the rest; none of them is refused."""
    for kind in KINDS:
        folder = tmp_path / kind.name.replace(" ", "-").replace(":", "")
        folder.mkdir()
        expected = "NVDEC" if kind.name in ("H.264", "H.264 in MPEG-TS", "HEVC") else "worker"
        assert decoder_on_gpu(kind.make(folder, num_frames=4)) == expected, kind.name


def test_the_table_of_codecs_is_up_to_date() -> None:
    """docs/video-codecs.md is what docs/make_video_table.py writes."""
    docs = Path(__file__).parents[2] / "docs"
    made = runpy.run_path(str(docs / "make_video_table.py"))["table"]()
    assert made == (docs / "video-codecs.md").read_text(), "run python docs/make_video_table.py"


@pytest.mark.skipif(not REAL.is_dir(), reason="no real videos beside the repository")
def test_real_files_play(tmp_path: Path) -> None:
    paths = sorted(path for path in REAL.iterdir() if path.suffix not in (".md", ".txt"))
    assert paths
    sampler = ClipSampler(4, mode="uniform", num_clips=3)
    found = batches(
        Videos(paths), tmp_path, clip=sampler, with_times=True, ragged="list", batch_size=3 * len(paths), num_workers=2
    )
    ((field, labels),) = found
    assert labels.tolist() == [n for n in range(len(paths)) for _ in range(3)]
    for row, (clip, label) in enumerate(zip(field["video"], labels.tolist(), strict=True)):
        index = build_index(paths[label])
        assert clip.shape == (4, 3, *index.size) and clip.float().std() > 1, paths[label]
        assert index.duration_seconds == pytest.approx(_duration(paths[label]), abs=0.15)
        assert (field["pts_seconds"][row].diff() > 0).all() and field["mask"][row].all()


def _duration(path: Path) -> float:
    """Counted by decoding everything."""
    with av.open(str(path)) as container:
        times = sorted(frame.time for frame in container.decode(video=0))
    return float(times[-1] - times[0] + (times[-1] - times[0]) / (len(times) - 1))
