"""A dataset of videos seen as a dataset of clips, for evaluation with several clips a video.

Runs in the worker; counting clips runs in the rank, once, when clips are as many as a video is long.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lightning_dali.media import ClipSampler, MediaError
from lightning_dali.modalities.video import NumberedClip, VideoModality, is_video
from lightning_dali.seeding import seeded
from lightning_dali.structure import leaves

logger = logging.getLogger(__name__)


class PerClip:
    """Sample `i` is a clip of a video, in fixed order: all clips of the first video, then those of the second.

    Args:
        dataset: Of videos.
        counts: How many clips there are of each.
    """

    def __init__(self, dataset: Any, counts: list[int]) -> None:
        self.dataset = dataset
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
        sample = self.dataset[video]
        return None if sample is None else NumberedClip(sample, video, clip)


def count_clips(dataset: Any, clip: ClipSampler, modality: VideoModality) -> list[int]:
    """How many clips there are of each video; one of a file that cannot be used, so that it is met and named.

    Args:
        dataset: Of videos.
        clip: The sampler; only for mode "all" files are looked at, several at a time.
        modality: Opens them.

    Raises:
        TypeError: A sample has no video.
    """
    if clip.mode != "all":
        return [clip.num_clips] * len(dataset)
    with seeded(0, restore=True):
        videos = [_video_of(dataset, n) for n in range(len(dataset))]

    def count(video: Any) -> int:
        try:
            return clip.count(modality.index(video))
        except (MediaError, ValueError, OSError) as error:
            logger.debug("clips of %s not counted: %s", video if isinstance(video, str) else "bytes", error)
            return 1

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="lightning_dali_index") as pool:
        return list(pool.map(count, videos))


def _video_of(dataset: Any, index: int) -> str | bytes:
    sample = dataset[index]
    for _, leaf in leaves(sample):
        if is_video(leaf):
            return bytes(leaf) if isinstance(leaf, (bytes, bytearray)) else os.fspath(leaf)
    raise TypeError(
        f"mode='all' counts the clips of each video, but sample {index} has no path of a video and no bytes: {sample!r}"
    )
