"""The codecs and streams of docs/video-codecs.md: how each is encoded, and which frames come out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dali import ClipSampler
from lightning_dali.media import IndexCache, build_index
from lightning_dali.modalities.video import VideoModality
from tests.media.video_files import make_video
from tests.video.clips import Videos, datamodule, numbers

JITTER = (0, 30, 60)
"""Milliseconds, of a hundred between frames: case 25."""
WANTED = ([0, 7, 3, 19], [3, 7, 11], [29])


@dataclass(frozen=True)
class Kind:
    """A codec, profile or container."""

    name: str
    """As the table has it."""
    codec: str
    """FFmpeg's encoder, see `video_files`."""
    suffix: str = "mp4"
    """Of the container."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `make_video`."""

    def make(self, folder: Path, **options: Any) -> Path:
        """Writes a video of it."""
        size = {"width": 160, "height": 144}
        path: Path = make_video(
            folder / f"video.{self.suffix}",
            self.codec,
            **{**size, "num_frames": 30, "gop": 10, **self.options, **options},
        )
        return path


KINDS = [
    Kind("H.264", "h264"),
    Kind("H.264, 4:2:2", "h264", options={"pix_fmt": "yuv422p"}),
    Kind("H.264, 10 bit", "h264", options={"pix_fmt": "yuv420p10le"}),
    Kind("H.264 in MPEG-TS", "h264", "ts"),
    Kind("HEVC", "hevc"),
    Kind("HEVC, 10 bit", "hevc", options={"pix_fmt": "yuv420p10le"}),
    Kind("VP8", "vp8", "webm"),
    Kind("VP9", "vp9", "webm"),
    Kind("AV1", "av1"),
    Kind("MPEG-4", "mpeg4", "avi"),
    Kind("Motion JPEG", "mjpeg", "avi"),
    Kind("MPEG-2", "mpeg2video", "mpg", {"rate": 25}),
    Kind("ProRes", "prores_ks", "mov", {"pix_fmt": "yuv422p10le"}),
]
STRUCTURES: dict[str, dict[str, Any]] = {
    "B-frames": {"b_frames": 3},
    "open GOP": {"b_frames": 3, "open_gop": True},
    "one key frame": {"gop": 1000, "b_frames": 2},
}


def variable_rate(kind: Kind) -> Kind | None:
    """The same with a variable frame rate; AVI has none, so in an MP4. MPEG-2 itself has none."""
    if kind.name == "MPEG-2":
        return None
    suffix = "mp4" if kind.suffix == "avi" else kind.suffix
    return Kind(kind.name, kind.codec, suffix, {**kind.options, "pts_jitter": JITTER})


def shown(path: Path, folder: Path, frames: Sequence[int], **options: Any) -> list[int]:
    """The numbers that the wanted frames show, through a datamodule."""
    dm = datamodule(Videos([path]), folder, clip=ClipSampler(frames=list(frames)), batch_size=1, **options)
    try:
        ((clips, _),) = list(dm.val_dataloader())
    finally:
        dm.close()
    return numbers(clips[0])


def decoder_on_gpu(path: Path, hardware: str = "nvdec") -> str:
    """What decodes a file where there is a GPU: "NVDEC" or "worker"."""
    with tempfile.TemporaryDirectory() as folder:
        modality = VideoModality(ClipSampler(1, mode="start"), hardware=hardware, cache=IndexCache(Path(folder) / "i"))
        return "NVDEC" if modality.fits_hardware(modality.open(str(path)).source) else "worker"


def facts(path: Path) -> str:
    """Codec, chroma and depth as the index has them."""
    index = build_index(path)
    return f"{index.codec}, {index.chroma}, {index.bit_depth} bit"
