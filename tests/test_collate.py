"""The default collate: PyTorch's structure, and a sentence where samples do not fit together."""

import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torchvision import tv_tensors

from lightning_dali.collate import CollateError, collate
from lightning_dali.proxies import ImageSource, ProxyImage, ProxyStack

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Target:
    label: int
    weight: float


def proxy(height: int = 6) -> ProxyImage:
    return ProxyImage.make(ImageSource.from_pixels(np.zeros((height, 8, 3), np.uint8)))


def joined(samples: list[Any]) -> Any:
    return collate(samples, range(100, 100 + len(samples)), is_proxy=lambda value: isinstance(value, ProxyImage))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "sample",
    [
        3,
        2.5,
        True,
        "word",
        np.float32(1.5),
        np.arange(4, dtype=np.int16),
        torch.rand(2, 3),
        {"a": 1, "b": {"c": torch.ones(2)}},
        Pair(torch.zeros(1), 7),
        (1, "x", np.zeros(2)),
        [1, 2],
        (),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_gives_what_pytorch_gives(sample: Any) -> None:
    found, expected = joined([sample, sample, sample]), default_collate([sample, sample, sample])
    assert same(found, expected)
    if isinstance(sample, Pair):
        assert type(found) is Pair


def test_what_pytorch_has_no_rule_for_is_kept() -> None:
    class Own:
        pass

    owns = [Own(), Own()]
    assert joined(owns) == owns
    assert joined([None, None]) == [None, None]
    found = joined([Target(1, 0.5), Target(2, 1.5)])
    assert type(found) is Target and found.label.tolist() == [1, 2] and found.weight.tolist() == [0.5, 1.5]
    assert joined([OrderedDict(a=1), OrderedDict(a=2)])["a"].tolist() == [1, 2]


def test_proxies_are_stacked_wherever_they_are() -> None:
    found = joined([{"views": (proxy(), proxy()), "y": 1} for _ in range(3)])
    assert all(isinstance(view, ProxyStack) and view.shape == (3, 3, 6, 8) for view in found["views"])
    assert found["y"].tolist() == [1, 1, 1]


def test_pixels_beside_proxies_become_proxies() -> None:
    found = joined([proxy(), tv_tensors.Image(torch.zeros(3, 6, 8, dtype=torch.uint8)), proxy()])
    assert isinstance(found, ProxyStack) and found.shape == (3, 3, 6, 8)


def test_targets_of_different_numbers_come_as_a_list() -> None:
    def target(count: int) -> Any:
        boxes = tv_tensors.BoundingBoxes(torch.zeros(count, 4), format="XYXY", canvas_size=(6, 8))
        return {"image": proxy(), "boxes": boxes, "labels": torch.zeros(count)}

    found = joined([target(2), target(0), target(5)])
    assert [len(boxes) for boxes in found["boxes"]] == [2, 0, 5]
    assert all(type(boxes) is tv_tensors.BoundingBoxes for boxes in found["boxes"])
    assert [len(labels) for labels in found["labels"]] == [2, 0, 5]


@pytest.mark.parametrize(
    ("good", "odd", "words"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.uint8), "dtype differs in one batch: expected torch.float32"),
        (np.zeros(2), np.zeros((2, 1)), "number of dimensions differs in one batch: expected 1"),
        (np.zeros(2), np.zeros(3), "shape differs in one batch: expected (2,) (as dataset index 100), found (3,)"),
        (np.zeros(2), torch.zeros(2), "kind differs in one batch: expected array"),
        (1, "one", "type differs in one batch: expected number"),
        ({"a": 1}, {"b": 1}, "keys differs in one batch: expected ['a']"),
        ({"a": 1}, None, "keys differs in one batch"),
        ((1, 2), (1,), "length differs in one batch: expected 2"),
        (proxy(), 3, "kind differs in one batch: expected ProxyImage"),
    ],
)
def test_what_does_not_fit_is_named(good: Any, odd: Any, words: str) -> None:
    with pytest.raises(CollateError, match=rf"(?s){re.escape(words)}.*at dataset index 102.*pass a collate_fn"):
        joined([good, good, odd])
    with pytest.raises(CollateError, match=r"field '1/0'.*dataset index 102"):
        joined([(0, (one,)) for one in (good, good, odd)])
