"""Videos: proxies to lanes.

Runs in the worker. A clip is chosen here and its packets are cut out here; where it is decoded (NVDEC in the rank, or
PyAV here) is divided so that neither waits for the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_dali.graph.image import ImageSpec, head_inputs
from lightning_dali.graph.plan import Head, plan_item, plan_tail, unfinish
from lightning_dali.graph.tail import group_key
from lightning_dali.graph.video import VideoSpec
from lightning_dali.media import ClipSampler, IndexCache, VideoError, build_index, cut, cut_packets
from lightning_dali.modalities.image import families
from lightning_dali.modalities.video_share import Share
from lightning_dali.proxies.video import ProxyVideo, VideoSource, VideoStack
from lightning_dali.structure import leaves, map_leaves
from lightning_dali.wire import Blobs, Lane

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
HARDWARE_CODECS = frozenset({"h264", "hevc"})
"""What is given to NVDEC, in 8 bits and 4:2:0; everything else is decoded in the workers."""
_current = threading.local()


@contextmanager
def clip_number(number: int) -> Iterator[None]:
    """While it is open, `ClipSampler` is asked for that clip of a video; datasets of several clips a video open it."""
    before = getattr(_current, "number", 0)
    _current.number = number
    try:
        yield
    finally:
        _current.number = before


@dataclass
class VideoModality:
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
    """Whether each video field becomes a dict of the video, its times and its mask."""
    cache: IndexCache = field(default_factory=IndexCache)
    """Where indices of files are kept."""

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf stands in for a clip."""
        return isinstance(value, ProxyVideo)

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf is several of them, stacked by a collate function."""
        return isinstance(value, VideoStack)

    def wrap(self, sample: Any, transform: Callable[[Any], Any] | None) -> Any:
        """Turns every video of a sample (a path, or encoded bytes) into a proxy; the first one is transformed."""
        found = 0

        def visit(leaf: Any) -> Any:
            nonlocal found
            proxy = self.as_proxy(leaf)
            if proxy is None:
                return leaf
            found += 1
            source = proxy.source
            out = transform(proxy) if transform is not None and found == 1 else proxy
            if not self.with_times:
                return out
            return {"video": out, "pts_seconds": source.clip.pts_seconds, "mask": source.clip.mask}

        wrapped = map_leaves(visit, sample)
        if not found and transform is not None:
            kinds = ", ".join(type(leaf).__name__ for _, leaf in leaves(sample)) or "nothing"
            raise TypeError(
                f"the sample has no video: expected a path that ends like a video's ({', '.join(sorted(SUFFIXES))}) or a whole "
                f"file as bytes, got {kinds}."
            )
        return wrapped

    def as_proxy(self, leaf: Any) -> ProxyVideo | None:
        """A proxy for a leaf that is a video in some form, else None."""
        if isinstance(leaf, ProxyVideo):
            return leaf
        if isinstance(leaf, (bytes, bytearray)):
            return self.open(bytes(leaf))
        if isinstance(leaf, (str, os.PathLike)) and os.path.splitext(os.fspath(leaf))[1].lower() in SUFFIXES:
            return self.open(os.fspath(leaf))
        return None

    def open(self, video: str | bytes) -> ProxyVideo:
        """Chooses a clip of a video.

        Raises:
            VideoError: The file cannot be used, or is too short for a sampler that does not pad.
        """
        path = video if isinstance(video, str) else None
        try:
            index = build_index(video) if path is None else self.cache.get(path)
            clip = self.clip.sample(index, clip=getattr(_current, "number", 0))
        except VideoError as error:
            error.path = path
            raise
        except ValueError as error:
            raise VideoError(str(error), path) from error
        return ProxyVideo.make(VideoSource(video, index, clip))

    def check(self, proxy: ProxyVideo) -> str | None:
        """Nothing more than opening has told."""
        return None

    def settle(self, proxy: ProxyVideo) -> None:
        """Decodes with PyAV."""
        proxy.source.frames()

    def path(self, proxy: ProxyVideo) -> str | None:
        """The file behind it."""
        return proxy.source.path

    def notes(self, proxy: ProxyVideo) -> Iterable[str]:
        """What needed pixels in the worker."""
        return proxy.source.materialised

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """Plans the items of a batch, field by field and decoder by decoder."""
        planned = [self._plan_one(n, name, index, proxy) for n, (name, index, proxy) in enumerate(items)]
        self._divide(planned)
        groups: dict[tuple[str, str], list[_Item]] = {}
        for item in planned:
            groups.setdefault((item.name, item.decoder), []).append(item)
        lanes: list[tuple[Lane, list[int]]] = []
        for (_, decoder), group in groups.items():
            if len({item.head.finish for item in group}) > 1:
                for item in group:
                    item.tail = (*unfinish(item.head), *item.tail)
                    item.head = replace(item.head, finish=None, float_resize=False)
            for template, members in _merged(group):
                lanes.append(_lane(VideoSpec(template, decoder, self.layout), members))
        return lanes

    def _plan_one(self, position: int, name: str, index: int, proxy: ProxyVideo) -> _Item:
        head, tail = plan_item(proxy.source.index.size, proxy.calls, 3)
        return _Item(position, name, index, proxy.source, head, tail)

    def _divide(self, planned: list[_Item]) -> None:
        """Chooses each clip's decoder and makes what travels: packets, a cut file, or frames."""
        hard = [item for item in planned if self._fits_hardware(item.source)]
        for item in hard:
            item.cut(self.hardware or "")
        if self.share and hard:
            for item in Share.of_this_worker(self.num_workers).choose(hard):
                item.decoder = "frames"
        for item in planned:
            if item.decoder == "frames":
                item.decode()

    def _fits_hardware(self, source: VideoSource) -> bool:
        index = source.index
        if self.hardware is None or source.settled or not source.clip.mask.any():
            return False
        return (
            index.codec in HARDWARE_CODECS
            and index.bit_depth == 8
            and index.chroma == "420"
            and (self.hardware == "nvdec" or not index.rotation)
        )


