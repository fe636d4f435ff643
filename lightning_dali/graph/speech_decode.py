"""Who decodes the encoded rows of a batch of audio: the GPU itself where all are FLAC, else DALI on its CPU threads.

Runs in the rank's server thread.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_dali.graph.flac import FlacBatch, FlacDecoder, load_kernels
from lightning_dali.graph.spec import Device
from lightning_dali.media import FlacInfo

logger = logging.getLogger(__name__)

PIPELINES = 2
"""By turns where there is a GPU, with half of the threads each: while one decodes the last long rows of its batch, the other's threads
all have work. Without a GPU what follows needs those cores."""
_MOST_REFUSED = 3
"""Batches in a row that DALI decodes and the GPU did not: such files are unlike what the GPU can decode."""


class SpeechDecoder:
    """Takes batches and gives them back decoded, in order.

    Args:
        device: Where samples are wanted.
        max_batch_size: Rows.
    """

    def __init__(self, device: Device, *, max_batch_size: int) -> None:
        self._device, self._max_batch_size = device, max_batch_size
        self._flac = _flac_decoder(device)
        self._refused = 0
        """Batches in a row that were not the GPU's after all."""
        self._busy: deque[Any] = deque()
        """Who has which batch, a pipeline or the batch on the GPU, oldest first."""
        self._turns: deque[Any] = deque()
        """Pipelines, the one to be fed next first."""
        self._spare: Any = None
        """A pipeline for batches that the GPU gives back, when the others have later ones in hand."""
        if self._flac is None:
            self._build()

    def feed(self, blobs: Sequence[np.ndarray[Any, Any]], infos: Sequence[FlacInfo | None]) -> None:
        """Starts a batch; returns at once.

        Args:
            blobs: Encoded files, uint8. They must stay where they are until the batch is collected.
            infos: Headers of the rows that the GPU can decode, None for the others.
        """
        flac = [info for info in infos if info is not None]
        if self._flac is not None and len(flac) == len(blobs):
            batch = self._flac.submit(blobs, flac)
            if batch is not None:
                self._busy.append(batch)
                return
        if not self._turns:
            self._build()
        pipeline = self._turns[0]
        self._turns.rotate(-1)
        _run(pipeline, blobs)
        self._busy.append(pipeline)

    def collect(self, blobs: Sequence[np.ndarray[Any, Any]]) -> tuple[Any, Any]:
        """The oldest batch.

        Args:
            blobs: As they were fed.

        Returns:
            `(B, S, C)`, zero beyond a row's length, or a list of `(S, C)` where rows differ in channels; and the shapes `(B, 2)` that
            DALI found, None where every row is as its header says.

        Raises:
            RuntimeError: DALI cannot decode a row.
        """
        from lightning_dali.graph.dali import collect

        owner = self._busy.popleft()
        if not isinstance(owner, FlacBatch):
            waves, shapes = collect(owner, self._device)
            return waves, shapes
        failed = owner.failed()
        if not failed:
            self._refused = 0
            return owner.samples(), None
        del owner  # and with it memory on the device
        logger.debug("rows %s are not what the GPU's FLAC decoder takes: DALI decodes the batch", failed)
        if self._spare is None:
            self._spare = _pipeline(self._device, self._max_batch_size)
        _run(self._spare, blobs)
        waves, shapes = collect(self._spare, self._device)
        self._refused += 1
        if self._refused == _MOST_REFUSED and self._flac is not None:
            logger.info("These FLAC files are decoded by DALI on the CPU: the decoder for the GPU does not take them.")
            self._flac = None
        return waves, shapes

    def close(self) -> None:
        """Frees the pipelines."""
        self._busy.clear()
        self._turns.clear()
        self._spare = None

    def _build(self) -> None:
        number = PIPELINES if self._device.index is not None else 1
        share = replace(self._device, num_threads=math.ceil(self._device.num_threads / number))
        self._turns.extend(_pipeline(share, self._max_batch_size) for _ in range(number))


def _flac_decoder(device: Device) -> FlacDecoder | None:
    kernels = None if device.index is None else load_kernels(device.index)
    return None if kernels is None else FlacDecoder(device.torch_device, kernels)


def _pipeline(device: Device, max_batch_size: int) -> Any:
    from nvidia.dali import fn, types

    from lightning_dali.graph.dali import new_pipeline

    pipeline = new_pipeline(device, max_batch_size=max_batch_size)
    with pipeline:
        data = fn.external_source(name="data", device="cpu", no_copy=True)
        audio, _ = fn.decoders.audio(data, device="cpu", dtype=types.FLOAT)
        shapes = audio.shape()
        audio = audio.gpu() if device.index is not None else audio  # through DALI's own pinned memory
        pipeline.set_outputs(fn.pad(audio, axes=(0,)), shapes)
    pipeline.build()
    return pipeline


def _run(pipeline: Any, blobs: Sequence[np.ndarray[Any, Any]]) -> None:
    from lightning_dali.graph.dali import tensors

    pipeline.feed_input("data", tensors(blobs))
    pipeline._run_once()  # `schedule_run` would wait for a full prefetch queue first
