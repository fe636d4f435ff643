"""The short way through Compose draws and records what torchvision's own way does."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL.Image import Image
from torchvision.transforms import v2

import lightning_dali.proxies.compose as compose
import lightning_dali.proxies.shortcuts as shortcuts
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
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    out = v2.Compose(pipeline)(_proxy())
    return [(call.name, str(dict(call.kwargs))) for call in out.calls], [float(torch.rand(())), random.random()]


def _calls_or_pixels(pipeline: list[v2.Transform], seed: int) -> object:
    torch.random.default_generator.manual_seed(seed)
    return v2.Compose(pipeline)(_proxy())


@pytest.mark.parametrize("name", PIPELINES)
def test_same_draws_and_same_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with capture():
        short = [_recorded(PIPELINES[name], seed) for seed in range(30)]
        monkeypatch.setattr(compose, "_way", lambda *_: "call")
        monkeypatch.setattr(compose, "SHORTCUTS", {})
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


@pytest.mark.parametrize(
    ("changes", "image"),
    [
        ({"magnitude": 3}, "pil"),
        ({"magnitude": 0}, "pil"),
        ({"num_magnitude_bins": 11}, "pil"),
        ({"interpolation": v2.InterpolationMode.BILINEAR}, "pil"),
        ({"interpolation": v2.InterpolationMode.BICUBIC}, "pil"),
        ({"_fill": {"others": [1.0, 2.0, 3.0]}}, "pil"),
        ({}, "tensor"),
        ({}, "float"),
        ({}, "gray"),
        ({}, "wide"),
    ],
    ids=str,
)
def test_what_rand_augment_remembers_is_of_its_settings_and_of_the_kind_of_image(
    changes: dict[str, object], image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"tensor": [v2.ToImage()], "float": [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]}.get(image, [])
    before += {"gray": [v2.Grayscale()], "wide": [v2.Resize((20, 331))]}.get(image, [])
    augment = v2.RandAugment()
    pipeline = [*before, augment]
    with capture():
        for seed in range(60):  # learns
            _recorded([v2.RandAugment()], seed)
            _recorded(pipeline, seed)
        for name, value in changes.items():
            setattr(augment, name, value)
        if changes.get("interpolation") == v2.InterpolationMode.BICUBIC:
            assert all(isinstance(_calls_or_pixels(pipeline, seed), (ProxyImage, Image)) for seed in range(60))
            assert any(not isinstance(_calls_or_pixels(pipeline, seed), ProxyImage) for seed in range(60))
            return
        short = [_recorded(pipeline, seed) for seed in range(60) for _ in range(2)]
        monkeypatch.setattr(compose, "_way", lambda *_: "call")
        monkeypatch.setattr(compose, "SHORTCUTS", {})
        assert [_recorded(pipeline, seed) for seed in range(60) for _ in range(2)] == short


def test_an_augmentation_space_of_an_instance_is_its_own() -> None:
    augment = v2.RandAugment(1)
    augment._AUGMENTATION_SPACE = {"Invert": (lambda num_bins, height, width: None, False)}
    with capture():
        assert [call.name for call in v2.Compose([augment])(_proxy()).calls] == ["invert"]


@pytest.mark.parametrize("kind", shortcuts.SHORTCUTS)
def test_shortcuts_agree_with_this_torchvision(kind: type) -> None:
    assert shortcuts.shortcut(shortcuts._EXAMPLES[kind][0]()) is not None


def test_a_transform_that_draws_in_another_way_is_called_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_window(self: v2.RandomResizedCrop, flat_inputs: list[object]) -> dict[str, int]:
        return {"top": int(torch.randint(0, 3, ())), "left": 0, "height": 7, "width": 9}

    monkeypatch.setattr(v2.RandomResizedCrop, "make_params", own_window)
    shortcuts._agrees.cache_clear()
    try:
        with capture():
            out = v2.Compose([v2.RandomResizedCrop(24), v2.ToImage()])(_proxy())
        assert (out.calls[0].kwargs["height"], out.calls[0].kwargs["width"]) == (7, 9)
    finally:
        shortcuts._agrees.cache_clear()


def test_a_changed_instance_is_called_as_it_is() -> None:
    crop = v2.RandomResizedCrop(24)
    crop.make_params = lambda flat_inputs: {"top": 1, "left": 2, "height": 3, "width": 4}
    with capture():
        out = v2.Compose([crop, v2.ToImage()])(_proxy())
    assert out.calls[0].kwargs["height"] == 3


def test_a_filter_that_only_pillow_has_still_gives_pixels() -> None:
    crop = v2.RandomResizedCrop(24, interpolation=v2.InterpolationMode.LANCZOS)
    with capture():
        out = v2.Compose([crop, v2.ToImage()])(_proxy())
    assert tuple(out.shape) == (3, 24, 24) and type(out) is not ProxyImage
