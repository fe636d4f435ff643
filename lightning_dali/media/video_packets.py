"""Read the packets of a stretch of video. Runs in the worker process.

What a read costs does not depend on the length of the video: an MP4's packets are read from where the index says they
lie, without the file's header (FFmpeg takes 200 ms to parse that of two hours); other files are opened and seeked in.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from typing import Any

import av
import numpy as np

from lightning_dali.media.bitstream import nal_length_bytes
from lightning_dali.media.video_index import VideoError, VideoIndex
from lightning_dali.media.video_open import DIRECT, Source, demux, open_file, open_video, read_at, source_bytes
from lightning_dali.media.video_plan import Segment

_AHEAD = 256
"""How many packets are demuxed and thrown away rather than seeking."""
_BACK_SECONDS = (0, 1, 5, 25)
"""How far before the wanted time to look, in turn, where seeking lands too late (MPEG-TS seeks by decode time)."""
_NAMELESS = 64
"""How many packets after a seek may lack a time before the seek counts as failed."""
_CHANGED = "changed since it was indexed"


class Packets(ABC):
    """The packets of an open video."""

    def __init__(self, index: VideoIndex, template: Any) -> None:
        """Keep the index, and an open stream that has the codec's parameters."""
        self._index = index
        self.template = template
        """A PyAV stream with the codec's parameters, for a decoder or a muxer."""
        self.length_bytes = nal_length_bytes(index.codec, template.codec_context.extradata)
        """How many bytes give a NAL unit's length in the packets; 0 for start codes."""

    def read(self, segment: Segment) -> list[bytes]:
        """The packets of a segment, in decode order. Segments are cheapest to read in order.

        Raises:
            VideoError: the file ends before them, or is not the one that was indexed.
        """
        packets = self._read(segment)
        sizes = self._index.packets.sizes[segment.first : segment.stop].tolist()
        if [len(packet) for packet in packets] == sizes:
            return packets
        good = next(
            (i for i, (p, size) in enumerate(zip(packets, sizes, strict=False)) if len(p) != size), len(packets)
        )
        where = f"packet {segment.first + good} of {len(self._index.packets)}"
        last = good == len(packets) or len(packets[good]) < sizes[good]
        raise VideoError(f"truncated: {where} is missing" if last else f"{_CHANGED}: {where} has another size")

    @abstractmethod
    def _read(self, segment: Segment) -> list[bytes]:
        """As many of the segment's packets as there are."""


@contextmanager
def open_packets(source: Source, index: VideoIndex) -> Iterator[Packets]:
    """The packets of a video, open until the end of the `with` block.

    Raises:
        VideoError: the file is not the one that was indexed.
        OSError: the file cannot be opened.
    """
    size = source_bytes(source)
    if size != index.source_bytes:
        raise VideoError(f"{_CHANGED}: {index.source_bytes} bytes then, {size} now")
    if index.header:
        with open_file(source) as file, open_video(index.header, container=DIRECT) as (_, template):
            yield _StoredPackets(index, template, file)
    else:
        with ExitStack() as opened:
            yield _DemuxedPackets(index, source, opened)


class _StoredPackets(Packets):
    """Packets that lie in the file as they are."""

    def __init__(self, index: VideoIndex, template: Any, file: Any) -> None:
        super().__init__(index, template)
        self._file = file

    def _read(self, segment: Segment) -> list[bytes]:
        table = self._index.packets
        begins = table.positions[segment.first : segment.stop]
        sizes = table.sizes[segment.first : segment.stop]
        low, high = int(begins.min()), int((begins + sizes).max())
        spans = list(zip(begins.tolist(), sizes.tolist(), strict=True))
        if high - low <= 2 * int(sizes.sum()) + (1 << 16):  # one read, other streams' bytes and all
            block = read_at(self._file, low, high - low)
            return [block[begin - low : begin - low + size] for begin, size in spans]
        return [read_at(self._file, begin, size) for begin, size in spans]


class _DemuxedPackets(Packets):
    """Packets that FFmpeg has to find."""

    def __init__(self, index: VideoIndex, source: Source, opened: ExitStack) -> None:
        self._source, self._opened = source, opened
        self._container, self._stream = opened.enter_context(open_video(source, container=index.container))
        super().__init__(index, self._stream)
        self._numbered: Iterator[tuple[int, Any]] = iter(())
        self._next: int | None = None

    def _read(self, segment: Segment) -> list[bytes]:
        if self._next is None or not 0 <= segment.first - self._next <= _AHEAD:
            self._numbered = self._from(segment.first)
        packets: list[bytes] = []
        with suppress(av.error.FFmpegError):  # the file ends here, as far as FFmpeg can tell
            for number, packet in self._numbered:
                self._next = number + 1
                if number >= segment.first:
                    packets.append(bytes(packet))
                if number + 1 == segment.stop:
                    break
        return packets

    def _from(self, first: int) -> Iterator[tuple[int, Any]]:
        """Numbered packets that begin at `first` or before it: after a seek if one lands well, else from the start."""
        table = self._index.packets
        for back in _BACK_SECONDS if table.clock in ("pts", "dts") else ():
            packets = self._sought(int(table.ids[first] - back / self._index.time_base))
            named = ((self._number(packet), packet) for packet in islice(packets, _NAMELESS))
            number, packet = next(((n, p) for n, p in named if n is not None), (first + 1, None))
            counted = enumerate(chain([packet], packets), number)
            reached = next((item for item in counted if item[0] >= first), None) if number <= first else None
            if reached is not None and self._number(reached[1]) == first:
                yield reached
                yield from counted
                return
        container = self._index.container
        self._container, self._stream = self._opened.enter_context(open_video(self._source, container=container))
        yield from enumerate(self._packets())

    def _sought(self, time: int) -> Iterator[Any]:
        """The packets after a seek; none where the file cannot seek."""
        with suppress(av.error.FFmpegError):
            self._container.seek(time, stream=self._stream)
            yield from self._packets()

    def _packets(self) -> Iterator[Any]:
        return demux(self._container, self._stream)

    def _number(self, packet: Any) -> int | None:
        """The packet's number by its name and size; None for one that the index does not know.

        The size matters: after a seek in an MPEG program stream the first packets are halves with the times of others.
        """
        table = self._index.packets
        found = np.flatnonzero((table.ids == getattr(packet, table.clock)) & (table.sizes == packet.size))
        return int(found[0]) if found.size else None
