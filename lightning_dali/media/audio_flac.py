"""FLAC: STREAMINFO, and whether the last frame is there.

The layout follows the format's specification (RFC 9639, sections 8.2 and 9.1). Runs in the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dali.media.audio_wav import AudioError, Buffer

_TAIL_BYTES = 1 << 16
"""How far from the end to look for the last frame; a frame of 4096 stereo 24-bit samples is under 25 KB."""


@dataclass(frozen=True)
class FlacInfo:
    """STREAMINFO."""

    sample_rate: int
    """Hz."""
    num_channels: int
    """C."""
    bits: int
    """Bits a sample."""
    num_samples: int
    """S; 0 when the encoder did not know."""
    block_size: int
    """Samples in a frame of a stream of fixed block size."""
    audio_offset: int
    """Byte at which the first frame starts."""
    fixed_blocks: bool = False
    """Whether STREAMINFO and the first frame say that all frames have `block_size`, but for the last."""


def read_flac_info(data: Buffer) -> FlacInfo:
    """Reads the metadata blocks of a file that starts with `fLaC`.

    Raises:
        AudioError: When the metadata are cut off, or the rate is 0.
    """
    if len(data) < 42:
        raise AudioError("truncated FLAC: no stream info")
    block_size = int.from_bytes(data[10:12], "big")  # the maximum; all but the last frame have it
    packed = int.from_bytes(data[18:26], "big")  # rate 20 bits, channels - 1 3 bits, bits - 1 5 bits, samples 36 bits
    sample_rate = packed >> 44
    if sample_rate == 0:
        raise AudioError("sample rate 0")
    position, last, kinds = 4, False, []
    while not last:
        if position + 4 > len(data):
            raise AudioError("truncated FLAC: metadata cut off")
        last = bool(data[position] & 0x80)
        kinds.append(data[position] & 0x7F)
        position += 4 + int.from_bytes(data[position + 1 : position + 4], "big")
    return FlacInfo(
        sample_rate=sample_rate,
        num_channels=(packed >> 41 & 7) + 1,
        bits=(packed >> 36 & 31) + 1,
        num_samples=packed & (1 << 36) - 1,
        block_size=block_size,
        audio_offset=position,
        fixed_blocks=_has_fixed_blocks(data, kinds, position),
    )


def _has_fixed_blocks(data: Buffer, kinds: list[int], audio_offset: int) -> bool:
    """Whether the one STREAMINFO and the first frame say so."""
    shortest, longest, sync = (bytes(data[at : at + 2]) for at in (8, 10, audio_offset))
    return kinds[0] == 0 and kinds.count(0) == 1 and shortest == longest and sync == b"\xff\xf8"


def last_sample(data: Buffer, info: FlacInfo) -> int | None:
    """Where the last frame that starts in this file ends, in samples; None when no frame was found near the end."""
    low = max(info.audio_offset, len(data) - _TAIL_BYTES)
    tail = bytes(data[low:])
    best = None
    for sync in (b"\xff\xf8", b"\xff\xf9"):
        position = tail.rfind(sync)
        while position >= 0 and best != info.num_samples:
            end = _frame_end(tail, position, info.block_size)
            if end is not None and end <= info.num_samples and (best is None or end > best):
                best = end
            position = tail.rfind(sync, 0, position + 1)
    return best


def _frame_end(data: bytes, position: int, block_size: int) -> int | None:
    """The sample after the frame whose header starts at `position`; None when that is no header."""
    header = data[position : position + 16]
    if len(header) < 6 or header[3] & 1:
        return None
    size_code, rate_code = header[2] >> 4, header[2] & 15
    coded = _coded_number(header[4:])
    if coded is None or size_code == 0 or rate_code == 15:
        return None
    number, used = coded
    at = 4 + used
    size_bytes = {6: 1, 7: 2}.get(size_code, 0)
    end = at + size_bytes + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if end >= len(header) or _crc8(header[:end]) != header[end]:
        return None
    size = _block_size(size_code, header[at : at + size_bytes])
    return (number if header[1] & 1 else number * block_size) + size


def _block_size(code: int, extra: bytes) -> int:
    if code == 1:
        return 192
    if code in (6, 7):
        return int.from_bytes(extra, "big") + 1
    return 576 << (code - 2) if code < 6 else 256 << (code - 8)


def _coded_number(data: bytes) -> tuple[int, int] | None:
    """A frame or sample number in FLAC's extension of UTF-8: (number, bytes used)."""
    first = data[0]
    if first < 0x80:
        return first, 1
    length = 8 - (first ^ 0xFF).bit_length()
    if not 2 <= length <= 7 or len(data) < length:
        return None
    number = first & (0x7F >> length)
    for byte in data[1:length]:
        if byte >> 6 != 2:
            return None
        number = number << 6 | byte & 0x3F
    return number, length


def _crc8(data: bytes) -> int:
    """CRC-8 with the polynomial x^8 + x^2 + x + 1."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1) ^ 0x107 if crc & 0x80 else crc << 1
    return crc
