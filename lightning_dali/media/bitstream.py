"""The few bits of a packet that demuxing does not tell: can decoding start here, is it shown, is it needed.

Runs in the worker process. Sections named are of ITU-T H.264 and H.265, RFC 6386 (VP8), the VP9 bitstream
specification, ISO/IEC 13818-2 (MPEG-2) and ISO/IEC 14496-2 (MPEG-4).
"""

from collections.abc import Iterator
from enum import IntEnum


class Start(IntEnum):
    """What a packet that the container calls a key frame is good for."""

    NONE = 0
    """Decoding cannot start here, whatever the container says."""
    OPEN = 1
    """Frames shown from here on decode, if the packets before it are left out; not to be joined to other packets."""
    JOIN = 2
    """As OPEN, and packets from elsewhere may stand before it."""
    CLEAN = 3
    """As JOIN, and frames that come later but are shown earlier decode too."""


_H264_SLICE, _H264_IDR, _H264_SPS = 1, 5, 7
_HEVC_CRA, _HEVC_BLA_N_LP = 21, 18
_INTRA_ONLY = {"mjpeg", "prores", "dnxhd", "dvvideo", "rawvideo", "png", "huffyuv", "ffvhuff"}
_HEVC_SPS = 33
_MPEG2_SEQUENCE, _MPEG2_GROUP, _MPEG4_VOP = b"\0\0\1\xb3", b"\0\0\1\xb8", b"\0\0\1\xb6"
_JPEG_FRAME = b"\xff\xc0"


def nal_length_bytes(codec: str, extradata: bytes | None) -> int:
    """How many bytes give a NAL unit's length (avcC, hvcC); 0 where start codes separate them (Annex B)."""
    if not extradata or extradata[0] != 1:
        return 0
    if codec == "h264" and len(extradata) > 6:
        return (extradata[4] & 3) + 1
    if codec == "hevc" and len(extradata) > 22:
        return (extradata[21] & 3) + 1
    return 0


