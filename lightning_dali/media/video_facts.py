"""The format of a video, from its first frame. Runs in the worker process."""

from fractions import Fraction
from typing import Any

from lightning_dali.media.video_index import VideoError
from lightning_dali.media.video_open import codec_name
from lightning_dali.media.video_pictures import pictures

_RANGES = {1: "limited", 2: "full"}
"""AVColorRange."""
_MATRICES = {0: "rgb", 1: "bt709", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020", 10: "bt2020"}
"""AVColorSpace; 5 and 6 are the same matrix."""
_CHROMA = {(32, 32): "420", (32, 64): "422", (64, 64): "444", (64, 32): "440", (16, 64): "411", (16, 16): "410"}
"""By what is left of 64x64 luma samples."""


def read_facts(container: Any, stream: Any, head: list[Any]) -> dict[str, Any]:
    """The fields of a `VideoIndex` that describe pictures, from the first that the packets in `head` give.

    Raises:
        VideoError: none of them decodes.
    """
    context = stream.codec_context
    frame = next((frame for _, frame in pictures(context, enumerate(head))), None)
    if frame is None:
        raise VideoError(f"its first {len(head)} packets do not decode ({codec_name(stream)}): damaged or encrypted")
    pixel = frame.format
    return {
        "codec": codec_name(stream),
        "profile": stream.profile,
        "width": frame.width,
        "height": frame.height,
        "coded_width": max(context.coded_width, frame.width),
        "coded_height": max(context.coded_height, frame.height),
        "pix_fmt": pixel.name,
        "chroma": _chroma(pixel),
        "bit_depth": max(component.bits for component in pixel.components),
        "rotation": round(frame.rotation / 90) * 90 % 360,
        "color_range": "full" if pixel.name.startswith("yuvj") else _RANGES.get(int(frame.color_range), "unspecified"),
        "color_matrix": _MATRICES.get(int(frame.colorspace), "unspecified"),
        "sample_aspect_ratio": Fraction(context.sample_aspect_ratio or 1),
        "container": container.format.name,
    }


def _chroma(pixel: Any) -> str:
    if pixel.is_rgb or pixel.has_palette:
        return "rgb"
    if len(pixel.components) < 3:
        return "400"
    return _CHROMA.get((pixel.chroma_width(64), pixel.chroma_height(64)), "other")
