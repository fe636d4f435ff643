"""FLAC on the rank's GPU: encoded rows in, padded floats out, the same to the bit as DALI's.

DALI decodes FLAC on CPU threads, 2 ms of a core for 9 s of speech. The frames of a batch are independent, and there are thousands:
`flac.cu` decodes one in each thread. A damaged tag, at which libsndfile gives up, is no hindrance. `is_decodable` is asked in the worker; the rest runs in the rank's server thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from lightning_dali.graph.nvrtc import Launch, compile_kernels
from lightning_dali.media import FlacInfo

logger = logging.getLogger(__name__)

KERNELS = ("find_frames", "decode_frames", "check_frames", "finish_samples")
"""In the order in which they run."""
DEPTHS = frozenset({8, 16, 24})
"""Bits a sample for which libsndfile gives floats."""
MAX_SAMPLES = 1 << 28
"""Of the frames of a batch, as if all were as long as the longest and had as many channels: 1 GiB of integers."""
_MAX_BYTES = (1 << 31) - (1 << 20)
"""The kernels' positions are 32-bit integers."""
_ALIGNMENT = 64
_SHARES = 32  # of a frame, as in flac.cu
_FRAMES, _SAMPLES = 8, 32  # of a block that finishes samples: what it reads of one sample is a sector of 32 bytes


def is_decodable(info: FlacInfo) -> bool:
    """Whether the device can decode a stream: of fixed block size and known length."""
    known = 0 < info.num_samples < _MAX_BYTES
    return info.fixed_blocks and info.block_size >= 16 and known and info.bits in DEPTHS


def source() -> str:
    """The kernels, CUDA C++."""
    return (files(__package__) / "flac.cu").read_text()


@functools.lru_cache
def load_kernels(device: int) -> Mapping[str, Launch] | None:
    """The kernels for a CUDA device, compiled once a process; None where that fails, which is said once."""
    try:
        return compile_kernels(source(), KERNELS, device=device)
    except (OSError, RuntimeError) as error:
        logger.info("FLAC is decoded by DALI on the CPU, since the kernels for the GPU did not compile: %s", error)
        return None


class FlacBatch:
    """A batch on its way.

    Args:
        samples: `(B, S, C)`, float32, on the device.
        num_channels: C of each row.
        status: On the host once `event` has happened; not 0 for a row that is damaged.
        event: A `torch.cuda.Event`; None on the CPU.
    """

    def __init__(self, samples: torch.Tensor, num_channels: list[int], status: torch.Tensor, event: Any) -> None:
        self._samples, self._num_channels, self._status, self._event = samples, num_channels, status, event

    def failed(self) -> list[int]:
        """Waits; the rows that are not as their headers say."""
        if self._event is not None:
            self._event.synchronize()
        return [row for row, status in enumerate(self._status.tolist()) if status]

    def samples(self) -> torch.Tensor | list[torch.Tensor]:
        """`(B, S, C)`, zero beyond a row's length; a list of `(S, C)` where rows differ in channels."""
        if len(set(self._num_channels)) == 1:
            return self._samples
        return [row[:, :channels] for row, channels in zip(self._samples, self._num_channels, strict=True)]


