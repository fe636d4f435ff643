"""A dataset of videos seen as a dataset of clips, for evaluation with several clips a video.

Runs in the worker; counting clips runs in the rank, once, when clips are as many as a video is long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_dali.media import ClipSampler
from lightning_dali.modalities.video import VideoModality, clip_number
from lightning_dali.structure import leaves


class PerClip:
    """Sample `i` is a clip of a video, in fixed order: all clips of the first video, then those of the second.

    Args:
        dataset: Of videos.
        clip: How many clips there are of each.
        modality: Opens videos, to count the clips of mode "all".
    """

    def __init__(self, dataset: Any, clip: ClipSampler, modality: VideoModality) -> None:
        self.dataset = dataset
        if clip.mode == "all":
            counts = [clip.count(_video_of(dataset[n], modality)) for n in range(len(dataset))]
        else:
            counts = [clip.num_clips] * len(dataset)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> tuple[int, int]:
        """(video, clip) of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        video = int(np.searchsorted(self._ends, index, side="right"))
        return video, index - (int(self._ends[video - 1]) if video else 0)

    def __getitem__(self, index: int) -> Any:
        video, clip = self.locate(index)
        _next_clip(clip)
        return self.dataset[video]


def _next_clip(clip: int) -> None:
    """The clip that the modality chooses when it wraps the sample that is being fetched."""
    from lightning_dali.modalities import video

    video._current.number = clip


def _video_of(sample: Any, modality: VideoModality) -> Any:
    for _, leaf in leaves(sample):
        proxy = modality.as_proxy(leaf)
        if proxy is not None:
            return proxy.source.index
    raise TypeError(f"the sample has no video to count clips of: {sample!r}")


__all__ = ["PerClip", "clip_number"]
