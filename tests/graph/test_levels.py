"""The family of tables: whatever its samples drew, each comes out as from torchvision's own functional alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.functionals import merge_family
from lightning_dali.graph.levels import CALLS
from lightning_dali.graph.tail import apply_call

DRAWN: dict[str, Any] = {
    "adjust_brightness": lambda rng: {"brightness_factor": rng.uniform(0, 2)},
    "adjust_contrast": lambda rng: {"contrast_factor": rng.uniform(0, 2)},
    "adjust_gamma": lambda rng: {"gamma": rng.uniform(0.3, 3), "gain": rng.uniform(0.5, 1.5)},
    "autocontrast": lambda rng: {},
    "equalize": lambda rng: {},
    "invert": lambda rng: {},
    "posterize": lambda rng: {"bits": rng.randrange(1, 9)},
    "solarize": lambda rng: {"threshold": rng.uniform(0, 255)},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pictures(number: int, mode: str) -> list[Image.Image]:
    """Noise, few levels, one level, a narrow range: whatever statistics meet."""
    rng, made = np.random.default_rng(3), []
    for i in range(number):
        pixels = rng.integers(0, 256, (37, 53, 3), dtype=np.uint8)
        pixels = [pixels, pixels // 100 * 90, np.full_like(pixels, 77), 60 + pixels // 8][i % 4]
        made.append(Image.fromarray(pixels).convert(mode))
    return made


def drawn(number: int) -> list[tuple[str, dict[str, Any]]]:
    rng = random.Random(1)
    names = [name for name in DRAWN for _ in range(number // len(DRAWN))]
    return [(name, DRAWN[name](rng)) for name in names]


def test_every_call_of_the_family_is_drawn_here() -> None:
    assert {*DRAWN, *(f"{name}_pil" for name in DRAWN)} == CALLS
    assert {merge_family(name) for name in CALLS} == {"levels"}


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pil_images_give_what_pillow_gives(mode: str, device: str) -> None:
    calls, images = drawn(64), pictures(64, mode)
    wanted = torch.stack(
        [F.pil_to_tensor(getattr(F, name)(one, **row)) for one, (name, row) in zip(images, calls, strict=True)]
    )
    batch = torch.stack([F.pil_to_tensor(one) for one in images]).to(device)
    rows = [{"_call": f"{name}_pil", **row} for name, row in calls]
    torch.testing.assert_close(apply_call("levels", batch, rows).cpu(), wanted, rtol=0, atol=0)
    last = batch.contiguous(memory_format=torch.channels_last)  # as DALI gives images
    torch.testing.assert_close(apply_call("levels", last, rows).cpu(), wanted, rtol=0, atol=0)
    alone = [apply_call("levels", last[i : i + 1], rows[i : i + 1]) for i in range(len(rows))]
    torch.testing.assert_close(torch.cat(alone).cpu(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("frames", [None, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tensors_give_what_torchvision_gives(dtype: torch.dtype, frames: int | None, device: str) -> None:
    calls, images = drawn(64), pictures(64 * (frames or 1), "RGB")
    x = torch.stack([F.pil_to_tensor(one) for one in images])
    if frames:
        x = x.unflatten(0, (64, frames))
    if dtype.is_floating_point:
        x = x / 255
        calls = [(name, {k: v / 255 if k == "threshold" else v for k, v in row.items()}) for name, row in calls]
    wanted = torch.stack([getattr(F, name)(one, **row) for one, (name, row) in zip(x, calls, strict=True)])
    found = apply_call("levels", x.to(device), [{"_call": name, **row} for name, row in calls]).cpu()
    if dtype.is_floating_point:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)
        return
    # a mean may be summed in another order, a power be rounded otherwise
    off = (found.int() - wanted.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.01
