"""What is known of a video without decoding it: presentation times, key frames, format. Runs in the worker process.

A `VideoIndex` is made by `build_index` (video_scan.py), kept by `IndexCache` and read by `ClipSampler`, `cut` and
`decode_frames`.
"""

import json
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dali.media.errors import MediaError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_MAGIC = b"lightning-dali video index 1\n"
"""Also the version: change the number when the meaning of a field changes."""


class VideoError(MediaError):
    """A file that is not a video, or not a usable one; its text is the reason, short, without path or index."""


def _no_ints() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class PacketTable:
    """The N packets of a video stream in decode order; what `cut` and `decode_frames` need to find and order them."""

    ranks: Ints
    """(N,) place of the packet's picture in display order; -1 where the packet yields no picture."""
    starts: Ints = field(default_factory=_no_ints)
    """(K,) the packets at which decoding can start, ascending."""
    start_kinds: Ints = field(default_factory=_no_ints)
    """(K,) a `bitstream.Start` for each of them."""
    ids: Ints = field(default_factory=_no_ints)
    """(N,) a number that names each packet: its time on `clock`."""
    clock: str = ""
    """What `ids` are: "pts", "dts", "pos" (byte position), or "" where nothing is unique: such a file is read from its
    start."""
    positions: Ints = field(default_factory=_no_ints)
    """(N,) first byte of each packet in the file; empty unless the bytes there are the packet as it is (MP4 and
    MOV)."""
    sizes: Ints = field(default_factory=_no_ints)
    """(N,) bytes of each packet."""

    def __len__(self) -> int:
        """The number of packets, N."""
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """The frames of one video in display order, and how to get at them.

    Frame numbers count the frames a player shows: hidden reference frames, frames outside an edit list and frames that
    nothing can decode (before the first key frame) have no number. Times are presentation times as they stand in the
    file, the same as PyAV's `frame.time` and torchcodec's `pts_seconds`; a stream need not start at zero.

    Only `pts` and `time_base` are needed to draw clips:

    >>> index = VideoIndex(pts=[0, 10, 20, 35], time_base=Fraction(1, 100))
    >>> index.num_frames, index.seconds.tolist(), index.end_seconds
    (4, [0.0, 0.1, 0.2, 0.35], 0.45)
    """

    pts: Ints
    """(T,) presentation time of each frame in ticks of `time_base`."""
    time_base: Fraction
    """Seconds a tick."""
    end_pts: int | None = None
    """When the last frame ends, in ticks (half-open); by default it lasts as long as the median frame."""
    frame_packets: Ints = field(default_factory=_no_ints)
    """(T,) the packet, in decode order, that carries each frame."""
    packets: PacketTable = field(default_factory=lambda: PacketTable(_no_ints()))
    """The packets in decode order."""
    codec: str = ""
    """FFmpeg's name: h264, hevc, vp8, vp9, av1, mpeg4, mjpeg, ..."""
    profile: str | None = None
    """FFmpeg's name of the codec's profile."""
    width: int = 0
    """Pixels, as stored: before `rotation`."""
    height: int = 0
    """Pixels, as stored: before `rotation`."""
    coded_width: int = 0
    """Pixels before the codec's cropping rectangle is applied (1920x1080 H.264 is coded as 1920x1088)."""
    coded_height: int = 0
    """Like `coded_width`."""
    pix_fmt: str = ""
    """FFmpeg's name of the pixel format, like yuv420p."""
    chroma: str = ""
    """Chroma subsampling: 420, 422, 444, 400 (gray), or rgb."""
    bit_depth: int = 8
    """Bits a component."""
    rotation: int = 0
    """Degrees (0, 90, 180, 270) by which a player turns each frame counterclockwise."""
    color_range: str = "unspecified"
    """limited, full or unspecified (which is taken as limited)."""
    color_matrix: str = "unspecified"
    """bt709, bt601, bt2020, smpte240m, fcc, rgb or unspecified (which is taken as bt601, as FFmpeg does)."""
    sample_aspect_ratio: Fraction = Fraction(1)
    """Width over height of a pixel."""
    container: str = ""
    """FFmpeg's name of the file format."""
    header: bytes = b""
    """For MP4 and MOV an empty MP4 that carries the codec's parameters, so that the file's own header need not be read
    again."""
    source_bytes: int = 0
    """Size of the file the index was made from."""
    header_num_frames: int = 0
    """What the header says the number of frames is; 0 where it does not say. May lie: `num_frames` is counted."""
    truncated: bool = False
    """Whether the file ends before its header says it should, or in the middle of a packet."""

    def __post_init__(self) -> None:
        """Take lists for arrays and check that there is at least one frame, in order of time."""
        for name in ("pts", "frame_packets"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        if self.num_frames == 0:
            raise VideoError("zero frames")
        if np.any(np.diff(self.pts) < 0):
            raise ValueError("pts must not decrease: frames are numbered in display order")
        if self.end_pts is None:
            object.__setattr__(self, "end_pts", int(self.pts[-1]) + self._median_ticks)

    @property
    def num_frames(self) -> int:
        """The number of frames, T."""
        return len(self.pts)

    @property
    def _median_ticks(self) -> int:
        return max(1, int(np.median(np.diff(self.pts)))) if self.num_frames > 1 else 1

    @cached_property
    def seconds(self) -> Floats:
        """(T,) presentation time of each frame in seconds."""
        return self.pts * self.time_base.numerator / self.time_base.denominator

    @cached_property
    def keyframes(self) -> Ints:
        """(K,) frame numbers at which decoding can start, ascending."""
        return np.flatnonzero(np.isin(self.frame_packets, self.packets.starts)).astype(np.int64)

    @property
    def start_seconds(self) -> float:
        """When the first frame is shown."""
        return float(self.seconds[0])

    @property
    def end_seconds(self) -> float:
        """When the last frame ends (half-open)."""
        assert self.end_pts is not None  # __post_init__ has set it
        return self.end_pts * self.time_base.numerator / self.time_base.denominator

    @property
    def duration_seconds(self) -> float:
        """From the first frame's start to the last frame's end."""
        return self.end_seconds - self.start_seconds

    @property
    def average_rate(self) -> float:
        """Frames a second, on average."""
        return self.num_frames / self.duration_seconds

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the frames as a player shows them, `rotation` applied."""
        return (self.width, self.height) if self.rotation in (90, 270) else (self.height, self.width)

    @property
    def cropped(self) -> bool:
        """Whether the coded picture is larger than the one shown."""
        return (self.coded_width, self.coded_height) != (self.width, self.height)

    @property
    def nbytes(self) -> int:
        """About how much memory the index takes, in bytes."""
        arrays = 24 * self.num_frames + 24 * len(self.packets) + 8 * len(self.packets.positions)
        return 512 + len(self.header) + arrays

    def frame_at(self, seconds: npt.ArrayLike, *, tolerance_ticks: float = 0.5) -> Ints:
        """The frames shown at the given times: the nearest at or before each; the first frame for times before it.

        A frame counts as shown up to `tolerance_ticks` of the time base (and never more than that many milliseconds)
        before its time, because containers round: WebM keeps milliseconds, so frame 2 at 30 frames a second is stored
        as 67 ms, not 66.67.

        >>> VideoIndex(pts=[0, 33, 67, 100], time_base=Fraction(1, 1000)).frame_at([0.0, 0.05, 2 / 30, 5.0]).tolist()
        [0, 1, 2, 3]
        """
        ticks = np.asarray(seconds, dtype=np.float64) * self.time_base.denominator / self.time_base.numerator
        found = np.searchsorted(self.pts, ticks + self._slack(tolerance_ticks), side="right") - 1
        return np.maximum(found, 0).astype(np.int64)

    def first_from(self, seconds: float) -> int:
        """The first frame whose time is not before the given one, to within half a tick; `num_frames` if there is
        none."""
        ticks = seconds * self.time_base.denominator / self.time_base.numerator
        return int(np.searchsorted(self.pts, ticks - self._slack(0.5), side="left"))

    def _slack(self, ticks: float) -> float:
        return ticks * min(1.0, 1e-3 / float(self.time_base)) + 1e-6

    def to_bytes(self) -> bytes:
        """The index as bytes: JSON, then arrays as differences in the smallest integer type. `from_bytes` is the way
        back."""
        plain, blocks = _dump(self)
        head = json.dumps(plain).encode()
        return b"".join([_MAGIC, len(head).to_bytes(4, "little"), head, *blocks])

    @classmethod
    def from_bytes(cls, data: bytes) -> "VideoIndex":
        """An index from what `to_bytes` gave; ValueError for anything else (nothing in it is executed or unpickled)."""
        if not data.startswith(_MAGIC):
            raise ValueError("not a video index of this version")
        start = len(_MAGIC) + 4
        end = start + int.from_bytes(data[start - 4 : start], "little")
        return cls(**_load(json.loads(data[start:end]), memoryview(data)[end:]))

    def __eq__(self, other: object) -> bool:
        """Equal in every field."""
        return isinstance(other, VideoIndex) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        """By a few of the fields."""
        return hash((self.codec, self.width, self.height, self.num_frames, self.end_pts))

    def __repr__(self) -> str:
        """One line; the arrays are too long to print."""
        return (
            f"VideoIndex({self.num_frames} frames, {self.duration_seconds:.3f} s, {len(self.keyframes)} key frames, "
            f"{self.codec or 'no codec'} {self.pix_fmt} {self.width}x{self.height}, rotation={self.rotation})"
        )


_ARRAYS = ("pts", "frame_packets")
_PACKET_ARRAYS = ("ranks", "starts", "start_kinds", "ids", "positions", "sizes")
_DERIVED = ("packets", "header", "seconds", "keyframes")
_FRACTIONS = ("time_base", "sample_aspect_ratio")


def _dump(index: VideoIndex) -> tuple[dict[str, Any], list[bytes]]:
    """The plain fields of an index with a list of (name, first value, type, length), and the arrays' bytes."""
    owners: list[tuple[str, Any]] = [(name, index) for name in _ARRAYS] + [
        (name, index.packets) for name in _PACKET_ARRAYS
    ]
    plain = {name: value for name, value in vars(index).items() if name not in (*_ARRAYS, *_DERIVED)}
    plain |= {name: [plain[name].numerator, plain[name].denominator] for name in _FRACTIONS}
    blocks, table = [index.header], []
    for name, owner in owners:
        values = np.asarray(getattr(owner, name), dtype=np.int64)
        steps = np.diff(values)
        low, high = (int(steps.min()), int(steps.max())) if steps.size else (0, 0)
        kind = next(k for k in ("<i1", "<i2", "<i4", "<i8") if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
        even = low == high  # as in all that counts up: nothing to store
        table.append([name, int(values[0]) if values.size else 0, low if even else kind, int(values.size)])
        blocks.append(b"" if even else steps.astype(kind).tobytes())
    return plain | {"clock": index.packets.clock, "header": len(index.header), "arrays": table}, blocks


def _load(plain: dict[str, Any], data: memoryview) -> dict[str, Any]:
    """The arguments of `VideoIndex` from what `_dump` gave."""
    offset = plain.pop("header")
    header, arrays = bytes(data[:offset]), {}
    for name, first, kind, size in plain.pop("arrays"):
        if isinstance(kind, int):
            arrays[name] = np.arange(size, dtype=np.int64) * kind + first
            continue
        steps = np.frombuffer(data, dtype=kind, count=size - 1, offset=offset)
        offset += steps.nbytes
        arrays[name] = np.empty(size, dtype=np.int64)
        arrays[name][0], arrays[name][1:] = first, steps
        np.cumsum(arrays[name], out=arrays[name])
    table = PacketTable(clock=plain.pop("clock"), **{name: arrays.pop(name) for name in _PACKET_ARRAYS})
    plain |= {name: Fraction(*plain[name]) for name in _FRACTIONS}
    return plain | arrays | {"packets": table, "header": header}
