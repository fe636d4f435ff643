"""Videos: proxies to lanes.

Runs in the worker. A clip is chosen here and its packets are cut out here; where it is decoded (NVDEC in the rank, or
PyAV here) is divided so that neither waits for the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torchvision import tv_tensors

from lightning_dali.graph.plan import plan_item, unfinish
from lightning_dali.graph.video import VideoSpec
from lightning_dali.media import ClipSampler, IndexCache, VideoError, VideoIndex, build_index
from lightning_dali.media.video_plan import starts_open
from lightning_dali.modalities.shared import OfSources
from lightning_dali.modalities.video_lanes import Item, by_template, clip_lane, job_of, result_lane
from lightning_dali.modalities.video_share import Share
from lightning_dali.modalities.video_shrink import shrink
from lightning_dali.proxies.video import ProxyVideo, VideoStack
from lightning_dali.proxies.video_capture import capture_video
from lightning_dali.proxies.video_source import VideoSource
from lightning_dali.structure import leaves, map_leaves
from lightning_dali.wire import Lane

if TYPE_CHECKING:
    from lightning_dali.modalities.audio import AudioModality

SUFFIXES = frozenset(
    [
        ".3g2",
        ".3gp",
        ".asf",
        ".avi",
        ".flv",
        ".gif",
        ".h264",
        ".hevc",
        ".ivf",
        ".m2ts",
        ".m4v",
        ".mkv",
        ".mov",
        ".mp4",
        ".mpeg",
        ".mpg",
        ".mts",
        ".mxf",
        ".ogv",
        ".ts",
        ".vob",
        ".webm",
        ".wmv",
    ]
)
"""File names that count as videos when a dataset returns paths."""
SIZES_IN_HARDWARE = {"h264": ((48, 16), (4096, 4096)), "hevc": ((144, 144), (8192, 8192))}
"""What is given to NVDEC, in 8 bits and 4:2:0: FFmpeg's name of the codec, and the least and greatest (width, height) as in
NVIDIA's table "NVDECODE API: Decoder Capabilities". Everything else is decoded in the workers."""


@dataclass(frozen=True)
class NumberedClip:
    """A sample of which a certain clip is wanted; how `PerClip` tells the modality."""

    sample: Any
    """The dataset's."""
    video: int
    """The dataset index of the video."""
    clip: int
    """Which of the video's clips."""


