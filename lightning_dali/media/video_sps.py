"""Which part of an H.264 stream's coded pictures is shown, by its sequence parameter sets, and how to show all of it.

Runs in the worker process.

Sections named are of ITU-T H.264.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_dali.media.bitstream import nal_units
from lightning_dali.media.video_index import VideoError, VideoIndex

Window = tuple[int, int, int, int]
"""top, left, height, width in pixels."""

_SPS, _SUBSET_SPS = 7, 15
"""nal_unit_type (Table 7-1); subset parameter sets are those of scalable and multiview streams."""
_WITH_CHROMA_FORMAT = {100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135}
"""Values of profile_idc whose parameter sets tell chroma, depth and scaling lists (7.3.2.1.1)."""
_CROP_UNITS = {0: (1, 1), 1: (2, 2), 2: (2, 1), 3: (1, 1)}
"""SubWidthC and SubHeightC by ChromaArrayType (Table 6-1, 7.4.2.1.1); 1 and 1 where there is no chroma to follow."""
_MACROBLOCK = 16


@dataclass(frozen=True)
class CodedPicture:
    """What an H.264 sequence parameter set says of its pictures."""

    width: int
    """Pixels that are coded, a multiple of 16."""
    height: int
    """Like `width`; of a frame, where fields are coded."""
    window: Window
    """What of it is shown: the cropping rectangle."""
    chroma_format: int
    """chroma_format_idc: 0 is gray, 1 4:2:0, 2 4:2:2, 3 4:4:4."""
    bit_depth: int
    """Bits a component, of luma or chroma, whichever has more."""
    frames_only: bool
    """Whether there are no fields in the stream (frame_mbs_only_flag)."""


class _Bits:
    """Reads the bits of a NAL unit's payload in order."""

    def __init__(self, nal: bytes) -> None:
        payload = nal[1:].replace(b"\0\0\3", b"\0\0")  # emulation prevention (7.3.1)
        self.value, self.size = int.from_bytes(payload, "big"), 8 * len(payload)
        self.left = self.size
        """How many bits have not been read."""

    def u(self, count: int = 1) -> int:
        """An unsigned number of so many bits."""
        self.left -= count
        if self.left < 0:
            raise VideoError("damaged: its sequence parameter set ends early")
        return self.value >> self.left & ((1 << count) - 1)

    def ue(self) -> int:
        """An unsigned Exp-Golomb number (9.1)."""
        zeros = 0
        while not self.u():
            zeros += 1
        return (1 << zeros) - 1 + self.u(zeros)

    def se(self) -> int:
        """A signed Exp-Golomb number (9.1.1)."""
        code = self.ue()
        return (code + 1) // 2 if code % 2 else -(code // 2)


def read_sps(nal: bytes) -> CodedPicture:
    """Reads a sequence parameter set (7.3.2.1.1) up to its cropping rectangle.

    Args:
        nal: the NAL unit with its first byte, as in the stream, without start code or length.

    Raises:
        VideoError: it ends early, or its rectangle is not inside of the picture.
    """
    return _read(_Bits(nal))[0]


