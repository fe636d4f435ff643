"""NVIDIA's video decoder through PyNvVideoCodec: clips of packets in, frames on the device out.

Runs in the rank. Packets are handed to the decoder as they lie in the request's slab; no container, no demuxer and no
file is involved, which is why this is up to twice as fast as giving it files (docs/decisions/0004). A pool has a fixed number of
threads, each with a CUDA stream and at most one decoder a codec, so sessions and surfaces are bounded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_dali.graph.yuv import rgb_from_nv12
from lightning_dali.media import MediaError, decode_packets

if TYPE_CHECKING:
    from lightning_dali.graph.video import ClipJob

logger = logging.getLogger(__name__)

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
class DecodedClip:
    """Frames on the device, once `event` has happened."""

    frames: torch.Tensor
    """(T, H, W, 3) uint8, RGB, upright."""
    event: Any
    """A `torch.cuda.Event`, recorded on the stream that wrote them."""


@dataclass(frozen=True, eq=False)
class _Job:
    """One clip to decode."""

    clip: ClipJob
    packets: list[np.ndarray]
    """In decode order, each a uint8 array with start codes (Annex B) for H.264 and HEVC."""
    future: Future[DecodedClip]


class DecoderPool:
    """Decoder threads of one device.

    Args:
        device: CUDA device number.
        num_threads: Decoders at work at a time.
    """

    def __init__(self, device: int, *, num_threads: int = NUM_DECODERS) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs, device), name=f"lightning_dali_nvdec_{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._jobs, self._threads)

    @staticmethod
    def of_device(device: int) -> DecoderPool:
        """The pool that all graphs of a device share; it ends when the last of them lets go of it."""
        # No lock: what is allocated under one may end a pass, which waits for a thread that wants the lock. At worst there
        # are two pools for a while.
        pool = _pools.get(device)
        if pool is None or not pool._finalizer.alive:
            pool = _pools[device] = DecoderPool(device)
        return pool

    def submit(self, clip: ClipJob, packets: list[np.ndarray]) -> Future[DecodedClip]:
        """Queues a clip; the future raises `MediaError` when it does not decode.

        Args:
            clip: Which frames of what.
            packets: Its packets in decode order, uint8; they must stay where they are until the future is done.

        Raises:
            RuntimeError: The pool is closed.
        """
        if not self._finalizer.alive:
            raise RuntimeError("the decoders are closed")
        future: Future[DecodedClip] = Future()
        self._jobs.put(_Job(clip, packets, future))
        return future

    def close(self) -> None:
        """Cancels what has not begun, ends the threads and their decoders; safe to call twice."""
        self._finalizer()


_pools: weakref.WeakValueDictionary[int, DecoderPool] = weakref.WeakValueDictionary()


def _end(owner: int, jobs: queue.SimpleQueue[_Job | None], threads: list[threading.Thread]) -> None:
    if os.getpid() != owner:
        return  # in a fork of the rank's process, where the threads are not
    with suppress(queue.Empty):
        while (job := jobs.get_nowait()) is not None:  # nobody waits for these any more
            job.future.cancel()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # a decoder's own thread may collect the garbage
            thread.join(10)


def _work(jobs: queue.SimpleQueue[_Job | None], device: int) -> None:
    """One decoder thread. Whatever happens to it, every job that it takes is answered."""
    decoders: _Decoders | None = None
    while (job := jobs.get()) is not None:
        if not job.future.set_running_or_notify_cancel():
            continue
        try:
            if decoders is None:
                decoders = _Decoders(device)
            job.future.set_result(decoders.decode(job.clip, job.packets))
        except BaseException as error:
            job.future.set_exception(error)
        del job  # and with it the frames


class _Decoders:
    """A thread's decoders, one a codec, remade when a larger picture comes."""

    def __init__(self, device: int) -> None:
        torch.cuda.set_device(device)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._made: dict[str, tuple[Any, int, int]] = {}

    def decode(self, clip: ClipJob, packets: list[np.ndarray]) -> DecodedClip:
        """Decodes with NVDEC, or with FFmpeg what NVDEC refuses: then only this clip is slow, not its batch."""
        with torch.cuda.stream(self._stream):
            try:
                frames = self._decode(clip, packets)
            except Exception as error:
                self._drop(clip.codec)  # its state is unknown now
                frames = self._decode_here(clip, packets, error)
            return DecodedClip(frames, self._stream.record_event())

    def _decode(self, clip: ClipJob, packets: list[np.ndarray]) -> torch.Tensor:
        import PyNvVideoCodec as nvc

        decoder = self._get(clip)
        slots: dict[int, list[int]] = {}
        for slot, frame in enumerate(clip.frames.tolist()):
            if frame >= 0:
                slots.setdefault(frame, []).append(slot)
        rows = clip.height * 3 // 2
        native = torch.zeros((len(clip.frames), rows, clip.width), dtype=torch.uint8, device=self._device)
        position = 0
        for packet in [*packets, None]:
            data = nvc.PacketData()
            data.bsl = 0 if packet is None else packet.size  # nothing: the end of the stream, which flushes the decoder
            data.bsl_data = 0 if packet is None else packet.ctypes.data
            for decoded in decoder.Decode(data):
                wanted = slots.pop(position, ())
                if wanted:
                    picture = torch.from_dlpack(decoded)  # NV12: rows of luma, then half as many of chroma
                    for slot in wanted:
                        native[slot].copy_(picture.view(rows, clip.width), non_blocking=True)
                position += 1
        if slots or position != clip.num_frames:
            raise MediaError(
                f"NVDEC gave {position} frames of {clip.num_frames}: damaged, or a profile that it does not know"
            )
        out = rgb_from_nv12(native, matrix=clip.color_matrix, full_range=clip.color_range == "full")
        out[torch.from_numpy(clip.frames < 0).to(self._device)] = 0  # padding is black
        return torch.rot90(out, clip.rotation // 90, (1, 2)).contiguous() if clip.rotation else out

    def _decode_here(self, clip: ClipJob, packets: list[np.ndarray], error: Exception) -> torch.Tensor:
        size = (clip.height, clip.width)
        try:
            frames = decode_packets(packets, clip.frames, codec=clip.codec, size=size, rotation=clip.rotation)
        except MediaError:
            raise error from None
        logger.debug("decoded with FFmpeg: %s", error)
        return torch.from_numpy(frames).to(self._device)

    def _get(self, clip: ClipJob) -> Any:
        decoder, width, height = self._made.get(clip.codec, (None, 0, 0))
        if decoder is not None and clip.width <= width and clip.height <= height:
            return decoder
        self._drop(clip.codec)
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
            outputColorType=nvc.OutputColorType.NATIVE,
        )
        self._made[clip.codec] = (decoder, width, height)
        return decoder

    def _drop(self, codec: str) -> None:
        self._made.pop(codec, None)
