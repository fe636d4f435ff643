"""Which frames of a video make a clip. Runs in the worker process, on a `VideoIndex` alone: nothing is decoded.

Random starts come from torch's default generator, which the caller seeds for each sample.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from lightning_dali.media.video_index import Bools, Floats, Ints, VideoIndex

MODES = ("random", "start", "center", "uniform", "all", "explicit")
_EPSILON = 1e-6
"""Seconds; far below a frame, far above the rounding of float64 times."""
PADS = ("edge", "constant", "reflect_101", "reflect_1001", "none")


@dataclass(frozen=True, eq=False)
class Clip:
    """The frames of one clip, T of them."""

    frames: Ints
    """(T,) frame numbers in display order; where the video has no such frame, a frame by `pad`, or -1 (constant:
    black)."""
    pts_seconds: Floats
    """(T,) presentation time of each; not a number where the frame is -1."""
    mask: Bools
    """(T,) whether each is real, not padding."""
    clip: int = 0
    """The clip's number within its video."""

    def __post_init__(self) -> None:
        """Check that the three arrays are of one length."""
        if not len(self.frames) == len(self.pts_seconds) == len(self.mask):
            raise ValueError(f"lengths differ: {len(self.frames)}, {len(self.pts_seconds)}, {len(self.mask)}")

    @property
    def num_real(self) -> int:
        """How many frames are real."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class ClipSampler:
    """Chooses the frames of a clip from a video.

    A clip is `num_frames` frames, either every `stride`-th one or, with `fps`, those shown at so many instants a
    second. By real presentation times: a video of variable frame rate needs nothing special, and `fps` gives the frame
    that is shown at each instant, the nearest at or before it. Ranges are half-open, times are those of the file (see
    `VideoIndex`).

    Examples:
        Ten frames at 10 a second; a clip of three, every second one, spans frames s, s + 2, s + 4, so it may start in
        [0, 6):

        >>> from fractions import Fraction
        >>> ten = VideoIndex(pts=range(10), time_base=Fraction(1, 10))
        >>> def show(sampler, **which):
        ...     return sampler.sample(ten, **which).frames.tolist()
        >>> show(ClipSampler(3, stride=2, mode="start")), show(ClipSampler(3, stride=2, mode="center"))
        ([0, 2, 4], [2, 4, 6])
        >>> evenly = ClipSampler(3, stride=2, mode="uniform", num_clips=3)
        >>> [show(evenly, clip=k) for k in range(evenly.count(ten))]
        [[0, 2, 4], [2, 4, 6], [5, 7, 9]]
        >>> every = ClipSampler(3, stride=2, mode="all")
        >>> [show(every, clip=k) for k in range(every.count(ten))]
        [[0, 2, 4], [6, 8, 9]]
        >>> every.sample(ten, clip=1).mask.tolist()
        [True, True, False]

        Five instants a second, the same frames as a stride of two; twenty a second shows each frame twice:

        >>> show(ClipSampler(3, fps=5, mode="start")), show(ClipSampler(4, fps=20, mode="start"))
        ([0, 2, 4], [0, 0, 1, 1])

        Bounds in seconds, and what is past the end, by `pad` (in DALI's words and with its arithmetic):

        >>> show(ClipSampler(3, mode="start", start_seconds=0.5, end_seconds=0.7))
        [5, 6, 6]
        >>> {pad: show(ClipSampler(frames=[8, 9, 10, 11], pad=pad)) for pad in PADS[:-1]}
        {'edge': [8, 9, 9, 9], 'constant': [8, 9, -1, -1], 'reflect_101': [8, 9, 8, 7], 'reflect_1001': [8, 9, 9, 8]}
        >>> show(ClipSampler(seconds=[0.0, 0.55, 0.6]))
        [0, 5, 6]

    Raises:
        ValueError: an argument is out of its range, or two say different things.
    """

    num_frames: int = 0
    """Frames a clip, T; 0 only with `frames` or `seconds`, whose number it then is."""
    _: KW_ONLY
    stride: int = 1
    """Frames from one to the next; change it to see a longer stretch with as many frames."""
    fps: float | None = None
    """Instants a second; instead of `stride` where videos differ in frame rate and motion should not."""
    mode: str = "random"
    """random: anywhere it fits. start: at the first frame. center: in the middle. uniform: `num_clips` starts evenly
    spaced from the first that fits to the last (one clip: center). all: one after another to the end. explicit: with
    `frames` or `seconds`."""
    num_clips: int = 1
    """Clips a video: evenly spaced for uniform, drawn independently for random."""
    pad: str = "edge"
    """What stands where a clip goes past the end: edge (the last frame), constant (-1), reflect_101 (back from the
    frame before the last), reflect_1001 (back from the last), none (an error)."""
    frames: Sequence[int] | None = None
    """The frame numbers themselves."""
    seconds: Sequence[float] | None = None
    """The instants themselves."""
    start_seconds: float | None = None
    """Where clips may start: the frame shown then is the first. None: the video's start."""
    end_seconds: float | None = None
    """Where clips must end: frames from then on do not exist. None: the video's end."""

    def __post_init__(self) -> None:
        """Check the arguments; lists become tuples, so that the value can be compared and hashed."""
        given = self.frames if self.frames is not None else self.seconds
        if given is not None:
            self._check_explicit(len(given))
        elif self.mode == "explicit":
            raise ValueError("mode='explicit' needs frames=[...] or seconds=[...]")
        for name in ("num_frames", "stride", "num_clips"):
            value = getattr(self, name)
            if isinstance(value, bool) or int(value) != value or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        if self.fps is not None and not (self.fps > 0 and math.isfinite(self.fps)):
            raise ValueError(f"fps must be above 0, got {self.fps!r}")
        if self.fps is not None and self.stride != 1:
            raise ValueError(f"stride={self.stride} and fps={self.fps} say different things: give one")
        for name, allowed in (("mode", MODES), ("pad", PADS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.num_clips > 1 and self.mode not in ("random", "uniform"):
            raise ValueError(f"num_clips={self.num_clips} is for mode random or uniform, not {self.mode}")
        if None not in (self.start_seconds, self.end_seconds) and not self.start_seconds < self.end_seconds:  # type: ignore[operator]  # neither is None
            raise ValueError(f"start_seconds={self.start_seconds} must be below end_seconds={self.end_seconds}")

    def _check_explicit(self, number: int) -> None:
        """Check the arguments that go with `frames` and `seconds`, and fill in their number and mode."""
        if self.frames is not None and self.seconds is not None:
            raise ValueError("frames and seconds say different things: give one")
        if self.num_frames not in (0, number) or number == 0:
            raise ValueError(f"num_frames={self.num_frames}, but {number} frames or seconds are given")
        others = (self.stride, self.fps, self.num_clips, self.start_seconds, self.end_seconds)
        if self.mode not in ("random", "explicit") or others != (1, None, 1, None, None):
            raise ValueError("frames and seconds name every frame: drop stride, fps, mode, num_clips and the bounds")
        if self.frames is not None:
            object.__setattr__(self, "frames", tuple(int(frame) for frame in self.frames))
            if min(self.frames) < 0:
                raise ValueError(f"frames must not be negative, got {self.frames}")
        if self.seconds is not None:
            object.__setattr__(self, "seconds", tuple(float(second) for second in self.seconds))
            if not all(math.isfinite(second) for second in self.seconds):
                raise ValueError(f"seconds must be finite, got {self.seconds}")
        object.__setattr__(self, "num_frames", number)
        object.__setattr__(self, "mode", "explicit")

    @property
    def is_random(self) -> bool:
        """Whether two calls may give different clips."""
        return self.mode == "random"

    def count(self, index: VideoIndex) -> int:
        """How many clips the video gives: `num_clips`, or, for mode all, as many as cover it (whole ones with pad
        none)."""
        if self.mode != "all":
            return self.num_clips
        low, high, end = self._bounds(index)
        if self.fps is None:
            steps = math.ceil((high - low) / self.stride)
        else:
            steps = math.ceil((end - float(index.seconds[low])) * self.fps - _EPSILON)
        return max(1, steps // self.num_frames if self.pad == "none" else math.ceil(steps / self.num_frames))

    def sample(self, index: VideoIndex, *, clip: int = 0) -> Clip:
        """Choose the frames of one clip.

        Args:
            index: the video's.
            clip: which of the video's clips, in [0, `count(index)`).

        Raises:
            ValueError: no such clip, no frames within the bounds, or with pad none a clip that does not fit.
        """
        if not 0 <= clip < self.count(index):
            raise ValueError(f"clip must lie in [0, {self.count(index)}), got {clip}")
        low, high, end = self._bounds(index)
        wanted = self._wanted(index, low, high, end, clip)
        mask = wanted < high
        frames = wanted if mask.all() else self._padded(index, wanted, low, high)
        pts_seconds = np.where(frames < 0, np.nan, index.seconds[frames])
        return Clip(frames, pts_seconds, mask, clip)

    def _bounds(self, index: VideoIndex) -> tuple[int, int, float]:
        """The first frame, the frame after the last, and the time when the last one ends."""
        low, high, end = 0, index.num_frames, index.end_seconds
        if self.start_seconds is not None:
            low = int(index.frame_at(self.start_seconds))
        if self.end_seconds is not None and self.end_seconds < end:
            high, end = index.first_from(self.end_seconds), self.end_seconds
        if low >= high or (self.start_seconds is not None and self.start_seconds >= index.end_seconds):
            raise ValueError(
                f"no frames in [{self.start_seconds}, {self.end_seconds}) s: "
                f"the video lasts from {index.start_seconds} to {index.end_seconds} s"
            )
        return low, high, end

    def _wanted(self, index: VideoIndex, low: int, high: int, end: float, clip: int) -> Ints:
        """The wanted frame numbers, as if the video went on past `high` at its average rate."""
        steps = np.arange(self.num_frames) + (clip * self.num_frames if self.mode == "all" else 0)
        if self.frames is not None:
            return np.array(self.frames, dtype=np.int64)
        if self.seconds is not None:
            return self._at(index, np.array(self.seconds), high, end, tolerance_ticks=0.5)
        start = low if self.mode in ("all", "start") else low + self._offset(index, low, high, end, clip)
        if self.fps is None:
            return start + steps * self.stride
        return self._at(index, index.seconds[start] + steps / self.fps, high, end, tolerance_ticks=1.0)

    def _at(self, index: VideoIndex, times: Floats, high: int, end: float, *, tolerance_ticks: float) -> Ints:
        """The frames shown at these times. For `fps` two rounded times may be compared, hence its wider tolerance."""
        past = times + _EPSILON >= end
        beyond = high + np.floor((times - end + _EPSILON) * index.average_rate).astype(np.int64)
        shown = np.minimum(index.frame_at(times, tolerance_ticks=tolerance_ticks), high - 1)
        return np.where(past, np.maximum(beyond, high), shown)

    def _offset(self, index: VideoIndex, low: int, high: int, end: float, clip: int) -> int:
        """Where the clip starts, in frames after `low`."""
        if self.fps is None:
            fits = high - low - (self.num_frames - 1) * self.stride
        else:
            latest = end - (self.num_frames - 1) / self.fps - _EPSILON
            fits = int(np.searchsorted(index.seconds[low:high], latest, side="left"))
        fits = max(fits, 1)
        if self.mode == "random":
            return int(torch.randint(fits, ()))
        if self.mode == "uniform" and self.num_clips > 1:
            return (fits - 1) * clip // (self.num_clips - 1)
        return (fits - 1) // 2

    def _padded(self, index: VideoIndex, wanted: Ints, low: int, high: int) -> Ints:
        """The wanted frames with those from `high` on replaced."""
        if self.pad == "edge":
            return np.minimum(wanted, high - 1)
        if self.pad == "constant":
            return np.where(wanted < high, wanted, -1)
        if self.pad == "none":
            step = f"fps={self.fps}" if self.fps else f"stride={self.stride}"
            raise ValueError(
                f"a clip of {self.num_frames} frames ({step}) reaches frame {wanted.max()}, but the video has frames "
                f"[{low}, {high}): ask for fewer, or choose a pad other than none"
            )
        last, skip = high - low - 1, self.pad == "reflect_101"  # reflect_101 does not repeat the last frame
        period = max(2 * last + 2 - 2 * skip, 1)
        place = (wanted - low) % period
        return np.where(wanted < high, wanted, low + np.minimum(place, 2 * last + 1 - skip - place))
