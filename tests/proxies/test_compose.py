"""The short way through Compose draws and records what torchvision's own way does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import lightning_dali.proxies.compose as compose
from lightning_dali.proxies import ImageSource, ProxyImage, capture

PIPELINES = {
    "imagenet": [
        v2.RandomResizedCrop(24),
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
    ],
    "randaugment": [v2.RandAugment(), v2.TrivialAugmentWide(), v2.AutoAugment()],
    "jitter": [v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.RandomGrayscale(0.5), v2.GaussianBlur(3)],
    "nested": [v2.RandomApply([v2.RandomRotation(10)]), v2.RandomChoice([v2.Resize(20), v2.CenterCrop(20)])],
    "geometry": [v2.RandomAffine(10), v2.RandomPerspective(), v2.RandomCrop(20, padding=2), v2.RandomVerticalFlip()],
    "erase": [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.5] * 3),
        v2.RandomErasing(1),
    ],
    "others": [v2.RandomOrder([v2.RandomInvert(), v2.RandomPosterize(3)]), v2.RandomZoomOut(), v2.ToPureTensor()],
    "pixels": [v2.RandomHorizontalFlip(), v2.Lambda(lambda image: image), v2.ToImage()],
}


def _proxy() -> ProxyImage:
    pixels = np.random.default_rng(0).integers(0, 255, (32, 40, 3), dtype=np.uint8)
    return ProxyImage.make(ImageSource.from_pixels(pixels))


def _recorded(pipeline: list[v2.Transform], seed: int) -> tuple[object, list[float]]:
    torch.manual_seed(seed)
    random.seed(seed)
    out = v2.Compose(pipeline)(_proxy())
    return [(call.name, str(dict(call.kwargs))) for call in out.calls], [float(torch.rand(())), random.random()]


@pytest.mark.parametrize("name", PIPELINES)
def test_same_draws_and_same_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with capture():
        short = [_recorded(PIPELINES[name], seed) for seed in range(30)]
        monkeypatch.setattr(compose, "_way", lambda *_: "call")
        assert [_recorded(PIPELINES[name], seed) for seed in range(30)] == short


def test_hooks_run() -> None:
    flip, seen = v2.RandomHorizontalFlip(1.0), []
    flip.register_forward_hook(lambda module, args, out: seen.append(out))
    with capture():
        v2.Compose([flip, v2.ToImage()])(_proxy())
    assert len(seen) == 1


def test_checks_are_not_skipped() -> None:
    class Picky(v2.Transform):
        def check_inputs(self, flat_inputs: list[object]) -> None:
            raise ValueError("picky")

    with capture(), pytest.raises(ValueError, match="picky"):
        v2.Compose([Picky(), v2.ToImage()])(_proxy())
