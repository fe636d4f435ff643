"""On the CPU, calls that met PIL images are Pillow's to the bit, and what follows them keeps its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph import pillow_itself
from lightning_dali.graph.functionals import pillow_name
from lightning_dali.graph.plan import plan_tail
from lightning_dali.graph.run import run_tail
from lightning_dali.modalities.image import families
from lightning_dali.proxies.calls import Call
from tests.graph.test_levels import pictures

BILINEAR = F.InterpolationMode.BILINEAR  # where the device's arithmetic may be a level off
TAILS: list[list[tuple[str, dict[str, Any]]]] = [
    [
        ("adjust_sharpness", {"sharpness_factor": 1.7}),
        ("equalize", {}),
        ("rotate", {"angle": 20.0, "fill": [9, 8, 7], "interpolation": BILINEAR}),
    ],
    [
        ("affine", {"angle": 9.0, "translate": [3, -2], "scale": 1.2, "shear": [4.0, 0.0], "interpolation": BILINEAR}),
        ("horizontal_flip", {}),
    ],
    [("adjust_hue", {"hue_factor": 0.2}), ("posterize", {"bits": 3})],
    [],
]
AFTER: list[tuple[str, dict[str, Any]]] = [
    ("to_image", {}),
    ("adjust_brightness", {"brightness_factor": 1.3}),
    ("to_dtype", {"dtype": torch.float32, "scale": True}),
    ("normalize", {"mean": [0.5], "std": [0.2]}),
]


@pytest.fixture(autouse=True)
def images_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are small, so that they are quick; Pillow is for large ones."""
    monkeypatch.setattr(pillow_itself, "FEWEST_PIXELS", 37 * 53)


def as_torchvision(image: Image.Image, calls: list[tuple[str, dict[str, Any]]]) -> torch.Tensor:
    result: Any = image
    for name, kwargs in calls:
        result = getattr(F, name)(result, **kwargs)
    return torch.as_tensor(result)


def as_here(images: list[Image.Image], tails: list[list[tuple[str, dict[str, Any]]]]) -> Any:
    met = [
        [Call(pillow_name(name), kwargs) for name, kwargs in tail] + [Call(*call) for call in AFTER] for tail in tails
    ]
    batch = torch.stack([F.pil_to_tensor(image) for image in images]).contiguous(memory_format=torch.channels_last)
    before = batch.clone()
    out = run_tail(batch, plan_tail([families(tuple(calls)) for calls in met]))
    assert torch.equal(batch, before)
    return out


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_rows_are_torchvisions_to_the_bit(mode: str) -> None:
    images = pictures(8, mode)
    tails = [[call for call in TAILS[i % 4] if mode == "RGB" or "fill" not in call[1]] for i in range(8)]
    for found, image, tail in zip(as_here(images, tails), images, tails, strict=True):
        assert torch.equal(found, as_torchvision(image, tail + AFTER))


def test_sizes_that_differ() -> None:
    images = pictures(2, "RGB")
    tails: list[Any] = [[("rotate", {"angle": 30.0, "expand": True})], [("invert", {})]]
    for found, image, tail in zip(as_here(images, tails), images, tails, strict=True):
        assert torch.equal(found, as_torchvision(image, tail + AFTER))


def test_a_picture_made_of_a_tensor_again_keeps_its_order() -> None:
    images = pictures(2, "RGB")
    again = [("to_image", {}), ("adjust_hue", {"hue_factor": 0.1}), ("to_pil_image", {}), ("invert", {})]
    calls = [[("solarize", {"threshold": 128.0}), *again], [("invert", {}), *again]]
    named = [
        [Call(pillow_name(name) if number in (0, 4) else name, kwargs) for number, (name, kwargs) in enumerate(tail)]
        for tail in calls
    ]
    batch = torch.stack([F.pil_to_tensor(image) for image in images])
    out = run_tail(batch, plan_tail([families(tuple(tail)) for tail in named]))
    for found, image, tail in zip(out, images, calls, strict=True):
        assert torch.equal(found, F.pil_to_tensor(as_pil(image, tail)))


def as_pil(image: Image.Image, calls: list[tuple[str, dict[str, Any]]]) -> Image.Image:
    result: Any = image
    for name, kwargs in calls:
        result = getattr(F, name)(result, **kwargs)
    assert isinstance(result, Image.Image)
    return result


def test_small_images_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.zeros((2, 3, 37, 53), dtype=torch.uint8)
    assert pillow_itself.pays_with_pillow(batch) and pillow_itself.pays_with_pillow([*batch])
    assert not pillow_itself.pays_with_pillow(batch.float())
    monkeypatch.setattr(pillow_itself, "FEWEST_PIXELS", 37 * 53 + 1)
    assert not pillow_itself.pays_with_pillow(batch)
    assert pillow_itself.pays_with_pillow([batch[0], torch.zeros((3, 40, 60), dtype=torch.uint8)])
