"""What every DALI pipeline here shares: how it is made, and how its outputs become torch tensors.

Runs in the rank's server thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_dali.graph.spec import Device


def new_pipeline(device: Device, *, max_batch_size: int) -> Any:
    """An empty pipeline with the dynamic executor."""
    from nvidia.dali import Pipeline

    return Pipeline(
        batch_size=max_batch_size,
        num_threads=device.num_threads,
        device_id=device.index,
        prefetch_queue_depth=device.depth,
        exec_dynamic=True,
    )


def tensors(items: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    """The items as DALI's tensors over the same memory, which `feed_input` takes in two thirds of the time."""
    from nvidia.dali.tensors import TensorCPU

    return [TensorCPU(np.asarray(item), "") for item in items]


def collect(pipeline: Any, device: Device) -> list[Any]:
    """Waits for the oldest batch in flight.

    On the GPU the outputs are bound to torch's current stream (the server's) and copied once, device to device: their
    memory then belongs to torch's allocator, which knows which streams still use it, where DALI's pool would hand it out
    again as soon as the last reference is dropped.

    Returns:
        For each output a tensor `(n, ...)`, or a list of n tensors where sizes differ.
    """
    if device.index is None:
        return [_tensors(output, copy=False) for output in pipeline.outputs()]
    stream = torch.cuda.current_stream(device.index)
    return [_tensors(output, copy=True) for output in pipeline.outputs(cuda_stream=stream)]


def _tensors(output: Any, *, copy: bool) -> Any:
    if output.is_dense_tensor():
        dense = torch.from_dlpack(output.as_tensor())
        return dense.clone() if copy else dense
    items = [torch.from_dlpack(output[row]) for row in range(len(output))]
    return [item.clone() for item in items] if copy else items
