"""Makes decoded frames smaller before they travel. Runs in the worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.plan import Head
from lightning_dali.modalities.video_window import sticks_out

WORTH = 4
"""Frames that resizing makes so many times smaller are resized here: 16 of 1920x1080 are 100 MB, and copying them takes as
long."""


def shrink(head: Head, frames: np.ndarray) -> tuple[Head, np.ndarray]:
    """Does what is at the front of the head and leaves less to send; torchvision resizes, so nothing else changes.

    Args:
        head: What is to be done to the frames.
        frames: `(T, H, W, 3)` uint8.

    Returns:
        What is left to be done, and contiguous frames.
    """
    if head.first is not None:
        top, left, height, width = head.first
        if not sticks_out(head):
            frames = frames[:, top : top + height, left : left + width]
            head = replace(head, size=(height, width), first=None)
    resized = head.resized
    worth = resized is not None and WORTH * resized[0] * resized[1] <= head.size[0] * head.size[1]
    if resized is not None and worth and head.first is None and not head.float_resize:
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        interpolation = F.InterpolationMode(head.interpolation or "bilinear")
        small = F.resize(pixels, list(resized), interpolation=interpolation, antialias=head.antialias)
        frames = small.permute(0, 2, 3, 1).numpy()
        head = replace(head, size=resized, resized=None)
    return head, np.ascontiguousarray(frames)
