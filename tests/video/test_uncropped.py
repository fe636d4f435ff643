"""H.264 for DALI's decoder whose coded picture is larger than what is shown: which clips travel so, and what is cut out.

There is no H.264 in DALI without a GPU, so on the CPU its part is PyAV's: whole pictures of the size in the file's header,
from the bytes that a worker sends. About 5 s.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from lightning_dali import ClipSampler
from lightning_dali.fetch import Fetcher
from lightning_dali.graph.spec import Device
from lightning_dali.graph.video import VideoSpec
from lightning_dali.media import IndexCache
from lightning_dali.modalities.video import VideoModality
from lightning_dali.modalities.video_share import Share
from lightning_dali.passes import Pass
from lightning_dali.sampling import BatchTask
from lightning_dali.server import Server
from lightning_dali.sources import InlineSource
from lightning_dali.wire import Blobs, KnownBad, Lane, Request
from tests.media.video_files import make_video
from tests.video.clips import SEED, Videos, batches, eager, make_scene
from tests.video.test_parity import BY_DALI, FLOAT, TOLERANCE, levels

CLIP = ClipSampler(3, stride=3)
SIZES = [(182, 150), (160, 144), (134, 106), (200, 112)]
"""The second is coded as it is shown."""


class AsDALIWould:
    """A fetcher for DALI's decoder whose files are decoded here, into whole pictures."""

    def __init__(self, paths: list[Path], transform: Any, **options: Any) -> None:
        cache = IndexCache(paths[0].parent / "index.sqlite3")
        modality = VideoModality(CLIP, hardware="dali", cache=cache, **options)
        self.fetcher = Fetcher(Videos(paths), modality, transform, seed=SEED, restore_rng=True)
        self.lanes: list[Lane] = []
        """As they were before."""

    def __call__(self, task: Any) -> Request:
        request = self.fetcher(task)
        self.lanes += [replace(lane) for lane in request.lanes]
        for lane in request.lanes:
            if isinstance(lane.spec, VideoSpec) and lane.spec.decoder == "dali":
                files = zip(lane.data, lane.heads, strict=True)
                lane.data = Blobs(frames_of(bytes(file), job.frames) for file, job in files)
                lane.spec = replace(lane.spec, decoder="frames")
        return request


def frames_of(file: bytes, wanted: np.ndarray) -> np.ndarray:
    """(T, H, W, 3) of the size in the file's header, which is the size to which DALI would scale."""
    with av.open(io.BytesIO(file)) as container:
        header = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert {frame.shape for frame in frames} == {(header.height, header.width, 3)}
    return np.stack(frames)[wanted]


def made(maker: AsDALIWould, rows: int) -> torch.Tensor:
    """One batch, through a server on the CPU."""
    server = Server(Device(None, num_threads=1), max_batch_size=rows)
    tasks = iter([BatchTask(epoch=0, step=0, indices=tuple(range(rows)))])
    one = Pass(server, InlineSource(maker, tasks), threaded=False)  # type: ignore[arg-type]  # called like a Fetcher
    try:
        clips: torch.Tensor = next(one).batch[0]
        return clips
    finally:
        one.close()
        server.release()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("scenes")
    return [
        make_scene(folder / f"{n}.mp4", width=width, height=height, seed=n, num_frames=14)
        for n, (width, height) in enumerate(SIZES)
    ]


CUT = {name: transform for name, transform in BY_DALI.items() if name not in ("no float", "nothing")}
CUT["second window sticks out"] = v2.Compose([v2.Resize((60, 80)), v2.CenterCrop((70, 90)), FLOAT])
CUT["flip, then crop"] = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.RandomCrop((90, 100)), FLOAT])
CUT["every edge"] = v2.Compose([FLOAT, v2.Resize((300, 400))])