def without_cropping(nal: bytes) -> bytes:
    """The same parameter set without a cropping rectangle.

    Raises:
        VideoError: like `read_sps`.
    """
    bits = _Bits(nal)
    _, flag = _read(bits)
    rest = bits.value & ((1 << bits.left) - 1)
    unused = (rest & -rest).bit_length() - 1  # zeros after the stop bit, the last one (7.3.2.11)
    rest, left = rest >> unused, bits.left - unused
    value, size = bits.value >> flag << 1 + left | rest, bits.size - flag + 1 + left
    padding = -size % 8
    payload = (value << padding).to_bytes((size + padding) // 8, "big")
    return nal[:1] + re.sub(rb"\0\0(?=[\0-\3])", b"\\g<0>\3", payload)


def _read(bits: _Bits) -> tuple[CodedPicture, int]:
    """The parameter set up to its rectangle, and how many bits were left at frame_cropping_flag."""
    profile = bits.u(8)
    bits.u(16)  # constraints and level
    bits.ue()  # seq_parameter_set_id
    chroma_format, separate, bit_depth = 1, 0, 8
    if profile in _WITH_CHROMA_FORMAT:
        chroma_format = bits.ue()
        separate = bits.u() if chroma_format == 3 else 0
        bit_depth = 8 + max(bits.ue(), bits.ue())
        bits.u()  # qpprime_y_zero_transform_bypass_flag
        _skip_scaling_lists(bits, 8 if chroma_format != 3 else 12)
    bits.ue()  # log2_max_frame_num_minus4
    _skip_order_count(bits)
    bits.ue()  # max_num_ref_frames
    bits.u()  # gaps_in_frame_num_value_allowed_flag
    width, map_units = _MACROBLOCK * (bits.ue() + 1), bits.ue() + 1
    frames_only = bits.u()
    if not frames_only:
        bits.u()  # mb_adaptive_frame_field_flag
    bits.u()  # direct_8x8_inference_flag
    height = _MACROBLOCK * map_units * (2 - frames_only)
    flag = bits.left
    left, right, top, bottom = (bits.ue() for _ in range(4)) if bits.u() else (0, 0, 0, 0)
    if not bits.value & ((1 << bits.left) - 1):
        bits.u(bits.left + 1)  # not even a stop bit
    if chroma_format not in _CROP_UNITS:
        raise VideoError(f"damaged: its sequence parameter set has chroma_format_idc {chroma_format}, of 0 to 3")
    across, down = _CROP_UNITS[0 if separate else chroma_format]
    down *= 2 - frames_only
    window = (down * top, across * left, height - down * (top + bottom), width - across * (left + right))
    if min(window[2:]) <= 0:
        raise VideoError(f"damaged: its sequence parameter set crops {width}x{height} to nothing")
    return CodedPicture(width, height, window, chroma_format, bit_depth, bool(frames_only)), flag


def _skip_scaling_lists(bits: _Bits, count: int) -> None:
    """7.3.2.1.1.1: a list's length in bits depends on its values."""
    if not bits.u():
        return
    for number in range(count):
        if not bits.u():
            continue
        scale = following = 8
        for _ in range(16 if number < 6 else 64):
            if following:
                following = (scale + bits.se()) % 256
                scale = following or scale


def _skip_order_count(bits: _Bits) -> None:
    """pic_order_cnt_type and what follows it."""
    kind = bits.ue()
    if kind == 0:
        bits.ue()  # log2_max_pic_order_cnt_lsb_minus4
    elif kind == 1:
        bits.u()  # delta_pic_order_always_zero_flag
        bits.se(), bits.se()  # offset_for_non_ref_pic, offset_for_top_to_bottom_field
        for _ in range(bits.ue()):
            bits.se()  # offset_for_ref_frame


def parameter_units(data: bytes, length_bytes: int) -> set[bytes]:
    """The sequence parameter sets, also of scalable and multiview streams, among a packet's NAL units."""
    return {
        data[start:end].rstrip(b"\0")  # which belong to the start code after it: no NAL unit ends so (7.4.1)
        for start, end in nal_units(data, length_bytes)
        if end > start and data[start] & 31 in (_SPS, _SUBSET_SPS)
    }


def all_shown(data: bytes, length_bytes: int) -> bytes:
    """The packet with parameter sets that show the whole coded picture; most have none, and stay as they are."""
    if not parameter_units(data, length_bytes):
        return data
    changed = bytearray()
    for start, end in nal_units(data, length_bytes):
        unit = data[start:end].rstrip(b"\0")
        unit = without_cropping(unit) if unit and unit[0] & 31 == _SPS else unit
        changed += (len(unit).to_bytes(length_bytes, "big") if length_bytes else b"\0\0\0\1") + unit
    return bytes(changed)


def header_all_shown(extradata: bytes, length_bytes: int) -> bytes:
    """The same for a stream's header: avcC (ISO/IEC 14496-15, 5.3.3.1), or parameter sets with start codes."""
    if not length_bytes:
        return all_shown(extradata, 0)
    changed, at = bytearray(extradata[:6]), 6
    for _ in range(extradata[5] & 31):
        stop = at + 2 + int.from_bytes(extradata[at : at + 2], "big")
        unit = without_cropping(extradata[at + 2 : stop].rstrip(b"\0"))
        changed += len(unit).to_bytes(2, "big") + unit
        at = stop
    return bytes(changed) + extradata[at:]


def uncroppable(index: VideoIndex, units: Iterable[bytes]) -> CodedPicture | None:
    """The coded picture, with the window of it that is shown, where all of it may be shown and the window cut later.

    That is for 8-bit 4:2:0 without fields, a single parameter set, and a picture larger than what is shown. The window
    may be smaller than the parameter set's: some files have their rectangle in the container's header only.

    Args:
        index: the video's, which has the size that FFmpeg shows.
        units: from `parameter_units`, of the stream's header and of every packet of the clip.

    Returns:
        None for all other streams, whose rectangle must stay as it is.
    """
    found = set(units)
    if index.codec != "h264" or not index.cropped or len(found) != 1:
        return None
    (unit,) = found
    if unit[0] & 31 != _SPS:
        return None
    try:
        picture = read_sps(unit)
    except VideoError:
        return None  # FFmpeg made something of it; so may the decoder
    top, left, height, width = picture.window
    if (picture.chroma_format, picture.bit_depth, picture.frames_only) != (1, 8, True):
        return None
    by_container = top == left == 0 and index.height <= height and index.width <= width
    if not by_container and (height, width) != (index.height, index.width):
        return None  # FFmpeg rounds what is cropped at the left down, and then shows more
    return replace(picture, window=(top, left, index.height, index.width))
