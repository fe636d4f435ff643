"""From planned clips to lanes. Runs in the worker; see `modalities.video`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_dali.graph.image import ImageSpec, head_inputs
from lightning_dali.graph.plan import Head, Window, plan_tail
from lightning_dali.graph.video import ClipJob, VideoSpec
from lightning_dali.media import CutClip
from lightning_dali.modalities.image import families
from lightning_dali.modalities.shared import finished_lane
from lightning_dali.modalities.video_window import sticks_out, within
from lightning_dali.proxies.video_source import VideoSource
from lightning_dali.wire import Blobs, Lane


@dataclass
class Item:
    """One clip on its way into a lane."""

    position: int
    name: str
    index: int
    source: VideoSource
    head: Head
    tail: tuple[Any, ...]
    decoder: str = "frames"
    blobs: list[np.ndarray] = field(default_factory=list)
    job: ClipJob | None = None
    window: Window | None = None
    """What is shown of the pictures that the job's decoder gives, where they are larger."""

    def assign(self, hardware: str) -> None:
        """Makes the job of a hardware decoder."""
        self.decoder = hardware
        self.job, self.blobs, self.window = job_of(self.source, hardware, uncrop=not sticks_out(self.head))

    def settle_window(self) -> None:
        """Moves the head's windows to where they are in the decoder's pictures, once the decoder is chosen for good."""
        if self.window is not None and self.job is not None:
            self.head = within(self.head, (self.job.height, self.job.width), self.window)


def job_of(
    source: VideoSource, hardware: str, *, uncrop: bool = True
) -> tuple[ClipJob, list[np.ndarray], Window | None]:
    """What a hardware decoder is told of a clip, the packets or the file that it gets, and what is shown of its pictures.

    Args:
        source: The clip.
        hardware: "nvdec" or "dali".
        uncrop: Whether DALI's decoder may give more than is shown, where that spares it a new session for each clip
            (docs/decisions/0004).
    """
    index = source.index
    assert index is not None
    cut = source.packets() if hardware == "nvdec" else source.file(uncrop=uncrop)
    sized = cut if isinstance(cut, CutClip) else index
    job = ClipJob(
        cut.frames,
        cut.num_frames,
        index.codec,
        sized.width,
        sized.height,
        index.rotation,
        color_matrix=index.color_matrix,
        color_range=index.color_range,
    )
    blobs, window = ([cut.data], cut.window) if isinstance(cut, CutClip) else (cut.packets, None)
    return job, [np.frombuffer(blob, np.uint8) for blob in blobs], window


def by_template(group: list[Item]) -> list[tuple[ImageSpec, list[Item]]]:
    """Few templates that together serve every clip."""
    merged: list[tuple[ImageSpec, list[Item]]] = []
    for item in group:
        spec = ImageSpec.of_head(item.head, mode="RGB", encoded=False)
        for number, (other, owners) in enumerate(merged):
            union = other.merge(spec)
            if union is not None:
                merged[number] = (union, [*owners, item])
                break
        else:
            merged.append((spec, [item]))
    return merged


def clip_lane(spec: VideoSpec, members: list[Item]) -> tuple[Lane, list[int]]:
    """A lane of clips, and their positions."""
    lane = Lane(
        field=members[0].name,
        spec=spec,
        data=Blobs(blob for item in members for blob in item.blobs),
        inputs=head_inputs(spec.template, [item.head for item in members]),
        heads=[item.job for item in members],
        tail=plan_tail([families(item.tail) for item in members]),
        indices=[item.index for item in members],
        paths=[item.source.path for item in members],
        parts=tuple(len(item.blobs) for item in members),
    )
    return lane, [item.position for item in members]


def result_lane(items: Sequence[tuple[str, int, Any]], members: list[int], *, layout: str) -> tuple[Lane, list[int]]:
    """A lane of what was finished in the worker, and its positions."""
    done = []
    for position in members:
        result = items[position][2].materialise("").as_subclass(torch.Tensor)
        swap = layout == "CTHW" and result.ndim == 4
        done.append((result.transpose(0, 1) if swap else result).contiguous())
    return finished_lane(items, members, done)