@dataclass(frozen=True)
class VideoModality(OfSources):
    """How videos are handled."""

    clip: ClipSampler
    """Which frames."""
    hardware: str | None = None
    """What decodes on the device: "nvdec", "dali", or None."""
    share: bool = False
    """Whether workers decode a part of what the device could."""
    num_workers: int = 1
    """How many workers there are to share with."""
    layout: str = "TCHW"
    """Order of a clip's axes in the batch."""
    with_times: bool = False
    """Whether each video field becomes a dict of the video, its times, its mask and its numbers."""
    cache: IndexCache = field(default_factory=IndexCache)
    """Where indices of files are kept."""
    sound: AudioModality | None = None
    """What makes the sound of each clip; None: it is not wanted."""

    def scope(self) -> AbstractContextManager[None]:
        """What captures decoding."""
        return capture_video(self.cache, sound=None if self.sound is None else self.sound.of_clip)

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf stands in for a clip."""
        return isinstance(value, ProxyVideo)

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf is several of them, stacked by a collate function."""
        return isinstance(value, VideoStack)

    def wrap(
        self, sample: Any, transform: Callable[[Any], Any] | None, *, mine: Callable[[Any], bool] = lambda leaf: True
    ) -> Any:
        """Turns every video of a sample (a path, encoded bytes, frames) into a proxy; the first one is transformed.

        Args:
            sample: From the dataset.
            transform: Applied to the first clip.
            mine: Which leaves come into question.
        """
        numbers = {}
        clip = 0
        if isinstance(sample, NumberedClip):
            numbers, clip = {"video_index": sample.video, "clip_index": sample.clip}, sample.clip
            sample = sample.sample
        found = 0

        def visit(leaf: Any) -> Any:
            nonlocal found
            proxy = None if not mine(leaf) else self.as_proxy(leaf, clip=clip)
            if proxy is None:
                return leaf
            found += 1
            out = _as_result(transform(proxy)) if transform is not None and found == 1 else proxy
            seen = out if isinstance(out, ProxyVideo) and out.source.result is None else proxy
            beside = self._beside(seen.source, numbers)
            return {"video": out, **beside} if beside else out

        wrapped = map_leaves(visit, sample)
        if not found and (transform is not None or numbers):
            kinds = ", ".join(type(leaf).__name__ for _, leaf in leaves(sample)) or "nothing"
            raise TypeError(
                f"the sample has no video: expected a path that ends like a video's ({', '.join(sorted(SUFFIXES))}), a whole "
                f"file as bytes, or frames as tv_tensors.Video, got {kinds}."
            )
        return wrapped

    def _beside(self, source: VideoSource, numbers: Mapping[str, int]) -> dict[str, Any]:
        """What stands beside a clip in the dict that its field becomes; nothing where the field is the clip alone."""
        beside: dict[str, Any] = {}
        if self.sound is not None and not source.heard:
            beside["audio"] = self.sound.of_clip(source)
        if self.with_times:
            beside |= {"pts_seconds": source.clip.pts_seconds, "mask": source.clip.mask, **numbers}
        return beside

    def as_proxy(self, leaf: Any, *, clip: int = 0) -> ProxyVideo | None:
        """A proxy for a leaf that is a video in some form, else None.

        Args:
            leaf: Of a sample.
            clip: Which of the video's clips is wanted.
        """
        if isinstance(leaf, tv_tensors.Video):
            if clip:
                raise TypeError(
                    "the dataset chooses its clips itself, so it gives no others: drop num_clips and mode='all' from the "
                    "ClipSampler, or let the dataset return paths."
                )
            return _of_frames(leaf)
        if not is_video(leaf):
            return None
        return self.open(bytes(leaf) if isinstance(leaf, (bytes, bytearray)) else os.fspath(leaf), clip=clip)

    def index(self, video: str | bytes) -> VideoIndex:
        """What demuxing tells of a video.

        Raises:
            VideoError: The file cannot be used.
        """
        try:
            return build_index(video) if isinstance(video, bytes) else self.cache.get(video)
        except VideoError as error:
            error.path = video if isinstance(video, str) else None
            raise

    def open(self, video: str | bytes, *, clip: int = 0) -> ProxyVideo:
        """Chooses a clip of a video.

        Raises:
            VideoError: The file cannot be used, or is too short for a sampler that does not pad.
        """
        index = self.index(video)
        try:
            chosen = self.clip.sample(index, clip=clip)
        except ValueError as error:
            raise VideoError(str(error), video if isinstance(video, str) else None) from error
        return ProxyVideo.make(VideoSource(video, index, chosen))

    def check(self, proxy: ProxyVideo) -> str | None:
        """Reads the packets that the device will decode, or decodes here what it will not: one clip is named, not a batch."""
        source = proxy.source
        try:
            if self.fits_hardware(source):
                job_of(source, self.hardware or "")
            elif source.result is None:
                source.frames()
        except VideoError as error:
            return str(error)
        return None

    def settle(self, proxy: ProxyVideo) -> None:
        """Decodes with PyAV."""
        if proxy.source.result is None:
            proxy.source.frames()

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """Plans the items of a batch, field by field and decoder by decoder."""
        results = [n for n, (_, _, proxy) in enumerate(items) if proxy.source.result is not None]
        planned = [self._plan_one(n, *item) for n, item in enumerate(items) if item[2].source.result is None]
        self._divide(planned)
        groups: dict[tuple[str, str], list[Item]] = {}
        for item in planned:
            groups.setdefault((item.name, item.decoder), []).append(item)
        lanes: list[tuple[Lane, list[int]]] = []
        for (_, decoder), group in groups.items():
            if len({item.head.finish for item in group}) > 1:
                for item in group:
                    item.tail = (*unfinish(item.head), *item.tail)
                    item.head = replace(item.head, finish=None, float_resize=False)
            for template, members in by_template(group):
                lanes.append(clip_lane(VideoSpec(template, decoder, self.layout), members))
        for name in dict.fromkeys(items[n][0] for n in results):
            lanes.append(result_lane(items, [n for n in results if items[n][0] == name], layout=self.layout))
        return lanes

    def _plan_one(self, position: int, name: str, index: int, proxy: ProxyVideo) -> Item:
        head, tail = plan_item(proxy.source.size, proxy.calls, 3)
        return Item(position, name, index, proxy.source, head, tail)

    def _divide(self, planned: list[Item]) -> None:
        """Chooses each clip's decoder and makes what travels: packets, a cut file, or frames."""
        hard = [item for item in planned if self.fits_hardware(item.source)]
        for item in hard:
            item.assign(self.hardware or "")
        if self.share and hard:
            for item in Share.of_this_worker(self.num_workers).choose(hard):
                item.decoder = "frames"
        for item in planned:
            if item.decoder == "frames":
                item.head, frames = shrink(item.head, item.source.frames())
                item.job, item.blobs = None, [frames]
            else:
                item.settle_window()

    def fits_hardware(self, source: VideoSource) -> bool:
        """Whether the device's decoder is given a clip."""
        index = source.index
        if self.hardware is None or index is None or source.settled or source.clip.frames.max() < 0:
            return False
        if index.codec not in SIZES_IN_HARDWARE or index.bit_depth != 8 or index.chroma != "420":
            return False
        low, high = SIZES_IN_HARDWARE[index.codec]
        fits = low[0] <= index.width <= high[0] and low[1] <= index.height <= high[1]
        if self.hardware == "nvdec":
            return fits and not (index.width % 2 or index.height % 2)  # NV12 has a chroma sample every two pixels
        return fits and not index.rotation and not starts_open(index, source.clip.frames)


def is_video(leaf: Any) -> bool:
    """Whether a leaf of a sample is a video file: a path that ends like one, or bytes."""
    if isinstance(leaf, (bytes, bytearray)):
        return True
    return isinstance(leaf, (str, os.PathLike)) and os.path.splitext(os.fspath(leaf))[1].lower() in SUFFIXES


def _of_frames(video: tv_tensors.Video) -> ProxyVideo:
    if isinstance(video, ProxyVideo):
        return video
    if video.ndim == 4 and video.dtype == torch.uint8 and video.shape[1] == 3 and len(video):
        return ProxyVideo.of_frames(video)
    return ProxyVideo.of_result(video)


def _as_result(value: Any) -> Any:
    """What a transform returned; a finished tensor becomes a proxy, so that all samples of a batch are alike."""
    if isinstance(value, torch.Tensor) and not isinstance(value, ProxyVideo) and value.ndim:
        return ProxyVideo.of_result(value)
    return value
