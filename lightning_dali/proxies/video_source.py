"""What a `ProxyVideo` stands for: a clip of an encoded video, frames in memory, or a finished result.

Runs in the worker. Nothing is read before it is asked for, and nothing twice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lightning_dali.media import Clip, CutClip, PacketCut, VideoIndex, cut, cut_packets, decode_frames
from lightning_dali.proxies.notes import note


@dataclass(frozen=True, eq=False)
class VideoSource:
    """A clip that is not decoded yet, or whose frames are there already."""

    video: str | bytes | None
    """Path, or a whole file; None where there was none."""
    index: VideoIndex | None
    """What demuxing told of the file."""
    clip: Clip
    """Which frames."""
    settled: list[np.ndarray] = field(default_factory=list)
    """The decoded frames, where they had to be decoded here."""
    materialised: list[str] = field(default_factory=list)
    """Why pixels were needed in the worker, if they were."""
    result: torch.Tensor | None = None
    """A finished tensor, to which nothing is done any more."""
    heard: bool = False
    """Whether its sound has a place in the sample already."""
    _cuts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_frames(cls, frames: np.ndarray) -> VideoSource:
        """Wraps decoded frames `(T, H, W, 3)` uint8."""
        return cls(None, None, unknown_clip(len(frames)), [frames])

    @classmethod
    def from_result(cls, result: torch.Tensor) -> VideoSource:
        """Wraps a finished tensor so that it may stand beside proxies in a batch."""
        return cls(None, None, unknown_clip(len(result)), result=result)

    def subset(self, positions: np.ndarray) -> VideoSource:
        """The source with only some of the clip's frames, by their position in it."""
        clip = self.clip
        chosen = Clip(clip.frames[positions], clip.pts_seconds[positions], clip.mask[positions], clip.clip)
        return replace(self, clip=chosen, settled=[frames[positions] for frames in self.settled], _cuts={})

    @property
    def path(self) -> str | None:
        """The file, where there is one."""
        return self.video if isinstance(self.video, str) else None

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the frames, upright."""
        if self.index is not None:
            return self.index.size
        shape = self.settled[0].shape
        return int(shape[1]), int(shape[2])

    def note_materialised(self, reason: str) -> None:
        """Remembers what needed pixels."""
        self.materialised.append(reason)
        note(reason)

    def frames(self) -> np.ndarray:
        """The decoded frames `(T, H, W, 3)` uint8, upright.

        Raises:
            VideoError: They do not decode.
        """
        if not self.settled:
            video, index = self._file()
            if self.clip.frames.max() < 0:  # nothing but padding
                self.settled.append(np.zeros((len(self.clip.frames), *index.size, 3), np.uint8))
            else:
                self.settled.append(decode_frames(video, index, self.clip.frames))
        return self.settled[0]

    def packets(self) -> PacketCut:
        """The packets that the clip needs, bare.

        Raises:
            VideoError: They cannot be read.
        """
        if "packets" not in self._cuts:
            self._cuts["packets"] = cut_packets(*self._file(), self.clip.frames)
        packets: PacketCut = self._cuts["packets"]
        return packets

    def file(self, *, uncrop: bool = False) -> CutClip:
        """The packets that the clip needs, as a file; with `uncrop`, H.264 shows its whole coded picture where it can.

        Raises:
            VideoError: They cannot be read.
        """
        video, index = self._file()
        uncrop = uncrop and index.codec == "h264" and index.cropped
        name = "uncropped file" if uncrop else "file"
        if name not in self._cuts:
            self._cuts[name] = cut(video, index, self.clip.frames, uncrop=uncrop)
        file: CutClip = self._cuts[name]
        return file

    def _file(self) -> tuple[str | bytes, VideoIndex]:
        if self.video is None or self.index is None:
            raise TypeError("frames that came decoded have no packets")
        return self.video, self.index

    def __repr__(self) -> str:
        if self.index is None or self.video is None:
            return "a result" if self.result is not None else "frames"
        what = os.path.basename(self.path) if self.path else f"{len(self.video)} bytes"
        height, width = self.index.size
        return f"{what}, {self.index.codec} {width}x{height}, {len(self.clip.frames)} frames"


def unknown_clip(num_frames: int) -> Clip:
    """Stands for frames whose numbers and times nobody told."""
    return Clip(np.arange(num_frames), np.full(num_frames, np.nan), np.ones(num_frames, bool))
