"""While a dataset's `__getitem__` runs, the clips that torchvision's video datasets read are `ProxyVideo`s.

Runs in the worker. torchvision 0.26 reads Kinetics, UCF101 and HMDB51 through `VideoClips` with torchcodec; captured, it
needs none: `get_clip` is answered with a proxy, and while a dataset is made its videos are indexed here.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torchvision.transforms.functional as F1
from torchvision import tv_tensors
from torchvision.datasets.video_utils import VideoClips
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F2

from lightning_dali.media import Clip, IndexCache, VideoError
from lightning_dali.proxies.capture import V1_TWINS, Replaced, capture, register_capture
from lightning_dali.proxies.video import ProxyVideo
from lightning_dali.proxies.video_source import VideoSource

logger = logging.getLogger(__name__)
_options = threading.local()


@contextmanager
def capture_video(cache: IndexCache, *, sound: Callable[[VideoSource], Any] | None = None) -> Iterator[None]:
    """While it is open, clips that this thread reads through torchvision's `VideoClips` come as proxies.

    Args:
        cache: Where indices of videos are kept.
        sound: Makes the sound of a clip; None: there is none.
    """
    before = getattr(_options, "cache", None), getattr(_options, "sound", None)
    _options.cache, _options.sound = cache, sound
    try:
        with capture("video"):
            yield
    finally:
        _options.cache, _options.sound = before


def _cache() -> IndexCache:
    cache: IndexCache = _options.cache
    return cache


def _get_clip(
    original: Callable[..., Any], clips: VideoClips, idx: int
) -> tuple[Any, torch.Tensor, dict[str, Any], int]:
    """torchvision's own `get_clip`: the same frames, by the same arithmetic; sound where it is asked for."""
    if idx >= clips.num_clips():
        raise IndexError(f"Index {idx} out of range ({clips.num_clips()} number of clips)")
    video_idx, clip_idx = clips.get_clip_location(idx)
    path = os.fspath(clips.video_paths[video_idx])
    pts = clips.clips[video_idx][clip_idx]
    frames = np.arange(int(pts[0]), int(pts[-1]) + 1)
    try:
        index = _cache().get(path)
    except VideoError as error:
        error.path = path
        raise
    fps = index.average_rate
    if clips.frame_rate is not None:
        chosen = clips.resampling_idxs[video_idx][clip_idx]
        frames = frames[(chosen - chosen[0]).numpy() if isinstance(chosen, torch.Tensor) else chosen]
        fps = clips.frame_rate
    if frames[-1] >= index.num_frames:
        raise VideoError(f"the clip ends with frame {frames[-1]}, but the video has {index.num_frames} frames", path)
    clip = Clip(frames, index.seconds[frames], np.ones(len(frames), bool), int(clip_idx))
    sound = _options.sound
    source = VideoSource(path, index, clip, heard=sound is not None)
    audio = torch.empty((1, 0), dtype=torch.float32) if sound is None else sound(source)
    video: Any = ProxyVideo.make(source)
    if clips.output_format == "THWC":
        video = torch.from_numpy(video.source.frames().copy())
    return video, audio, {"video_fps": fps}, video_idx


def _compute_frame_pts(original: Callable[..., Any], clips: VideoClips) -> None:
    """Frame numbers and rate of every video; none of one that cannot be used, which torchvision then leaves out."""
    cache = _cache()

    def look(path: str) -> tuple[torch.Tensor, float | None]:
        try:
            index = cache.get(os.fspath(path))
        except (VideoError, OSError) as error:
            logger.warning("%s has no clips: %s", path, error)
            return torch.zeros(0, dtype=torch.long), None
        return torch.arange(index.num_frames), index.average_rate

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="lightning_dali_index") as pool:
        found = list(pool.map(look, clips.video_paths))
    clips.video_pts = [pts for pts, _ in found]
    clips.video_fps = [fps for _, fps in found]


def _as_tensor(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.as_tensor` would copy the stand-in's byte; so would every `tv_tensors.Video(data)`."""
    if not isinstance(data, ProxyVideo):
        return original(data, *args, **kwargs)
    if all(value is None for value in (*args, *kwargs.values())):
        return data
    return original(data.materialise("as_tensor"), *args, **kwargs)


def _wrap(original: Callable[..., Any], wrappee: Any, *, like: Any, **kwargs: Any) -> Any:
    """What was computed from pixels is a video, not a proxy."""
    if not isinstance(like, ProxyVideo):
        return original(wrappee, like=like, **kwargs)
    return wrappee.as_subclass(tv_tensors.Video)


def _get_fill(original: Callable[..., Any], fills: Any, kind: type) -> Any:
    """torchvision looks a fill up by the exact type."""
    return original(fills, tv_tensors.Video if kind is ProxyVideo and tv_tensors.Video in fills else kind)


def _transform_dtype(original: Callable[..., Any], self: Any, inpt: Any, params: Any) -> Any:
    """`v2.ToDtype` looks its dtype up by the exact type too."""
    if not isinstance(inpt, ProxyVideo) or not isinstance(self.dtype, dict):
        return original(self, inpt, params)
    if tv_tensors.Video not in self.dtype and "others" not in self.dtype:
        return original(self, inpt, params)  # raises, and says why
    dtype = self.dtype.get(tv_tensors.Video, self.dtype.get("others"))
    return inpt if dtype is None else F2.to_dtype(inpt, dtype=dtype, scale=self.scale)


def _convert_image_dtype(original: Callable[..., Any], image: Any, dtype: torch.dtype = torch.float32) -> Any:
    return F2.to_dtype(image, dtype, scale=True) if isinstance(image, ProxyVideo) else original(image, dtype)


def _v1_twin(twin: Callable[..., Any], original: Callable[..., Any], img: Any, *args: Any, **kwargs: Any) -> Any:
    return (twin if isinstance(img, ProxyVideo) else original)(img, *args, **kwargs)


@functools.lru_cache(maxsize=1)
def _replacements() -> list[Replaced]:
    twins = [name for name in vars(F1) if name in V1_TWINS and hasattr(F2, name)]
    return [
        (VideoClips, "get_clip", _get_clip),
        (VideoClips, "_compute_frame_pts", _compute_frame_pts),
        (torch, "as_tensor", _as_tensor),
        (torch, "tensor", _as_tensor),
        (tv_tensors, "wrap", _wrap),
        (v2.ToDtype, "transform", _transform_dtype),
        *((module, "_get_fill", _get_fill) for module in vars(v2).values() if hasattr(module, "_get_fill")),
        (F1, "convert_image_dtype", _convert_image_dtype),
        *((F1, name, functools.partial(_v1_twin, getattr(F2, name))) for name in twins),
    ]


register_capture("video", _replacements)
