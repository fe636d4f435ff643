"""Small videos whose frames carry their own number, so that a test can say which frame it got.

The number is painted as twelve black or white blocks (eleven bits and a parity bit), big enough to survive any codec
here.
"""

import os
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np

os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 writes to stderr by itself: errors only

BITS = 12
ROWS, COLUMNS = 3, 4
TICK = Fraction(1, 1000)
"""The time base the videos are written with, in seconds (containers may use another one)."""

CODECS = {"h264": "libx264", "hevc": "libx265", "vp8": "libvpx", "vp9": "libvpx-vp9", "av1": "libsvtav1"}
"""FFmpeg's encoder for a codec; other names (mpeg4, mjpeg, mpeg2video, ...) are encoders themselves."""


def paint_number(number: int, width: int, height: int) -> np.ndarray:
    """A (height, width, 3) uint8 picture of a number below 2048, read back by `read_number`."""
    bits = [number >> bit & 1 for bit in range(BITS - 1)]
    bits.append(sum(bits) & 1)
    blocks = np.where(np.array(bits, dtype=bool).reshape(ROWS, COLUMNS), 220, 36).astype(np.uint8)
    rows = np.minimum(np.arange(height) * ROWS // height, ROWS - 1)
    columns = np.minimum(np.arange(width) * COLUMNS // width, COLUMNS - 1)
    return np.repeat(blocks[rows][:, columns, None], 3, axis=2)


def read_number(frame: np.ndarray) -> int:
    """The number painted in a (H, W, 3) or (H, W) frame; -1 where a block is neither black nor white or the parity is wrong."""
    height, width = frame.shape[:2]
    value, ones = 0, 0
    for bit in range(BITS):
        row, column = divmod(bit, COLUMNS)
        top, left = (4 * row + 1) * height // (4 * ROWS), (4 * column + 1) * width // (4 * COLUMNS)
        block = frame[top : top + height // (2 * ROWS), left : left + width // (2 * COLUMNS)]
        mean = float(block.mean())
        if 90 < mean < 166:
            return -1
        one = int(mean > 128)
        ones += one
        value |= one << bit
    return value & (1 << BITS - 1) - 1 if ones % 2 == 0 else -1


def encoder_options(codec: str, gop: int, b_frames: int, open_gop: bool) -> dict[str, str]:
    """Options that make the encoder place key frames every `gop` frames exactly."""
    g, bf = str(gop), str(b_frames)
    if codec == "h264":
        params = f"scenecut=0:keyint={g}:min-keyint={g}:bframes={bf}:b-adapt=0:open-gop={int(open_gop)}:log-level=none"
        return {"preset": "ultrafast", "x264-params": params}
    if codec == "hevc":
        params = f"scenecut=0:keyint={g}:min-keyint={g}:bframes={bf}:b-adapt=0:open-gop={int(open_gop)}"
        return {"preset": "ultrafast", "x265-params": f"{params}:pools=1:frame-threads=1:log-level=none"}
    if codec in ("vp8", "vp9"):
        lag = {"auto-alt-ref": "1", "lag-in-frames": "8"} if b_frames else {"lag-in-frames": "0"}
        return {"g": g, "keyint_min": g, "deadline": "realtime", "cpu-used": "8", "b": "400k", **lag}
    if codec == "av1":
        structure = "pred-struct=2:hierarchical-levels=2" if b_frames else "pred-struct=1"
        return {"g": g, "preset": "6", "crf": "5", "svtav1-params": f"lp=1:scd=0:enable-tf=0:{structure}"}
    return {"g": g, "bf": bf, "b": "8M"} if codec != "mjpeg" else {}


def make_video(
    path: Any,
    codec: str = "h264",
    *,
    width: int = 64,
    height: int = 48,
    num_frames: int = 20,
    rate: int = 10,
    gop: int = 5,
    b_frames: int = 0,
    open_gop: bool = False,
    pts_jitter: Sequence[int] = (0,),
    start: int = 0,
    rotation: int | None = None,
    audio: bool = False,
    pix_fmt: str | None = None,
    container: str | None = None,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
) -> Any:
    """Write a video whose frame k shows the number k and return `path` (a path, or a file object with `container`).

    Frame k is presented at `start + 1000 * k / rate + pts_jitter[k % len(pts_jitter)]` milliseconds. `b_frames` is the
    number of B-frames (hidden alternate references for VP8 and VP9); `open_gop` lets them refer across the key frame.
    """
    with av.open(path, "w", format=container, options=container_options or {}) as out:
        stream: Any = out.add_stream(CODECS.get(codec, codec), rate=rate)
        stream.width, stream.height = width, height
        stream.pix_fmt = pix_fmt or ("yuvj420p" if codec == "mjpeg" else "yuv420p")
        stream.options = {**encoder_options(codec, gop, b_frames, open_gop), **(options or {})}
        stream.codec_context.thread_count = 1
        stream.codec_context.time_base = Fraction(1, rate) if codec.startswith("mpeg") and codec != "mpeg4" else TICK
        sound: Any = out.add_stream("aac" if codec not in ("vp8", "vp9") else "libopus", rate=48000) if audio else None
        for k in range(num_frames):
            picture = av.VideoFrame.from_ndarray(paint_number(k, width, height), format="rgb24")
            picture.pts, picture.time_base = start + 1000 * k // rate + pts_jitter[k % len(pts_jitter)], TICK
            out.mux(stream.encode(picture))
            if sound is not None:
                out.mux(sound.encode(_silence(48000 // rate, k)))
        out.mux(stream.encode())
        if sound is not None:
            out.mux(sound.encode())
    if rotation:
        _rotate(path, rotation)
    return path


def _rotate(path: Any, degrees: int) -> None:
    """Write a counterclockwise rotation into an MP4's track header, as phones do (ISO/IEC 14496-12, 8.3.2)."""
    data = bytearray(path.read_bytes())
    cosine, sine = (round(f(np.deg2rad(degrees))) << 16 for f in (np.cos, np.sin))
    struct.pack_into(">9i", data, data.rfind(b"tkhd") + 44, cosine, -sine, 0, sine, cosine, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


def read_numbers(source: Any) -> list[int]:
    """The numbers of all frames of a file, as PyAV shows them."""
    with av.open(BytesIO(source) if isinstance(source, bytes) else source) as container:
        return [read_number(_luma(frame)) for frame in container.decode(video=0)]


def _luma(frame: av.VideoFrame) -> np.ndarray:
    """(H, W): as good as RGB for black and white, and ten times as fast, since nothing is converted."""
    if not frame.format.name.startswith("yuv") or frame.format.components[0].bits != 8:
        return frame.to_ndarray(format="rgb24")
    plane = frame.planes[0]
    return np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: frame.height, : frame.width]


def rewrite(
    source: Any, target: Any, change: Callable[[int, bytes], bytes | None], *, more: Any = None, gap: int = 0
) -> Any:
    """Copy a video's packets into another file: `change(number, data)` gives each one's new bytes, or None to leave it
    out.

    The packets of a second file, `more`, follow, `gap` ticks of its time base later than they were.
    """
    with av.open(target, "w") as out:
        stream: Any = None
        for path, later in ((source, 0), (more, gap)):
            if path is None:
                continue
            with av.open(path) as container:
                video = container.streams.video[0]
                stream = stream or out.add_stream_from_template(video, opaque=True)
                packets = [packet for packet in container.demux(video) if packet.size]
                for number, packet in enumerate(packets):
                    data = change(number, bytes(packet))
                    if data is not None:
                        copy = av.Packet(data)
                        copy.pts, copy.dts, copy.time_base = packet.pts + later, packet.dts + later, packet.time_base
                        copy.is_keyframe, copy.stream = packet.is_keyframe, stream
                        out.mux(copy)
    return target


def _silence(num_samples: int, k: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.zeros((2, num_samples), dtype=np.float32), format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = 48000, k * num_samples, Fraction(1, 48000)
    return frame
