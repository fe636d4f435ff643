"""The graph of a video lane: decode a clip's frames, then the image template on every frame alike, then the tail.

`VideoSpec` is written in the worker; building and running it happens in the rank. Three decoders end in the same graph:
`"nvdec"` (packets through PyNvVideoCodec), `"dali"` (a cut file through `fn.decoders.video`) and `"frames"` (decoded in the
worker).
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_dali.graph.image import ImageSpec, channels_first, identity_input, source, stage_inputs, stages
from lightning_dali.graph.run import run_tail
from lightning_dali.graph.spec import Device, Executor, LaneSpec

if TYPE_CHECKING:
    from lightning_dali.graph.nvdec import DecodedClip, DecoderPool
    from lightning_dali.wire import Lane

CHUNK_BYTES = 1 << 29
"""Decoded frames that go through the graph at a time, at most: 16 clips of 16 frames at 1920x1080 are 1.6 GB."""
CLOSE_SECONDS = 10.0
"""How long a graph that is closed waits for clips that are being decoded."""
PIPELINES = 2
"""Of DALI's own decoder, by turns: it takes up a batch when the one before is done, and the last clips of that leave NVDEC idle."""


@dataclass(frozen=True, eq=False)
class ClipJob:
    """What a decoder on the device is told of one clip, beside its packets or its file."""

    frames: np.ndarray
    """(T,) which of the decoded frames are wanted, in display order; -1 gives a black one."""
    num_frames: int
    """How many frames there are to decode."""
    codec: str
    """FFmpeg's name."""
    width: int
    """Pixels, as decoded: before `rotation`."""
    height: int
    """Like `width`."""
    rotation: int = 0
    """Degrees by which each frame is turned counterclockwise after decoding."""
    color_matrix: str = "unspecified"
    """See `VideoIndex`."""
    color_range: str = "unspecified"
    """See `VideoIndex`."""


@dataclass(frozen=True)
class VideoSpec(LaneSpec):
    """Which decoder and which stages a video lane needs."""

    template: ImageSpec
    """The stages after decoding."""
    decoder: str = "frames"
    """"nvdec", "dali" or "frames"."""
    layout: str = "TCHW"
    """Order of a clip's axes in the batch: "TCHW" or "CTHW"."""

    def merge(self, other: LaneSpec) -> VideoSpec | None:
        """One executor a decoder; stages as for images."""
        if not isinstance(other, VideoSpec) or (self.decoder, self.layout) != (other.decoder, other.layout):
            return None
        template = self.template.merge(other.template)
        return None if template is None else replace(self, template=template)

    def build(self, device: Device, *, max_batch_size: int) -> Executor:
        """Builds the DALI pipeline, and decoders where there are any."""
        return VideoExecutor(self, device, max_batch_size=max_batch_size)

    def describe(self) -> list[tuple[str, str]]:
        """The decoder, then the stages in order."""
        where = {"nvdec": "NVDEC", "dali": "DALI", "frames": "worker (PyAV)"}[self.decoder]
        step = "decode" if self.decoder != "frames" else "decode, window and resize where less then travels"
        return [(step, where), *self.template.describe()[1:]]