@pytest.mark.parametrize("name", CUT)
def test_exactly_what_is_shown_is_cut_out(name: str, scenes: list[Path]) -> None:
    maker = AsDALIWould(scenes, CUT[name])
    clips = made(maker, len(scenes))
    whole = {index: job for lane in maker.lanes for index, job in zip(lane.indices, lane.heads, strict=True)}
    assert {lane.spec.decoder for lane in maker.lanes} == {"dali"}
    for index, (clip, (width, height)) in enumerate(zip(clips, SIZES, strict=True)):
        uncropped = name != "a window that sticks out"
        size = (-width // 16 * -16, -height // 16 * -16) if uncropped else (width, height)
        assert (whole[index].width, whole[index].height) == size
        off = levels(clip, eager(str(scenes[index]), CLIP, CUT[name], index), CUT[name])
        assert off.mean() < TOLERANCE.get(name, 0.8) and off.quantile(0.99) < 4, (index, off.mean())
        assert not uncropped or off.max() < 8, (index, off.max())


def test_windows_alone_are_exact(scenes: list[Path]) -> None:
    """Up to the last row and column that is shown, and none further."""
    for transform in (v2.CenterCrop((106, 112)), v2.Compose([v2.RandomHorizontalFlip(1.0), v2.RandomCrop((106, 112))])):
        for index, clip in enumerate(made(AsDALIWould(scenes, transform), len(scenes))):
            assert torch.equal(clip, eager(str(scenes[index]), CLIP, transform, index)), index
    for scene, (width, height) in zip(scenes, SIZES, strict=True):
        (clip,) = made(AsDALIWould([scene], None), 1)
        assert clip.shape == (3, 3, height, width) and torch.equal(clip, eager(str(scene), CLIP, None, 0))


# -- which clips -----------------------------------------------------------------------------------------------------


def sent(maker: AsDALIWould, task: Any) -> dict[int, tuple[str, tuple[int, int] | None]]:
    """Each sample's decoder, and the (width, height) of what it decodes."""
    maker(task)
    return {
        index: (lane.spec.decoder, None if job is None else (job.width, job.height))
        for lane in maker.lanes
        for index, job in zip(lane.indices, lane.heads, strict=True)
    }


def test_only_h264_for_dali_is_uncropped(tmp_path: Path) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("h264", {}), ("hevc", {}), ("h264", {"rotation": 90}), ("h264", {"pix_fmt": "yuv422p"}),
        ("h264", {"width": 176, "height": 160}),
        ("h264", {"options": {"preset": "medium", "x264-params": "tff=1:weightp=0:log-level=none"}, "height": 152}),
    ]  # fmt: skip
    paths = [
        make_video(tmp_path / f"{n}.mp4", codec, **{"width": 166, "height": 150, "num_frames": 12, **options})
        for n, (codec, options) in enumerate(kinds)
    ]
    task = BatchTask(epoch=0, step=0, indices=tuple(range(len(paths))))
    resize = v2.Compose([v2.Resize((40, 48)), FLOAT])
    frames = ("frames", None)
    dali = {0: ("dali", (176, 160)), 1: ("dali", (166, 150)), 4: ("dali", (176, 160)), 5: ("dali", (166, 152))}
    assert sent(AsDALIWould(paths, resize), task) == {**dali, 2: frames, 3: frames}
    nvdec = AsDALIWould(paths, resize)
    nvdec.fetcher.modality = replace(nvdec.fetcher.modality, hardware="nvdec")
    found = sent(nvdec, task)
    assert (found[0], found[5]) == (("nvdec", (166, 150)), ("nvdec", (166, 152)))


def test_what_fails_or_is_shared_keeps_its_own_size(scenes: list[Path]) -> None:
    """The window is the device's decoder's alone: frames that a worker decodes are the ones that are shown."""
    task = BatchTask(epoch=0, step=0, indices=(0, 1, 2, 3))
    transform = v2.Compose([v2.CenterCrop((100, 100)), FLOAT])
    bad = AsDALIWould(scenes, transform)
    found = sent(bad, KnownBad(task, ((0, "DALI gave up", None),)))
    assert found[0] == ("frames", None) and found[2] == ("dali", (144, 112))
    Share.of_this_worker.cache_clear()
    Share.of_this_worker(8).cpu_seconds_a_pixel = 1e-12
    shared = AsDALIWould(scenes, transform, share=True, num_workers=8)
    clips = made(shared, len(scenes))
    Share.of_this_worker.cache_clear()
    decoders = [lane.spec.decoder for lane in shared.lanes for _ in lane.indices]
    assert sorted(decoders) == ["dali", "frames", "frames", "frames"]
    for index, clip in enumerate(clips):
        assert torch.equal(clip, eager(str(scenes[index]), CLIP, transform, index))


def test_views_of_one_file_with_and_without_padding(scenes: list[Path]) -> None:
    """One shows what is beyond the edge, which must not be coded rows; the other does not."""

    def padded(clip: Any) -> Any:
        return v2.functional.resize(v2.functional.pad(clip, [0, 0, 8, 8], fill=[200]), [60, 60])

    def plain(clip: Any) -> Any:
        return v2.functional.resize(clip, [60, 60])

    maker = AsDALIWould(scenes[:1], lambda clip: (padded(clip), plain(clip)))
    fields = made(maker, 1)
    assert sorted((lane.heads[0].width, lane.heads[0].height) for lane in maker.lanes) == [(182, 150), (192, 160)]
    for field, transform in zip(fields, (padded, plain), strict=True):
        off = (field[0].float() - eager(str(scenes[0]), CLIP, transform, 0).float()).abs()
        assert off.mean() < 0.8 and off.quantile(0.99) < 4


# -- on the device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1920, 1080), (640, 360), (340, 256)], ids=lambda size: "{}x{}".format(*size))
def test_dalis_decoder_gives_what_is_shown(size: tuple[int, int], tmp_path: Path) -> None:
    """Nothing scaled and no coded rows, through windows, resizing and as it is."""
    width, height = size
    paths = [make_scene(tmp_path / f"{n}.mp4", width=width, height=height, seed=n, num_frames=16) for n in range(3)]
    for transform in (
        BY_DALI["Kinetics training"],
        BY_DALI["a window that sticks out"],
        v2.RandomCrop((200, 300)),
        None,
    ):
        found = batches(
            Videos(paths), tmp_path, stage="train", batch_size=3, clip=CLIP, train_transform=transform, decoder="dali",
            device="cuda:0", num_workers=2,
        )  # fmt: skip
        ((clips, labels),) = found
        assert clips.device.type == "cuda"
        for clip, index in zip(clips.cpu(), labels.tolist(), strict=True):
            off = levels(clip, eager(str(paths[index]), CLIP, transform, index), transform)
            assert off.mean() < 3 and off.flatten()[:: 1 + off.numel() // 1_000_000].quantile(0.99) < 12, (
                index,
                transform,
            )
