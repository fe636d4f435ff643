"""Several images a sample: two views, DINO's crops, stereo pairs, stacked crops. Each is a field of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lightning_dali.testing import make_photos
from tests.datasets.same import check_same
from tests.graph.vocabulary import delivered

VIEW = v2.Compose(
    [
        v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        v2.RandomGrayscale(p=0.2), v2.GaussianBlur(5), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
    ]
)  # fmt: skip
LOCAL = v2.Compose([v2.RandomResizedCrop(16, scale=(0.05, 0.4)), v2.RandomHorizontalFlip(), v2.ToImage()])
RECIPES = {
    "SimCLR": lambda image: (VIEW(image), VIEW(image)),
    "SimCLR, a list": lambda image: [VIEW(image), VIEW(image)],
    "DINO": lambda image: [VIEW(image), VIEW(image), *(LOCAL(image) for _ in range(4))],
    "DINO, a dict": lambda image: {"global": (VIEW(image), VIEW(image)), "local": [LOCAL(image) for _ in range(4)]},
    "image and its thumbnail": lambda image: {"image": VIEW(image), "small": v2.Resize((8, 8))(v2.ToImage()(image))},
}


@dataclass
class Photos:
    """Opens a file and applies what makes the sample."""

    paths: list[Path]
    make: Any

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with open(self.paths[index], "rb") as file:
            return self.make(Image.open(file).convert("RGB")), index


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 4, sizes=((61, 83), (83, 61), (70, 96), (64, 64)))


@pytest.mark.parametrize("name", RECIPES)
def test_every_view_is_torchvisions(name: str, paths: list[Path]) -> None:
    request = check_same(Photos(paths, RECIPES[name]))
    assert not request.notes


def test_views_of_a_file_share_its_bytes(paths: list[Path]) -> None:
    """Six views, and each file travels and is decoded once; only where all rows have all views."""
    for name, views in (("DINO", 6), ("DINO, a dict", 6), ("SimCLR", 2)):
        _, request = delivered(Photos(paths, RECIPES[name]), 4)
        (lane,) = request.lanes
        assert len(lane) == len(lane.data) == 4 and len(lane.spec.views) == views
        assert lane.spec.describe()[0] == ("decode once", "DALI")


def test_five_crops_stacked_as_the_documentation_does(paths: list[Path]) -> None:
    def stack(crops: Any) -> torch.Tensor:
        return torch.stack([v2.functional.to_image(crop) for crop in crops])

    stacked = v2.Compose([v2.Resize((48, 48)), v2.FiveCrop(32), stack])
    batch, request = delivered(Photos(paths, stacked), 4)
    assert batch[0].shape == (4, 5, 3, 32, 32) and len(request.lanes) == 1
    with_pixels = Photos(paths, stacked)[2][0]
    assert (batch[0][2].int() - with_pixels.int()).abs().float().mean() < 1
    assert not request.notes


def test_ten_crops_stacked_after_the_conversion(paths: list[Path]) -> None:
    def stack(crops: Any) -> torch.Tensor:
        return torch.stack([v2.functional.normalize(crop, [0.5] * 3, [0.5] * 3) for crop in crops])

    stacked = v2.Compose(
        [v2.Resize((48, 48)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.TenCrop(32), stack]
    )
    batch, request = delivered(Photos(paths, stacked), 4)
    assert batch[0].shape == (4, 10, 3, 32, 32)
    assert (batch[0][1] - Photos(paths, stacked)[1][0]).abs().mean() < 1 / 127
    assert not request.notes


class Pair(NamedTuple):
    """A stereo sample."""

    left: Any
    right: Any
    baseline: float


def test_a_named_tuple_of_two_files(paths: list[Path]) -> None:
    shrink = v2.Compose([v2.Resize((32, 40)), v2.ToImage()])

    class Stereo:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Pair:
            left, right = (Image.open(path) for path in (paths[index], paths[index + 1]))
            return Pair(shrink(left), shrink(right), 0.5 * index)

    batch, _ = delivered(Stereo(), 3)
    assert isinstance(batch, Pair) and batch.left.shape == batch.right.shape == (3, 3, 32, 40)
    assert batch.baseline.tolist() == [0.0, 0.5, 1.0]
    same = (batch.left[1].int() - batch.right[0].int()).abs().float().mean()
    assert same == 0, "the same file on the other side"
