"""A dataset of videos seen as a dataset of clips, for evaluation with several clips a video.

Runs in the worker; counting clips runs in the rank, once, when clips are as many as a video is long (of a stream, in the worker).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from lightning_dali.media import ClipSampler, MediaError
from lightning_dali.modalities.video import NumberedClip, VideoModality, is_video
from lightning_dali.seeding import seeded
from lightning_dali.streams import this_share
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


class StreamOfClips(IterableDataset[Any]):
    """The same for a dataset that is iterated: all clips of a video, one behind the other.

    Args:
        dataset: Of videos.
        modality: Opens them, and says how many clips there are.
    """

    def __init__(self, dataset: Any, modality: VideoModality) -> None:
        self.dataset, self._modality = dataset, modality

    def __iter__(self) -> Iterator[Any]:
        for place, sample in enumerate(self.dataset):
            if sample is None:
                yield None
                continue
            for clip in range(self._count(sample)):
                yield NumberedClip(sample, this_share().name(place), clip)

    def _count(self, sample: Any) -> int:
        clip = self._modality.clip
        return (
            clip.num_clips
            if clip.mode != "all"
            else _clips_of(_video_of(sample, "a sample of the stream"), clip, self._modality)
        )

    def __len__(self) -> int:
        if self._modality.clip.mode == "all":
            raise TypeError("how many clips a stream of videos has shows when it ends")
        return len(self.dataset) * self._modality.clip.num_clips

    def set_epoch(self, epoch: int) -> None:
        """Tells the dataset, if it wants to know."""
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)


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
        videos = [_video_of(dataset[n], f"sample {n}") for n in range(len(dataset))]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="lightning_dali_index") as pool:
        return list(pool.map(lambda video: _clips_of(video, clip, modality), videos))


def _clips_of(video: str | bytes, clip: ClipSampler, modality: VideoModality) -> int:
    try:
        return clip.count(modality.index(video))
    except (MediaError, ValueError, OSError) as error:
        logger.debug("clips of %s not counted: %s", video if isinstance(video, str) else "bytes", error)
        return 1


def _video_of(sample: Any, name: str) -> str | bytes:
    for _, leaf in leaves(sample):
        if is_video(leaf):
            return bytes(leaf) if isinstance(leaf, (bytes, bytearray)) else os.fspath(leaf)
    raise TypeError(
        f"mode='all' counts the clips of each video, but {name} has no path of a video and no bytes: {sample!r:.200}"
    )
