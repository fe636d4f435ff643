"""The device's decoders, as far as the CPU can show them: packets, jobs, who decodes what, failures, and their death."""

# Over 300 lines: packets, shares, failures and deaths of decoders share their media.

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from lightning_dali.fetch import Fetcher
from lightning_dali.graph.nvdec import DecoderPool
from lightning_dali.graph.spec import Device
from lightning_dali.graph.video import ClipJob, VideoSpec
from lightning_dali.media import ClipSampler, IndexCache, VideoError, build_index, cut_packets, decode_packets
from lightning_dali.modalities import video as module
from lightning_dali.modalities.video import VideoModality
from lightning_dali.modalities.video_share import Share
from lightning_dali.passes import Pass
from lightning_dali.sampling import BatchTask
from lightning_dali.server import Server
from lightning_dali.sources import InlineSource
from lightning_dali.wire import KnownBad, Request
from tests.media.video_files import make_video, read_number
from tests.video.clips import Videos, numbers

FLOAT = v2.Compose([v2.Resize((40, 48)), v2.ToDtype(torch.float32, scale=True)])


def fetcher(paths: list[Path], hardware: str | None, *, sampler: ClipSampler, **options: Any) -> Fetcher:
    cache = IndexCache(paths[0].parent / "index.sqlite3")
    modality = VideoModality(sampler, hardware=hardware, cache=cache, **options)
    return Fetcher(Videos(paths), modality, FLOAT, restore_rng=True)


def request(maker: Fetcher, rows: int) -> Request:
    return maker(BatchTask(epoch=0, step=0, indices=tuple(range(rows))))


# -- packets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["h264", "hevc"])
@pytest.mark.parametrize("container", ["mp4", "mkv", "ts"])
@pytest.mark.parametrize("open_gop", [False, True])
def test_bare_packets_hold_the_frames(codec: str, container: str, open_gop: bool, tmp_path: Path) -> None:
    path = make_video(tmp_path / f"a.{container}", codec, gop=6, b_frames=3, open_gop=open_gop, num_frames=30)
    index = build_index(path)
    for frames in ([0, 1, 2], [7, 11, 15, 19], [29, 3, -1, 3], [13], [28, 29]):
        cut = cut_packets(path, index, frames)
        assert all(packet[:4] in (b"\0\0\0\1", b"\0\0\1" + packet[3:4]) for packet in cut.packets)
        pixels = decode_packets(cut.packets, cut.frames, codec=codec, size=(index.height, index.width))
        shown = [read_number(picture) if frame >= 0 else -1 for picture, frame in zip(pixels, frames, strict=True)]
        assert shown == frames
        everything = range(cut.num_frames)
        decode_packets(cut.packets, everything, codec=codec, size=(index.height, index.width))
        with pytest.raises(VideoError, match="1 frames do not decode"):
            decode_packets(cut.packets, [cut.num_frames], codec=codec, size=(index.height, index.width))


