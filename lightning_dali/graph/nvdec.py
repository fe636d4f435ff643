"""NVIDIA's video decoder through PyNvVideoCodec: clips of packets in, frames on the device out.

Runs in the rank. Packets are handed to the decoder as they lie in the request's slab; no container, no demuxer and no
file is involved, which is why this is up to twice as fast as giving it files (docs/decisions). A pool has a fixed number of
threads, each with a CUDA stream and at most one decoder a codec, so sessions and surfaces are bounded.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_dali.media import MediaError

NUM_DECODERS = 7
"""Threads of a pool: an H100 or H200 has seven decoders, and more threads than decoders were slower."""

CODECS = {
    "h264": "H264",
    "hevc": "HEVC",
    "vp8": "VP8",
    "vp9": "VP9",
    "av1": "AV1",
    "mpeg4": "MPEG4",
    "mpeg2video": "MPEG2",
}
"""FFmpeg's codec names that NVDEC may know, and PyNvVideoCodec's names for them."""


def available() -> bool:
    """Whether PyNvVideoCodec is installed."""
    return importlib.util.find_spec("PyNvVideoCodec") is not None


@dataclass(frozen=True)
class PacketClip:
    """What to decode."""

    packets: list[np.ndarray]
    """The packets in decode order, each a uint8 array with start codes (Annex B) for H.264 and HEVC."""
    frames: np.ndarray
    """(T,) which decoded frames are wanted, in display order; -1 gives a black one."""
    num_frames: int
    """How many frames the packets hold."""
    codec: str
    """FFmpeg's name."""
    width: int
    """Pixels, as decoded."""
    height: int
    """Pixels, as decoded."""
    rotation: int = 0
    """Degrees by which each frame is turned counterclockwise after decoding."""


@dataclass(frozen=True)
class DecodedClip:
    """Frames on the device, once `event` has happened."""

    frames: torch.Tensor
    """(T, H, W, 3) uint8, RGB."""
    event: torch.cuda.Event
    """Recorded on the stream that wrote them."""


_Job = tuple[PacketClip, "Future[DecodedClip]"]


class DecoderPool:
    """Decoder threads of one device.

    Args:
        device: CUDA device number.
        num_threads: Decoders at work at a time.
    """

    def __init__(self, device: int, *, num_threads: int = NUM_DECODERS) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_decode_jobs, args=(self._jobs, device), name=f"lightning_dali_nvdec_{n}", daemon=True
            )
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _end, self._jobs, self._threads)

    def submit(self, clip: PacketClip) -> Future[DecodedClip]:
        """Queues a clip; the future raises `MediaError` when it does not decode."""
        future: Future[DecodedClip] = Future()
        self._jobs.put((clip, future))
        return future

    def close(self) -> None:
        """Ends the threads and their decoders, after what is queued; safe to call twice."""
        self._finalizer()


def _end(jobs: queue.SimpleQueue[_Job | None], threads: list[threading.Thread]) -> None:
    try:
        while (job := jobs.get_nowait()) is not None:  # nobody waits for these any more
            job[1].cancel()
    except queue.Empty:
        pass
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join(10)


def _decode_jobs(jobs: queue.SimpleQueue[_Job | None], device: int) -> None:
    """One decoder thread."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    decoders = _Decoders(device, stream)
    with torch.cuda.stream(stream):
        while (job := jobs.get()) is not None:
            clip, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(_decode(decoders, clip, stream))
            except Exception as error:
                decoders.drop(clip.codec)  # its state is unknown now
                future.set_exception(error)
            del job, clip, future


class _Decoders:
    """A thread's decoders, one a codec, remade when a larger picture comes."""

    def __init__(self, device: int, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._made: dict[str, tuple[Any, int, int]] = {}

    def get(self, clip: PacketClip) -> Any:
        decoder, width, height = self._made.get(clip.codec, (None, 0, 0))
        if decoder is not None and clip.width <= width and clip.height <= height:
            return decoder
        self.drop(clip.codec)
        import PyNvVideoCodec as nvc

        width, height = max(width, clip.width), max(height, clip.height)
        decoder = nvc.CreateDecoder(
            gpuid=self._device,
            codec=getattr(nvc.cudaVideoCodec, CODECS[clip.codec]),
            cudacontext=0,
            cudastream=self._stream.cuda_stream,
            usedevicememory=True,
            maxwidth=width,
            maxheight=height,
            outputColorType=nvc.OutputColorType.RGB,
        )
        self._made[clip.codec] = (decoder, width, height)
        return decoder

    def drop(self, codec: str) -> None:
        self._made.pop(codec, None)


def _decode(decoders: _Decoders, clip: PacketClip, stream: torch.cuda.Stream) -> DecodedClip:
    import PyNvVideoCodec as nvc

    decoder = decoders.get(clip)
    slots: dict[int, list[int]] = {}
    for slot, frame in enumerate(clip.frames.tolist()):
        if frame >= 0:
            slots.setdefault(frame, []).append(slot)
    out = torch.zeros((len(clip.frames), clip.height, clip.width, 3), dtype=torch.uint8, device="cuda")
    position = 0
    for packet in [*clip.packets, None]:
        data = nvc.PacketData()
        data.bsl = 0 if packet is None else packet.size  # nothing: the end of the stream, which flushes the decoder
        data.bsl_data = 0 if packet is None else packet.ctypes.data
        for decoded in decoder.Decode(data):
            wanted = slots.pop(position, ())
            if wanted:
                pixels = torch.from_dlpack(decoded)
                for slot in wanted:
                    out[slot].copy_(pixels, non_blocking=True)
            position += 1
    if slots or position != clip.num_frames:
        raise MediaError(
            f"NVDEC gave {position} frames of {clip.num_frames}: damaged, or a profile that it does not know"
        )
    if clip.rotation:
        out = torch.rot90(out, clip.rotation // 90, (1, 2)).contiguous()
    return DecodedClip(out, stream.record_event())