def nal_units(data: bytes, length_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each NAL unit of a packet, without its length or start code."""
    if length_bytes:
        at = 0
        while at + length_bytes < len(data):
            start = at + length_bytes
            at = start + int.from_bytes(data[at:start], "big")
            yield start, min(at, len(data))
        return
    start = data.find(b"\0\0\1") + 3
    while start > 2:
        following = data.find(b"\0\0\1", start)
        yield start, following if following >= 0 else len(data)
        start = following + 3


def start_kind(codec: str, data: bytes, length_bytes: int) -> Start:
    """What a packet marked as a key frame is good for."""
    if codec == "h264":
        return _h264_start(data, length_bytes)
    if codec == "hevc":
        types = [data[start] >> 1 & 63 for start, end in nal_units(data, length_bytes) if end > start]
        picture = next((kind for kind in types if kind < 32), -1)
        return Start.CLEAN if picture in (19, 20) else Start.JOIN if 16 <= picture <= 21 else Start.NONE
    if codec == "vp8":
        return Start.NONE if data[0] & 1 else Start.CLEAN
    if codec == "mpeg4":
        vop = data.find(_MPEG4_VOP)
        return Start.NONE if 0 <= vop < len(data) - 4 and data[vop + 4] >> 6 else Start.JOIN
    if codec in ("mpeg1video", "mpeg2video"):
        group = data.find(_MPEG2_GROUP)
        return Start.CLEAN if 0 <= group < len(data) - 7 and data[group + 7] >> 6 & 1 else Start.JOIN
    return Start.OPEN if codec == "vvc" else Start.CLEAN


def _h264_start(data: bytes, length_bytes: int) -> Start:
    for start, end in nal_units(data, length_bytes):
        kind = data[start] & 31 if end > start else 0
        if kind == _H264_IDR:
            return Start.CLEAN
        if kind == _H264_SLICE:
            bits = int.from_bytes(data[start + 1 : start + 10].ljust(9, b"\0"), "big")
            _first_macroblock, bits_left = _exp_golomb(bits, 72)
            slice_type, _ = _exp_golomb(bits, bits_left)
            return Start.OPEN if slice_type % 5 in (2, 4) else Start.NONE  # I or SI; P begins an intra refresh (7.4.3)
    return Start.NONE


def _exp_golomb(bits: int, left: int) -> tuple[int, int]:
    """The unsigned Exp-Golomb number (H.264, 9.1) in the `left` lowest bits, and how many bits are left after it."""
    bits &= (1 << left) - 1
    zeros = left - bits.bit_length()
    rest = left - 2 * zeros - 1
    return ((bits >> rest) - 1, rest) if rest >= 0 else (0, 0)


def is_shown(codec: str, data: bytes) -> bool:
    """Whether a packet yields a picture; VP8 and VP9 have frames that only others refer to."""
    if codec == "vp8":
        return bool(data[0] >> 4 & 1)
    if codec != "vp9" or data[-1] >> 5 == 0b110:  # a superframe ends with a frame that is shown (Annex B)
        return True
    profile = data[0] >> 5 & 1 | data[0] >> 3 & 2
    bits, left = int.from_bytes(data[:2].ljust(2, b"\0"), "big"), 12 - (profile == 3)
    return bool(bits >> left - 1 & 1) or bool(bits >> left - 3 & 1)  # show_existing_frame, show_frame (6.2)


def reference_level(codec: str, data: bytes, length_bytes: int) -> tuple[int, bool]:
    """A picture's temporal layer, and whether pictures of that layer may refer to it (higher layers always may).

    For H.264 by nal_ref_idc (7.4.1), for H.265 by the type of its NAL units (7.4.2.2); others count as referred to, but
    for codecs without references.
    """
    if codec in _INTRA_ONLY:
        return 0, False
    for start, end in nal_units(data, length_bytes) if codec in ("h264", "hevc") else ():
        if codec == "h264" and end > start and data[start] & 31 in (_H264_SLICE, _H264_IDR):
            return 0, bool(data[start] & 0x60)
        if codec == "hevc" and end > start + 1 and data[start] >> 1 & 63 < 32:
            kind = data[start] >> 1 & 63
            return (data[start + 1] & 7) - 1, kind >= 16 or kind % 2 == 1
    return 0, True


def with_joint(codec: str, data: bytes, length_bytes: int) -> bytes:
    """A key frame's packet made fit to follow packets that it did not follow when it was encoded.

    H.264: an access unit delimiter (7.4.1.2.3) keeps two IDR pictures with the same idr_pic_id apart. H.265: a CRA
    picture becomes a BLA picture without leading pictures (8.1.3), so that its picture order count starts afresh.
    """
    if codec == "h264":
        delimiter = b"\x09\xf0"
        return (len(delimiter).to_bytes(length_bytes, "big") if length_bytes else b"\0\0\0\1") + delimiter + data
    if codec != "hevc":
        return data
    changed = bytearray(data)
    for start, end in nal_units(data, length_bytes):
        if end > start and data[start] >> 1 & 63 == _HEVC_CRA:
            changed[start] = data[start] & 0x81 | _HEVC_BLA_N_LP << 1
    return bytes(changed)


def parameter_sets(codec: str, extradata: bytes | None, length_bytes: int) -> bytes:
    """The parameter sets of a stream's header with start codes; nothing where it has none.

    Args:
        codec: h264 or hevc.
        extradata: avcC or hvcC (ISO/IEC 14496-15, 5.3.3.1 and 8.3.3.1), or parameter sets with start codes.
        length_bytes: see `nal_length_bytes`.
    """
    if not extradata or not length_bytes:
        return extradata or b""
    found, at = [], 5 if codec == "h264" else 22
    arrays = 2 if codec == "h264" else extradata[at]
    at += codec == "hevc"
    for array in range(arrays):
        if codec == "h264":
            count, at = extradata[at] & (31 if array == 0 else 255), at + 1
        else:
            count, at = int.from_bytes(extradata[at + 1 : at + 3], "big"), at + 3
        for _ in range(count):
            size = int.from_bytes(extradata[at : at + 2], "big")
            found.append(b"\0\0\0\1" + extradata[at + 2 : at + 2 + size])
            at += 2 + size
    return b"".join(found)


def with_start_codes(data: bytes, length_bytes: int) -> bytes:
    """The packet with start codes (Annex B) in place of lengths."""
    if not length_bytes:
        return data
    return b"".join(b"\0\0\0\1" + data[start:end] for start, end in nal_units(data, length_bytes))


def format_signature(codec: str, data: bytes, length_bytes: int) -> bytes:
    """The bytes of a key frame's packet that say how large its picture is; empty where they are not understood.

    Two packets with the same signature have the same size; the reverse need not be so.
    """
    if codec in ("h264", "hevc"):
        return b"".join(
            data[start:end]
            for start, end in nal_units(data, length_bytes)
            if end > start
            and (data[start] & 31 == _H264_SPS if codec == "h264" else data[start] >> 1 & 63 == _HEVC_SPS)
        )
    if codec == "vp8":
        return data[6:10]
    if codec == "vp9" and data[0] >> 4 == 0b1000:  # profile 0: a size of 32 bits from bit 36 on (6.2)
        return (int.from_bytes(data[:9].ljust(9, b"\0"), "big") >> 4 & 0xFFFFFFFF).to_bytes(4, "big")
    header = {"mpeg1video": _MPEG2_SEQUENCE, "mpeg2video": _MPEG2_SEQUENCE, "mjpeg": _JPEG_FRAME}.get(codec)
    at = data.find(header) if header else -1
    return data[at : at + 9] if at >= 0 else b""