class FlacDecoder:
    """Decodes batches of FLAC on a device.

    Args:
        device: Where; on the CPU only with kernels that run there.
        kernels: See `load_kernels`.
    """

    def __init__(self, device: torch.device, kernels: Mapping[str, Launch]) -> None:
        self._device, self._kernels = device, kernels

    def submit(self, blobs: Sequence[np.ndarray[Any, Any]], infos: Sequence[FlacInfo]) -> FlacBatch | None:
        """Starts the work on torch's current stream and returns; None for a batch that is too large.

        Args:
            blobs: The files, uint8; they are copied before this returns.
            infos: Their headers, each `is_decodable`.
        """
        plan = _Plan(blobs, infos)
        if plan.too_large:
            return None
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return self._run(plan)

    def _run(self, plan: _Plan) -> FlacBatch:
        on_gpu = self._device.type == "cuda"
        host = torch.empty(
            plan.num_bytes, dtype=torch.uint8, pin_memory=on_gpu
        )  # torch reuses it when it has been read
        plan.write(host.numpy())
        data = host.to(self._device, non_blocking=True)
        part = {name: data[start:stop] for name, (start, stop) in plan.places.items()}
        size = (len(plan.rows), plan.longest, plan.most_channels)
        samples = torch.zeros(size, dtype=torch.float32, device=self._device)
        num, block = plan.num_frames, plan.longest_block
        scratch = torch.empty(plan.most_channels * block * num, dtype=torch.int32, device=self._device)
        rows, of_frame, offsets, status = part["rows"], part["row_of_frame"], part["offsets"], part["status"]
        files, ends, assignments, checksums = part["files"], part["ends"], part["assignments"], part["checksums"]
        run = self._kernels
        run["find_frames"]((_parts(len(files), 1024), 1), (256, 1), [files, len(files), rows, len(plan.rows), offsets])
        run["decode_frames"](
            (_parts(num, 32), 1),
            (32, 1),  # a warp a block: they spread over all multiprocessors
            [files, rows, of_frame, num, offsets, block, scratch, ends, assignments, status],
        )
        run["check_frames"]((_parts(num * _SHARES, 128), 1), (128, 1), [files, num, offsets, ends, checksums])
        run["finish_samples"](
            (_parts(num, _FRAMES), _parts(block, _SAMPLES)),
            (_SAMPLES, _FRAMES),
            [rows, of_frame, num, assignments, checksums, block, scratch, samples, size[1], size[2], status],
        )
        told = torch.empty(len(plan.rows), dtype=torch.int32, pin_memory=on_gpu)
        told.copy_(status.view(torch.int32), non_blocking=True)
        event = None
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
        return FlacBatch(samples, plan.rows["num_channels"].tolist(), told, event)


_ROW = np.dtype(
    [
        (name, np.int32)
        for name in (
            *("start", "stop", "audio", "first_frame", "num_frames"),
            *("num_samples", "block_size", "num_channels", "bits", "sample_rate"),
        )
    ]
)
"""`Row` of flac.cu."""


class _Plan:
    """What goes to the device with one copy: tables, results to be filled in, and the files one behind the other."""

    def __init__(self, blobs: Sequence[np.ndarray[Any, Any]], infos: Sequence[FlacInfo]) -> None:
        self._blobs = blobs
        sizes = np.array([blob.nbytes for blob in blobs], np.int64)
        self.rows = rows = np.empty(len(blobs), _ROW)
        facts = [(i.num_samples, i.block_size, i.num_channels, i.bits, i.sample_rate, i.audio_offset) for i in infos]
        *columns, audio = np.array(facts, np.int64).T
        for name, column in zip(_ROW.names[5:], columns, strict=True):  # type: ignore[index]
            rows[name] = column
        frames = -(-columns[0] // columns[1])
        self.num_frames, self.longest_block = int(frames.sum()), int(columns[1].max())
        self.longest, self.most_channels = int(columns[0].max()), int(columns[2].max())
        ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
        self.too_large = (
            ends[-1] > _MAX_BYTES or self.num_frames * self.longest_block * self.most_channels > MAX_SAMPLES
        )
        if self.too_large:
            return
        rows["start"] = starts = ends - -(-sizes // _ALIGNMENT) * _ALIGNMENT
        rows["stop"], rows["audio"] = starts + sizes, starts + audio
        rows["num_frames"], rows["first_frame"] = frames, np.cumsum(frames) - frames
        a_frame = 4 * self.num_frames
        self.places: dict[str, tuple[int, int]] = {}
        self.num_bytes = 0
        for name, size in (
            ("rows", rows.nbytes),
            *((name, a_frame) for name in ("row_of_frame", "offsets", "ends", "assignments", "checksums")),
            ("status", 4 * len(rows)),
            ("files", int(ends[-1])),
        ):
            self.places[name] = (self.num_bytes, self.num_bytes + size)
            self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT

    def write(self, memory: np.ndarray[Any, Any]) -> None:
        """Fills the memory in."""
        part = {name: memory[start:stop] for name, (start, stop) in self.places.items()}
        part["rows"].view(_ROW)[:] = self.rows
        part["row_of_frame"].view(np.int32)[:] = np.repeat(np.arange(len(self.rows)), self.rows["num_frames"])
        part["offsets"].view(np.int32)[:] = np.iinfo(np.int32).max
        part["checksums"][:] = 0
        part["status"][:] = 0
        for start, blob in zip(self.rows["start"].tolist(), self._blobs, strict=True):
            part["files"][start : start + blob.nbytes] = blob


def _parts(count: int, size: int) -> int:
    return -(-count // size)
