"""What the head takes and what the tail: chains of calls drawn at random, each against torchvision itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_dali.graph.plan import plan_item, plan_tail
from lightning_dali.proxies import Call
from lightning_dali.testing import IndexedImages, make_photos
from tests.datasets.same import check_same
from tests.graph.vocabulary import SIZES

MOVES: list[Any] = [
    lambda r: v2.RandomHorizontalFlip(),
    lambda r: v2.RandomVerticalFlip(),
    lambda r: v2.RandomCrop(r.choice([30, 44]), pad_if_needed=True),
    lambda r: v2.CenterCrop(r.choice([28, 45, 90])),
    lambda r: v2.Pad([r.randint(0, 5) for _ in range(4)], fill=r.choice([0, 0, 90])),
    lambda r: v2.RandomCrop(40, padding=r.choice([3, 6]), pad_if_needed=True, fill=r.choice([0, 50])),
    lambda r: v2.RandomZoomOut(fill=r.choice([0, 77]), side_range=(1.0, 1.6)),
    lambda r: v2.RandomInvert(),
    lambda r: v2.RandomPosterize(4),
    lambda r: v2.RandomRotation(20),
    lambda r: v2.RandomApply([v2.ColorJitter(0.3, 0.3, 0.3, 0.1)]),
    lambda r: v2.RandomGrayscale(0.3),
    lambda r: v2.RandomApply([v2.CenterCrop(36)]),
]
RESIZES: list[Any] = [
    lambda r: v2.Resize(r.choice([26, 48, (31, 37)])),
    lambda r: v2.RandomResizedCrop(r.choice([24, (30, 26)])),
    lambda r: v2.Resize(r.choice([26, (50, 50)]), interpolation=v2.InterpolationMode.BICUBIC),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 4, sizes=SIZES)


@pytest.mark.parametrize("seed", range(24))
def test_chains_drawn_at_random(seed: int, paths: list[Path]) -> None:
    """Flips, windows, fills, colours in any order around a resize, converted to floats at any point."""
    draw = random.Random(seed)
    steps = [draw.choice(MOVES)(draw) for _ in range(draw.randint(1, 5))]
    steps.insert(draw.randint(0, len(steps)), draw.choice(RESIZES)(draw))
    convert = draw.randint(0, len(steps))
    steps[convert:convert] = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for number, step in enumerate(steps):  # a posterized or inverted float is another thing than an integer
        if number > convert and isinstance(step, v2.RandomPosterize):
            steps[number] = v2.Identity()
    transform = v2.Compose(steps)
    print(transform)
    # posterize makes a level of 16; an edge at the border (a pad) shows that DALI's resize repeats the border's pixels
    request = check_same(IndexedImages(paths, transform), mean=1.2, p99=20.0)
    assert not request.notes, transform


def _names(calls: list[tuple[str, dict[str, Any]]], **options: Any) -> tuple[Any, list[str]]:
    head, tail = plan_item((60, 80), [Call(*call) for call in calls], 3, **options)
    return head, [call.name for call in tail]


def test_a_training_recipe_has_no_tail() -> None:
    head, tail = _names(
        [
            ("resized_crop", {"top": 3, "left": 4, "height": 30, "width": 40, "size": [24, 24], "antialias": True}),
            ("horizontal_flip", {}),
            ("to_image", {}),
            ("to_dtype", {"dtype": torch.float32, "scale": True}),
            ("normalize", {"mean": [0.5] * 3, "std": [0.5] * 3}),
        ]
    )
    assert (head.first, head.resized, head.hflip, tail) == ((3, 4, 30, 40), (24, 24), True, [])
    assert head.finish.mean == (0.5, 0.5, 0.5)


def test_what_a_window_cut_away_stays_hidden() -> None:
    """A pad after a crop must not bring the cut pixels back."""
    head, tail = _names([("crop", {"top": 10, "left": 10, "height": 20, "width": 20}), ("pad", {"padding": [5]})])
    assert head.first == (10, 10, 20, 20) and tail == ["pad"]


def test_arithmetic_changes_with_the_conversion() -> None:
    hue = ("adjust_hue", {"hue_factor": 0.1})
    _, tail = _names([hue, ("to_image", {}), hue, ("to_pil_image", {}), hue], pil=True)
    assert tail == ["adjust_hue_pil", "to_image", "adjust_hue", "to_pil_image", "adjust_hue_pil"]


def test_the_tail_aligns_rows_and_keeps_every_rows_order() -> None:
    rows = [
        ["invert", "equalize", "to_image"],
        ["equalize", "invert", "to_image"],
        ["to_image"],
        ["equalize", "to_image"],
    ]
    steps = plan_tail([[Call(name, {}) for name in row] for row in rows])
    for number, row in enumerate(rows):
        assert [step.name for step in steps if step.rows is None or number in step.rows] == row
    assert steps[-1].name == "to_image" and steps[-1].rows is None, "the common end waits for all rows"


def test_the_functional_set_is_the_recorded_set() -> None:
    """Every functional for images is recorded or known to need pixels: a new torchvision may bring another."""
    from lightning_dali.proxies import ProxyImage

    kernels = F._utils._KERNEL_REGISTRY
    for functional, known in kernels.items():
        is_image = any(getattr(kind, "__name__", "") == "Image" for kind in known)
        if is_image and not functional.__name__.startswith("get_"):
            assert ProxyImage in known, functional.__name__