@dataclass
class _Item:
    """One clip on its way into a lane."""

    position: int
    name: str
    index: int
    source: VideoSource
    head: Head
    tail: tuple[Any, ...]
    decoder: str = "frames"
    blobs: list[np.ndarray] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)

    def cut(self, hardware: str) -> None:
        """Takes the packets that the clip needs."""
        video, index, frames = self.source.video, self.source.index, self.source.clip.frames
        self.decoder = hardware
        facts = {"codec": index.codec, "width": index.width, "height": index.height, "rotation": index.rotation}
        if hardware == "nvdec":
            packets = cut_packets(video, index, frames)
            self.blobs = [np.frombuffer(packet, np.uint8) for packet in packets.packets]
            self.job = {**facts, "frames": packets.frames, "num_frames": packets.num_frames}
        else:
            # DALI's decoder keeps its session only where the coded size is the one shown (docs/decisions)
            clip = cut(video, index, frames, uncrop=index.codec == "h264" and index.cropped)
            self.blobs = [np.frombuffer(clip.data, np.uint8)]
            self.job = {**facts, "frames": clip.frames, "num_frames": clip.num_frames}

    def decode(self) -> None:
        """Decodes here."""
        self.blobs, self.job = [self.source.frames()], {}


def _merged(group: list[_Item]) -> list[tuple[ImageSpec, list[_Item]]]:
    merged: list[tuple[ImageSpec, list[_Item]]] = []
    for item in group:
        spec = ImageSpec.of_head(item.head, mode="RGB", encoded=False)
        for number, (other, owners) in enumerate(merged):
            union = other.merge(spec)
            if union is not None:
                merged[number] = (union, [*owners, item])
                break
        else:
            merged.append((spec, [item]))
    return merged


def _lane(spec: VideoSpec, members: list[_Item]) -> tuple[Lane, list[int]]:
    data, heads = Blobs(), []
    for item in members:
        heads.append({**item.job, "first": len(data), "count": len(item.blobs)})
        data.extend(item.blobs)
    lane = Lane(
        field=members[0].name,
        spec=spec,
        data=data,
        inputs=head_inputs(spec.template, [item.head for item in members]),
        heads=heads,
        tail=plan_tail([families(item.tail) for item in members], group_key),
        indices=[item.index for item in members],
        paths=[item.source.path for item in members],
    )
    return lane, [item.position for item in members]