class VideoExecutor:
    """One DALI pipeline for a video lane, and NVDEC's threads where the spec says so."""

    def __init__(self, spec: VideoSpec, device: Device, *, max_batch_size: int) -> None:
        from lightning_dali.graph.dali import new_pipeline

        self.spec, self.device = spec, device
        self._turns: deque[Any] = deque()
        """Pipelines, the one to be fed next first."""
        self._busy: deque[Any] = deque()
        """Those that were fed, as often as they were, oldest first."""
        for _ in range(PIPELINES if spec.decoder == "dali" and device.index is not None else 1):
            pipeline = new_pipeline(device, max_batch_size=max_batch_size)
            with pipeline:
                frames = _decoded(spec, device)
                sizes = [frames.shape()] if spec.decoder == "dali" else []
                pipeline.set_outputs(stages(frames, spec.template, layout="FCHW"), *sizes)
            pipeline.build()
            self._turns.append(pipeline)
        self._inputs = stage_inputs(spec.template)
        self._decoders: DecoderPool | None = None
        if spec.decoder == "nvdec":
            from lightning_dali.graph.nvdec import DecoderPool

            assert device.index is not None
            self._decoders = DecoderPool.of_device(device.index)
        self._waiting: deque[list[Future[DecodedClip]]] = deque()

    def feed(self, lane: Lane) -> None:
        """Starts decoding one batch; returns at once."""
        if self._decoders is not None:
            jobs = [(job, lane.blobs(row)) for row, job in enumerate(lane.heads)]
            self._waiting.append([self._decoders.submit(job, packets) for job, packets in jobs])
            return
        if self.spec.decoder == "dali":
            self._turns[0].feed_input("frames", [job.frames.astype(np.int32) for job in lane.heads])
        self._run(lane, list(lane.data), range(len(lane)))

    def _run(self, lane: Lane, data: Any, rows: range) -> None:
        chosen = slice(rows.start, rows.stop)
        pipeline = self._turns[0]
        pipeline.feed_input("data", data, **self._stream_of(data))
        for name in self._inputs:
            if name not in lane.inputs:
                lane.inputs[name] = identity_input(name, lane.inputs)
            pipeline.feed_input(name, lane.inputs[name][chosen])
        pipeline._run_once()
        self._turns.rotate(-1)
        self._busy.append(pipeline)

    def _stream_of(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, torch.Tensor):
            return {}
        return {"cuda_stream": torch.cuda.current_stream(self.device.index)}

    def collect(self, lane: Lane) -> torch.Tensor | list[torch.Tensor]:
        """The oldest batch: `(n, T, C, H, W)`, or a list of `(T, C, H, W)` when sizes differ; or with T and C swapped."""
        output = self._outputs(lane) if self._decoders is None else self._collect_decoded(lane)
        if self.spec.template.finish is None:
            output = [channels_first(item) for item in output] if isinstance(output, list) else channels_first(output)
        rows = run_tail(output, lane.tail)
        if self.spec.layout == "TCHW":
            return rows
        if isinstance(rows, list):
            return [item.transpose(0, 1).contiguous() for item in rows]
        return rows.transpose(1, 2).contiguous()

    def _outputs(self, lane: Lane) -> Any:
        from lightning_dali.graph.dali import collect

        frames, *sizes = collect(self._busy.popleft(), self.device)
        for found in sizes:
            _check_sizes(found, lane.heads)
        return frames

    def _collect_decoded(self, lane: Lane) -> Any:
        """Waits for NVDEC, then runs the graph over as many clips at a time as memory should hold."""
        futures = self._waiting[0]  # until all are done: `close` waits for those that are being decoded
        outputs: list[Any] = []
        start = 0
        while start < len(futures):
            clips = [_ready(futures[start].result())]
            while start + len(clips) < len(futures) and len(clips) * clips[0].nbytes < CHUNK_BYTES:
                following = _ready(futures[start + len(clips)].result())
                if following.shape != clips[0].shape:
                    break
                clips.append(following)
            # one tensor: DALI gathers separate ones anyway, and complains when a batch of one is none of them
            self._run(lane, torch.stack(clips), range(start, start + len(clips)))
            outputs.append(self._outputs(lane))
            for row in range(start, start + len(clips)):
                futures[row] = Future()  # its frames are not needed any more
            start += len(clips)
        self._waiting.popleft()
        if len(outputs) == 1:
            return outputs[0]
        if all(isinstance(output, torch.Tensor) and output.shape[1:] == outputs[0].shape[1:] for output in outputs):
            return torch.cat(outputs)
        return [row for output in outputs for row in output]

    def close(self) -> None:
        """Frees the pipeline; what decodes for it still reads packets, and is waited for."""
        waiting = [future for futures in self._waiting for future in futures if not future.cancel()]
        self._waiting.clear()
        wait(waiting, timeout=CLOSE_SECONDS)
        self._decoders = None
        self._busy.clear()
        self._turns.clear()


def _check_sizes(found: Any, jobs: list[ClipJob]) -> None:
    """Windows are cut from pictures of the size that was expected; of another size they would show something else."""
    for (_, height, width, _), job in zip(torch.stack(list(found)).tolist(), jobs, strict=True):
        if (height, width) != (job.height, job.width):
            raise RuntimeError(
                f"Error: DALI's decoder gave frames of {width}x{height} for a video of {job.width}x{job.height}"
            )


def _ready(clip: DecodedClip) -> torch.Tensor:
    """A clip's frames, for the current stream."""
    stream = torch.cuda.current_stream()
    stream.wait_event(clip.event)
    clip.frames.record_stream(stream)
    return clip.frames


def _decoded(spec: VideoSpec, device: Device) -> Any:
    """Clips of frames (FHWC) inside the current pipeline."""
    from nvidia.dali import fn

    if spec.decoder == "dali":
        frames = fn.external_source(name="frames", device="cpu", no_copy=False)  # made for the call: nobody keeps them
        kind = "cpu" if device.index is None else "mixed"
        return fn.decoders.video(source("data"), device=kind, frames=frames, pad_mode="constant")
    if spec.decoder == "nvdec":
        return fn.external_source(name="data", device="gpu", no_copy=True, layout="FHWC")
    clips = fn.external_source(name="data", device="cpu", no_copy=True, layout="FHWC")
    return clips.gpu() if device.index is not None else clips
