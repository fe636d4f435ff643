"""A DALI pipeline of one's own and the dataset that feeds it, for configs/data/pipeline.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from lightning_dali.testing import made_up


@pipeline_def
def decode_and_resize() -> Any:
    """Encoded bytes to (3, 64, 64), normalised, with a random flip."""
    encoded = fn.external_source(name="images", no_copy=True)
    images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
    images = fn.resize(images, size=(64, 64))
    return fn.crop_mirror_normalize(
        images,
        mirror=fn.random.coin_flip(),
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
    )


class Photos:
    """`(proxy(bytes), index)`."""

    def __init__(self, paths: list[Path], proxy: Any) -> None:
        self.paths, self.proxy = paths, proxy

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.proxy(np.fromfile(self.paths[index], np.uint8)), index


def photos(proxy: Any, *, n: int) -> Photos:
    """Made-up photos, as a function of the proxy."""
    return Photos(made_up("photos", n, sizes=[[120, 160], [160, 120]]), proxy)
