"""FLAC streams that no encoder writes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_dali.media.audio_flac import _crc8


class Bits:
    """Bits, the highest first."""

    def __init__(self) -> None:
        self.text: list[str] = []

    def put(self, value: int, count: int) -> None:
        """Adds a number, negative ones as two's complement."""
        if count:
            self.text.append(format(value & (1 << count) - 1, f"0{count}b"))

    def rice(self, value: int, parameter: int) -> None:
        """Adds a Rice coded number."""
        folded = -2 * value - 1 if value < 0 else 2 * value
        self.text.append("0" * (folded >> parameter) + "1")
        self.put(folded & (1 << parameter) - 1, parameter)

    def tobytes(self) -> bytes:
        """Padded with zeros."""
        text = "".join(self.text)
        text += "0" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big")


def crc16(data: bytes) -> int:
    """CRC-16 with the polynomial x^16 + x^15 + x^2 + 1."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x18005 if crc & 0x8000 else crc << 1
    return crc


def write_flac(
    channels: Sequence[Sequence[int]],
    *,
    bits: int = 16,
    rate: int = 16_000,
    rate_code: int = 5,
    block: int = 64,
    order: int = 2,
    method: int = 0,
    partitions: int = 2,
    escape: int | None = None,
    wasted: int = 0,
    assignment: int | None = None,
) -> bytes:
    """A stream of fixed predictors, `order` -1 for verbatim.

    Args:
        channels: As they are coded: with a side channel, the difference.
        bits: A sample.
        rate: Hz.
        rate_code: How frames say it.
        block: Samples in a frame.
        order: Of the predictor.
        method: 0 for Rice parameters of 4 bits, 1 for 5.
        partitions: Two to the power of so many.
        escape: Bits of residuals that are not Rice coded.
        wasted: Low bits that are zero.
        assignment: Of channels; None for independent ones.
    """
    size = len(channels[0])
    assignment = len(channels) - 1 if assignment is None else assignment
    info = block.to_bytes(2, "big") * 2 + bytes(6)
    info += (rate << 44 | (len(channels) - 1) << 41 | (bits - 1) << 36 | size).to_bytes(8, "big") + bytes(16)
    out = b"fLaC" + bytes([0x80, 0, 0, 34]) + info
    for number, start in enumerate(range(0, size, block)):
        count = min(block, size - start)
        head = b"\xff\xf8" + bytes([0x70 | rate_code, assignment << 4]) + chr(number).encode()
        head += (count - 1).to_bytes(2, "big")
        if rate_code >= 12:
            head += (rate // {12: 1000, 13: 1, 14: 10}[rate_code]).to_bytes(1 + (rate_code > 12), "big")
        frame = Bits()
        for channel, values in enumerate(channels):
            side = (assignment in (8, 10) and channel == 1) or (assignment == 9 and channel == 0)
            kept = [value >> wasted for value in values[start : start + count]]
            parts = partitions if count % (1 << partitions) == 0 and count >> partitions >= max(order, 1) else 0
            _subframe(frame, kept, bits + side - wasted, order, method, parts, escape, wasted)
        body = head + bytes([_crc8(head)]) + frame.tobytes()
        out += body + crc16(body).to_bytes(2, "big")
    return out


def _subframe(
    out: Bits, values: list[int], width: int, order: int, method: int, parts: int, escape: int | None, wasted: int
) -> None:
    out.put((1 if order < 0 else 8 + order) << 1 | bool(wasted), 8)
    if wasted:
        out.put(1, wasted)
    for value in values if order < 0 else values[:order]:
        out.put(value, width)
    if order < 0:
        return
    residual = values
    for _ in range(order):
        residual = [b - a for a, b in itertools.pairwise(residual)]
    out.put(method, 2)
    out.put(parts, 4)
    share = len(values) >> parts
    for part in range(1 << parts):
        numbers = residual[max(0, part * share - order) : (part + 1) * share - order]
        if escape is not None:
            out.put((16 << method) - 1, 4 + method)
            out.put(escape, 5)
        else:
            parameter = min((14, 30)[method], max((abs(n) for n in numbers), default=0).bit_length())
            out.put(parameter, 4 + method)
        for number in numbers:
            if escape is not None:
                out.put(number, escape)
            else:
                out.rice(number, parameter)
