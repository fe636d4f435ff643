"""Targets that move with the image: boxes, masks and keypoints, in tuples and dicts, with every documented way to write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets, tv_tensors
from torchvision.transforms import v2

from lightning_dali.fetch import Fetcher
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.modalities import ImageModality
from lightning_dali.sampling import Shard, TrainPlan
from tests.datasets.fakes import cityscapes, coco, kitti, pets, photo, voc
from tests.datasets.same import check_same
from tests.graph.vocabulary import delivered, expected

JOINT = v2.Compose(
    [
        v2.RandomIoUCrop(), v2.RandomHorizontalFlip(), v2.RandomZoomOut(fill=7), v2.Resize((40, 48)), v2.SanitizeBoundingBoxes(),
        v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
    ]
)  # fmt: skip
MASKS = v2.Compose([v2.RandomHorizontalFlip(), v2.Resize((40, 48)), v2.ToImage()])


def _detection(name: str, root: Path, transforms: Any) -> Any:
    if name == "CocoDetection":
        return datasets.CocoDetection(*map(str, coco(root)), transforms=transforms)
    if name == "VOCDetection":
        return datasets.VOCDetection(voc(root), transforms=transforms)
    if name == "Cityscapes":
        return datasets.Cityscapes(cityscapes(root), target_type="instance", transforms=transforms)
    return datasets.Kitti(kitti(root), transforms=transforms)


@pytest.mark.parametrize("name", ["CocoDetection", "VOCDetection", "Kitti", "Cityscapes"])
def test_wrapped_detection_sets(name: str, tmp_path: Path) -> None:
    if name == "CocoDetection":
        pytest.importorskip("pycocotools", reason="pip install 'lightning-dali[datasets]'")
    keys = {"CocoDetection": ("boxes", "labels", "masks"), "Cityscapes": None}.get(name, ("boxes", "labels"))
    dataset = _detection(name, tmp_path, MASKS if name == "Cityscapes" else JOINT)
    wrapped = datasets.wrap_dataset_for_transforms_v2(dataset, target_keys=keys)
    request = check_same(wrapped)
    assert not request.notes, request.notes
    assert all(lane.data for lane in request.lanes)


@pytest.mark.parametrize("name", ["VOCSegmentation", "Cityscapes", "OxfordIIITPet"])
def test_wrapped_segmentation_sets_keep_the_classes(name: str, tmp_path: Path) -> None:
    transforms = v2.Compose(
        [
            v2.RandomResizedCrop((40, 48)),
            v2.RandomRotation(15),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        ]
    )
    dataset: Any = {
        "VOCSegmentation": lambda: datasets.VOCSegmentation(voc(tmp_path), transforms=transforms),
        "Cityscapes": lambda: datasets.Cityscapes(cityscapes(tmp_path), target_type="semantic", transforms=transforms),
        "OxfordIIITPet": lambda: datasets.OxfordIIITPet(
            pets(tmp_path), target_types="segmentation", transforms=transforms
        ),
    }[name]()
    wrapped = datasets.wrap_dataset_for_transforms_v2(dataset)
    request = check_same(wrapped)
    assert not request.notes, request.notes
    masks = delivered(wrapped, 2)[0][1]
    before = {
        int(value)
        for _, mask in (datasets.wrap_dataset_for_transforms_v2(_untransformed(dataset))[n] for n in range(2))
        for value in mask.unique()
    }
    assert {int(value) for value in masks.unique()} <= before | {0}


def _untransformed(dataset: Any) -> Any:
    dataset.transforms = None
    return dataset


class Shapes:
    """Block masks with values {0, 25, 100, 220}, the image their copy in RGB, keypoints at block corners."""

    def __init__(self, folder: Path, transform: Any, *, shape: str = "tuple") -> None:
        self.transform, self.shape, self.paths = transform, shape, []
        for n in range(8):
            blocks = np.random.default_rng(n).choice([0, 25, 100, 220], (4, 4)).astype(np.uint8)
            pixels = np.kron(blocks, np.ones((20, 24), np.uint8))
            self.paths.append((folder / f"{n}.png", folder / f"{n}_mask.png"))
            Image.fromarray(np.dstack([pixels] * 3)).save(self.paths[-1][0])
            Image.fromarray(pixels).save(self.paths[-1][1])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image_path, mask_path = self.paths[index]
        image = Image.open(image_path).convert("RGB")
        mask = tv_tensors.Mask(Image.open(mask_path))
        points = tv_tensors.KeyPoints([[24.0, 20.0], [72.0, 40.0]], canvas_size=(80, 96))
        if self.shape == "dict":
            return self.transform({"image": image, "mask": mask, "points": points})
        return self.transform(image, mask, points)


@pytest.mark.parametrize("shape", ["tuple", "dict"])
@pytest.mark.parametrize("size", [64, 120])
def test_image_mask_and_points_keep_one_geometry(tmp_path: Path, shape: str, size: int) -> None:
    crop = [v2.RandomResizedCrop(size, scale=(0.5, 1))] if size == 64 else [v2.RandomCrop(size, pad_if_needed=True)]
    transform = v2.Compose([*crop, v2.RandomHorizontalFlip(), v2.RandomRotation(15), v2.ToImage()])
    dataset = Shapes(tmp_path, transform, shape=shape)
    loader = Loader(
        Fetcher(dataset, ImageModality(), seed=1), TrainPlan(8, 4, shard=Shard(), seed=1), Device(None, num_threads=1)
    )
    agree, total = 0, 0
    for _ in range(3):
        for batch in loader:
            image, mask, points = batch.values() if shape == "dict" else batch
            assert image.shape[2:] == mask.shape[2:] == (size, size)
            assert set(mask.unique().tolist()) <= {0, 25, 100, 220}
            assert isinstance(points, list) and all(isinstance(one, tv_tensors.KeyPoints) for one in points)
            inside = _away_from_edges(mask)
            agree += ((image[:, :1].int() - mask.int()).abs() <= 3)[inside].sum().item()
            total += inside.sum().item()
    loader.close()
    assert agree / total > 0.99


def _away_from_edges(mask: torch.Tensor) -> torch.Tensor:
    """Pixels whose 5 x 5 neighbours have their value."""
    values = mask.float()
    same = torch.nn.functional.max_pool2d(values, 5, 1, 2) == -torch.nn.functional.max_pool2d(-values, 5, 1, 2)
    return same


@pytest.mark.parametrize("format", list(tv_tensors.BoundingBoxFormat), ids=lambda format: format.name)
def test_boxes_of_every_format_are_torchvisions(format: tv_tensors.BoundingBoxFormat, tmp_path: Path) -> None:
    paths = [photo(tmp_path / f"{n}.jpg", (60, 80)) for n in range(3)]
    sides = {
        4: [10.0, 12.0, 30.0, 28.0],
        5: [30.0, 25.0, 20.0, 10.0, 20.0],
        8: [10.0, 12.0, 30.0, 12.0, 30.0, 28.0, 10.0, 28.0],
    }
    count = {"XYXY": 4, "XYWH": 4, "CXCYWH": 4, "XYXYXYXY": 8}.get(format.name, 5)

    class Boxes:
        transform = v2.Compose(
            [v2.RandomHorizontalFlip(), v2.RandomRotation(20, expand=True), v2.Resize((40, 48)), v2.ToImage()]
        )

        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            boxes = tv_tensors.BoundingBoxes([sides[count]] * (index + 1), format=format, canvas_size=(60, 80))
            return self.transform(
                Image.open(paths[index]), {"boxes": boxes, "labels": torch.arange(index + 1), "id": index}
            )

    check_same(Boxes())
    _, targets = delivered(Boxes(), 3)[0]
    assert [type(boxes) for boxes in targets["boxes"]] == [tv_tensors.BoundingBoxes] * 3
    assert targets["boxes"][1].format == format and targets["boxes"][1].canvas_size == (40, 48)
    assert [len(labels) for labels in targets["labels"]] == [1, 2, 3]
    assert targets["id"].tolist() == [0, 1, 2]


def test_the_collate_of_detection_recipes(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools", reason="pip install 'lightning-dali[datasets]'")
    transforms = v2.Compose(
        [
            v2.RandomShortestSize([30, 40]),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    dataset = datasets.wrap_dataset_for_transforms_v2(
        datasets.CocoDetection(*map(str, coco(tmp_path)), transforms=transforms)
    )
    fetcher = Fetcher(dataset, ImageModality(), collate_fn=lambda batch: tuple(zip(*batch, strict=True)), seed=3)
    loader = Loader(fetcher, TrainPlan(2, 2, shard=Shard(), seed=0, shuffle=False), Device(None, num_threads=1))
    one = iter(loader)
    images, targets = next(one)
    one.close()
    loader.close()
    assert isinstance(images, tuple) and [image.ndim for image in images] == [3, 3]
    for row in range(2):
        image, target = expected(dataset, row)
        assert images[row].shape == image.shape and (images[row] - image).abs().mean() < 1 / 255
        assert torch.equal(targets[row]["boxes"], target["boxes"]) and targets[row]["image_id"] == target["image_id"]
    losses = _detector()(
        list(images),
        [{key: value for key, value in target.items() if key in ("boxes", "labels")} for target in targets],
    )
    assert torch.isfinite(sum(losses.values()))


def _detector() -> Any:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    return fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=91)
