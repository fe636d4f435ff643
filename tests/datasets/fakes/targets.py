"""Datasets whose targets are boxes or images: tests/datasets/test_targets.py transforms them jointly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision import datasets

from tests.datasets.fakes.files import Transform, fake, photo, rng, text


def coco(root: Path) -> tuple[Path, Path]:
    """Images and an annotation file: two boxes with polygons in each image."""
    images, annotations = [], []
    for n in range(2):
        photo(root / f"{n}.jpg", (48, 64))
        images.append({"id": n, "file_name": f"{n}.jpg", "height": 48, "width": 64})
        for k in range(n + 1):
            x, y, w, h = 5.0 + 8 * k, 6.0, 20.0, 25.0
            annotations.append(
                {
                    "id": 10 * n + k + 1, "image_id": n, "category_id": k + 1, "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
                    "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]], "caption": f"thing {k}",
                }
            )  # fmt: skip
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1}, {"id": 2}]}
    return root, text(root / "annotations.json", json.dumps(content))


@fake
def CocoCaptions(root: Path, transform: Transform) -> Any:
    return datasets.CocoCaptions(*map(str, coco(root)), transform=transform)


@fake
def CocoDetection(root: Path, transform: Transform) -> Any:
    return datasets.CocoDetection(*map(str, coco(root)), transform=transform)


def voc(root: Path) -> Path:
    """A VOC2012 tree of two images, one with one object and one with two."""
    base = root / "VOCdevkit" / "VOC2012"
    for n in range(2):
        photo(base / "JPEGImages" / f"{n}.jpg", (48, 64))
        photo(base / "SegmentationClass" / f"{n}.png", (48, 64), "P")
        box = "<bndbox><xmin>5</xmin><ymin>6</ymin><xmax>40</xmax><ymax>30</ymax></bndbox>"
        objects = f"<object><name>dog</name>{box}</object>" * (n + 1)
        size = "<size><width>64</width><height>48</height><depth>3</depth></size>"
        text(base / "Annotations" / f"{n}.xml", f"<annotation><filename>{n}.jpg</filename>{size}{objects}</annotation>")
    for name in ("Main", "Segmentation"):
        text(base / "ImageSets" / name / "train.txt", "0\n1\n")
    return root


@fake
def VOCDetection(root: Path, transform: Transform) -> Any:
    return datasets.VOCDetection(voc(root), transform=transform)


@fake
def VOCSegmentation(root: Path, transform: Transform) -> Any:
    return datasets.VOCSegmentation(voc(root), transform=transform, target_transform=transform)


def cityscapes(root: Path) -> Path:
    """One city, two images with class and instance maps."""
    for n in range(2):
        photo(root / "leftImg8bit" / "train" / "aachen" / f"a_{n}_leftImg8bit.png", (48, 64))
        target = root / "gtFine" / "train" / "aachen"
        photo(target / f"a_{n}_gtFine_labelIds.png", (48, 64), "L")
        ids = np.zeros(
            (48, 64), np.uint8
        )  # the real ones go beyond 255, which torchvision 0.26 with Pillow 13 cannot compare
        ids[10:20, 10:30], ids[25:40, 30:50] = 24, 26
        Image.fromarray(ids).save(target / f"a_{n}_gtFine_instanceIds.png")
    return root


@fake
def Cityscapes(root: Path, transform: Transform) -> Any:
    return datasets.Cityscapes(
        cityscapes(root), target_type="semantic", transform=transform, target_transform=transform
    )


def kitti(root: Path) -> Path:
    """Two images with one and two objects."""
    base = root / "Kitti" / "raw" / "training"
    for n in range(2):
        photo(base / "image_2" / f"{n:06d}.png", (48, 64))
        line = "Car 0.00 0 -1.57 5.0 6.0 40.0 30.0 1.4 1.5 3.7 -16.5 2.4 58.5 -1.59\n"
        text(base / "label_2" / f"{n:06d}.txt", line * (n + 1))
    return root


@fake
def Kitti(root: Path, transform: Transform) -> Any:
    return datasets.Kitti(kitti(root), transform=transform)


def pets(root: Path) -> Path:
    """Two cats with trimaps."""
    base = root / "oxford-iiit-pet"
    for n in (1, 2):
        photo(base / "images" / f"Abyssinian_{n}.jpg", (48, 64))
        photo(base / "annotations" / "trimaps" / f"Abyssinian_{n}.png", (48, 64), "P")
    text(base / "annotations" / "trainval.txt", "Abyssinian_1 1 1 1\nAbyssinian_2 1 1 1\n")
    return root


@fake
def OxfordIIITPet(root: Path, transform: Transform) -> Any:
    return datasets.OxfordIIITPet(pets(root), transform=transform)


@fake
def SBDataset(root: Path, transform: Transform) -> Any:
    from scipy.io import savemat

    text(root / "train.txt", "0\n1\n")
    (root / "cls").mkdir()
    for n in range(2):
        photo(root / "img" / f"{n}.jpg")
        classes = np.empty((1, 1), dtype=[("Segmentation", "O")])
        classes[0, 0]["Segmentation"] = rng.integers(0, 20, (37, 49), dtype=np.uint8)
        savemat(root / "cls" / f"{n}.mat", {"GTcls": classes})

    def both(image, target):
        return (transform(image), transform(target))

    return datasets.SBDataset(root, mode="segmentation", transforms=both)


@fake
def PhotoTour(root: Path, transform: Transform) -> Any:
    base = root / "liberty"
    photo(base / "patches0000.bmp", (128, 128), "L")
    text(base / "info.txt", "0 0\n1 0\n2 0\n3 0\n")
    text(base / "m50_100000_100000_0.txt", "0 0 0 1 0 0 0\n2 0 0 3 1 0 0\n")

    def picture(patch):
        return transform(Image.fromarray(patch.numpy()))  # as torchvision's own docs: it gives tensors

    return datasets.PhotoTour(root, "liberty", transform=picture)