def test_bare_packets_of_a_rotated_video_and_of_another_size(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", "h264", width=80, height=48, rotation=90)
    index = build_index(path)
    cut = cut_packets(path, index, [3])
    pixels = decode_packets(cut.packets, cut.frames, codec="h264", size=(48, 80), rotation=index.rotation)
    assert pixels.shape == (1, 80, 48, 3)
    assert read_number(np.rot90(pixels[0], -index.rotation // 90)) == 3
    with pytest.raises(VideoError, match="changes size on the way: 64x48, then 80x48"):
        decode_packets(cut.packets, cut.frames, codec="h264", size=(48, 64))


# -- what a worker sends ---------------------------------------------------------------------------------------------


def test_rows_own_their_packets(tmp_path: Path) -> None:
    paths = [make_video(tmp_path / f"{n}.mp4", "h264", gop=6, b_frames=2) for n in range(4)]
    maker = fetcher(paths, "nvdec", sampler=ClipSampler(3, stride=4, mode="center"))
    (lane,) = request(maker, 4).lanes
    assert isinstance(lane.spec, VideoSpec) and lane.spec.decoder == "nvdec"
    assert len(lane.parts) == 4 and sum(lane.parts) == len(lane.data) > 4
    part = lane.select([3, 1])
    assert part.indices == [3, 1] and part.parts == (lane.parts[3], lane.parts[1])
    for row, whole in ((0, 3), (1, 1)):
        for mine, theirs in zip(part.blobs(row), lane.blobs(whole), strict=True):
            assert mine is theirs
        job: ClipJob = part.heads[row]
        pixels = decode_packets(part.blobs(row), job.frames, codec=job.codec, size=(job.height, job.width))
        assert [read_number(picture) for picture in pixels] == [5, 9, 13]


def test_what_the_hardware_cannot_decode_is_decoded_here(tmp_path: Path) -> None:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("h264", {}), ("hevc", {"width": 160, "height": 144}), ("hevc", {}), ("vp9", {}), ("av1", {}), ("mpeg4", {}),
        ("h264", {"pix_fmt": "yuv422p"}), ("hevc", {"pix_fmt": "yuv420p10le", "width": 160, "height": 144}),
    ]  # fmt: skip
    paths = [
        make_video(tmp_path / f"{n}.mp4", codec, num_frames=8, **options) for n, (codec, options) in enumerate(kinds)
    ]
    for hardware in ("nvdec", "dali"):
        made = request(fetcher(paths, hardware, sampler=ClipSampler(4, mode="start")), len(paths))
        by_decoder = {lane.spec.decoder: lane.indices for lane in made.lanes}
        assert by_decoder == {hardware: [0, 1], "frames": [2, 3, 4, 5, 6, 7]}


def test_clips_that_begin_in_an_open_group_are_decoded_here(tmp_path: Path) -> None:
    """DALI shows nothing right of H.264 that begins with another picture than an IDR one; from bare packets NVDEC does."""
    paths = {
        kind: make_video(tmp_path / f"{kind}.mp4", "h264", num_frames=40, gop=10, b_frames=3, open_gop=kind == "open")
        for kind in ("open", "closed")
    }
    for hardware, inside in (("nvdec", {"nvdec"}), ("dali", {"dali", "frames"})):
        for frames, decoders in (([3, 7], {hardware}), ([15, 19], inside), ([2, 35], {hardware})):
            made = request(fetcher([*paths.values()], hardware, sampler=ClipSampler(frames=frames)), 2)
            assert {lane.spec.decoder for lane in made.lanes} == decoders
            assert all(lane.indices[0] == 0 for lane in made.lanes if lane.spec.decoder == "frames")


def test_settled_and_rotated_clips(tmp_path: Path) -> None:
    path = make_video(tmp_path / "a.mp4", "h264", rotation=90)
    for hardware, decoder in (("nvdec", "nvdec"), ("dali", "frames")):
        maker = fetcher([path], hardware, sampler=ClipSampler(4, mode="start"))
        (lane,) = request(maker, 1).lanes
        assert lane.spec.decoder == decoder
        task = BatchTask(epoch=0, step=0, indices=(0,))  # again, after it failed on the device
        (again,) = maker(KnownBad(task, ((0, "NVDEC gave up", str(path)),))).lanes
        assert again.spec.decoder == "frames" and again.parts == (1,)


def test_auto_divides_a_batch_by_cost_and_leaves_frames_as_they_are(tmp_path: Path) -> None:
    paths = [make_video(tmp_path / f"{n}.mp4", "h264", gop=10) for n in range(8)]
    sampler = ClipSampler(4, stride=2, mode="center")
    Share.of_this_worker.cache_clear()
    share = Share.of_this_worker(8)
    here = []
    for speed in (1e-12, 1.7e-7, 1.0):
        share.cpu_seconds_a_pixel = speed
        made = request(fetcher(paths, "nvdec", sampler=sampler, share=True, num_workers=8), 8)
        assert sorted(index for lane in made.lanes for index in lane.indices) == [*range(8)]
        frames = [lane for lane in made.lanes if lane.spec.decoder == "frames"]
        assert all(read_number(picture) >= 0 for lane in frames for clip in lane.data for picture in clip)
        here.append(sum(map(len, frames)))
    assert here[0] == 7 and 0 < here[1] < 7 and here[2] == 0, here  # the last clip costs the device nothing
    Share.of_this_worker.cache_clear()


# -- in the rank -----------------------------------------------------------------------------------------------------


def collected(maker: Fetcher, rows: int, *, bad: list[Any] | None = None) -> torch.Tensor:
    """One batch through a server on the CPU, whose DALI decodes VP9."""
    server = Server(Device(None, num_threads=1), max_batch_size=rows, on_bad=(bad if bad is not None else []).append)
    one = Pass(
        server, InlineSource(maker, iter([BatchTask(epoch=0, step=0, indices=tuple(range(rows)))])), threaded=False
    )
    try:
        return next(one).batch
    finally:
        one.close()
        server.release()


@pytest.fixture
def vp9_in_dali(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI decodes VP9 without a GPU: the same template as H.264 with one."""
    monkeypatch.setitem(module.SIZES_IN_HARDWARE, "vp9", ((1, 1), (4096, 4096)))


def test_dalis_decoder_gives_the_wanted_frames(vp9_in_dali: None, tmp_path: Path) -> None:
    paths = [make_video(tmp_path / f"{n}.webm", "vp9", num_frames=12 + n, gop=6) for n in range(3)]
    sampler = ClipSampler(frames=[7, 3, 11, 13], pad="constant")
    (lane,) = request(fetcher(paths, "dali", sampler=sampler), 3).lanes
    assert lane.spec.decoder == "dali"
    clips, labels = collected(fetcher(paths, "dali", sampler=sampler), 3)
    shown = [numbers((clip * 255).round().byte()) for clip in clips]
    assert labels.tolist() == [0, 1, 2]
    assert shown == [[7, 3, 11, 0], [7, 3, 11, 0], [7, 3, 11, 13]]  # 0: black
    assert float(clips[0, 3].max()) == 0.0


def test_what_dali_refuses_is_found_and_decoded_by_the_worker(vp9_in_dali: None, tmp_path: Path) -> None:
    """The failed batch is run again in halves, then the offender travels as frames; nobody else is touched."""
    paths = [make_video(tmp_path / f"{n}.webm", "vp9", num_frames=12, gop=6) for n in range(5)]
    maker = fetcher(paths, "dali", sampler=ClipSampler(3, stride=2, mode="start"))

    class Broken:
        """Sends DALI half a file for sample 3, as long as it is to decode it."""

        calls = 0

        def __call__(self, task: Any) -> Request:
            self.calls += 1
            made = maker(task)
            for lane in made.lanes:
                if lane.spec.decoder == "dali" and 3 in lane.indices:
                    row = lane.indices.index(3)
                    lane.data[row] = lane.data[row][: lane.data[row].size // 2]
            return made

    broken, bad = Broken(), []
    clips, labels = collected(broken, 5, bad=bad)  # type: ignore[arg-type]
    assert broken.calls == 2 and bad == [] and labels.tolist() == [0, 1, 2, 3, 4]
    assert [numbers((clip * 255).round().byte()) for clip in clips] == [[0, 2, 4]] * 5


def job() -> ClipJob:
    return ClipJob(np.array([0]), 1, "h264", 64, 48)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_dali_nvdec")]


def test_a_pool_answers_every_job_also_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    pool = DecoderPool(0, num_threads=2)
    futures = [pool.submit(job(), []) for _ in range(5)]
    for future in futures:
        with pytest.raises(Exception, match=r"(?i)cuda|nvidia"):
            future.result(10)
    assert len(threads()) == 2
    pool.close()
    pool.close()
    assert threads() == []
    with pytest.raises(RuntimeError, match="the decoders are closed"):
        pool.submit(job(), [])


def test_closing_cancels_what_has_not_begun_and_dropping_a_pool_closes_it() -> None:
    pool = DecoderPool(0, num_threads=0)
    waiting = [pool.submit(job(), []) for _ in range(3)]
    pool.close()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(1)
    pool = DecoderPool(0, num_threads=2)
    del pool
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []


def test_graphs_of_a_device_share_one_pool() -> None:
    one, other = DecoderPool.of_device(0), DecoderPool.of_device(0)
    assert one is other and len(threads()) == 7
    del one
    assert len(threads()) == 7
    other.close()
    assert threads() == []
    again = DecoderPool.of_device(0)
    fresh = again is not other
    del again
    assert fresh and threads() == []  # a new one, which ended when nobody held it any more


@pytest.mark.gpu
def test_decoders_of_the_gpu_are_bounded_and_die(tmp_path: Path) -> None:
    pytest.importorskip("PyNvVideoCodec")
    paths = [make_video(tmp_path / f"{n}.mp4", "h264", width=96 + 16 * n, height=80, gop=10) for n in range(3)]
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        pool = DecoderPool(0)
        futures = []
        for path in paths * 4:
            index = build_index(path)
            cut = cut_packets(path, index, [3, 11, 19])
            facts = ClipJob(cut.frames, cut.num_frames, "h264", index.width, index.height)
            futures.append(pool.submit(facts, [np.frombuffer(packet, np.uint8) for packet in cut.packets]))
        for future in futures:
            clip = future.result(30)
            clip.event.synchronize()
            assert [read_number(frame) for frame in clip.frames.cpu().numpy()] == [3, 11, 19]
        del future, futures, clip
        assert len(threads()) == 7
        pool.close()
        assert threads() == []
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 200 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_nvdec_begins_in_an_open_group(codec: str, tmp_path: Path) -> None:
    pytest.importorskip("PyNvVideoCodec")
    options: dict[str, Any] = {"width": 336, "height": 256, "gop": 10, "b_frames": 3, "open_gop": True}
    path = make_video(tmp_path / "a.mp4", codec, num_frames=240, rate=30, **options)
    index, pool = build_index(path), DecoderPool(0, num_threads=1)
    for frames in ([3, 7], [13, 17, 21], [*range(13, 77, 4)], [60, 61, 62], [120, 130]):
        cut = cut_packets(path, index, frames)
        facts = ClipJob(cut.frames, cut.num_frames, codec, index.width, index.height)
        clip = pool.submit(facts, [np.frombuffer(packet, np.uint8) for packet in cut.packets]).result(30)
        clip.event.synchronize()
        assert [read_number(frame) for frame in clip.frames.cpu().numpy()] == frames
    pool.close()


@pytest.mark.gpu
def test_what_nvdec_refuses_is_decoded_with_ffmpeg(tmp_path: Path) -> None:
    pytest.importorskip("PyNvVideoCodec")
    path = make_video(tmp_path / "a.mp4", "h264", width=96, height=80, pix_fmt="yuv422p", gop=10)
    index = build_index(path)
    cut = cut_packets(path, index, [3, 11])
    pool = DecoderPool(0, num_threads=1)
    facts = ClipJob(cut.frames, cut.num_frames, "h264", index.width, index.height)
    clip = pool.submit(facts, [np.frombuffer(packet, np.uint8) for packet in cut.packets]).result(30)
    clip.event.synchronize()
    assert [read_number(frame) for frame in clip.frames.cpu().numpy()] == [3, 11]
    pool.close()


# -- DALI's decoder --------------------------------------------------------------------------------------------------


def test_frames_of_another_size_than_expected_are_an_error(tmp_path: Path, vp9_in_dali: None) -> None:
    """Windows would show something else. VP9 is what DALI decodes on the CPU, through the same graph as H.264 on a GPU."""
    path = make_video(tmp_path / "a.mp4", "vp9", num_frames=20)
    maker = fetcher([path], "dali", sampler=ClipSampler(4))
    (lane,) = request(maker, 1).lanes
    assert isinstance(lane.spec, VideoSpec) and lane.spec.decoder == "dali"
    executor = lane.spec.build(Device(None, num_threads=1), max_batch_size=1)
    executor.feed(lane)
    assert torch.as_tensor(executor.collect(lane)).shape == (1, 4, 3, 40, 48)
    lane.heads[0] = replace(lane.heads[0], height=lane.heads[0].height + 16)
    executor.feed(lane)
    with pytest.raises(RuntimeError, match=r"gave frames of (\d+)x(\d+) for a video of \1x\d+"):
        executor.collect(lane)
    executor.close()
