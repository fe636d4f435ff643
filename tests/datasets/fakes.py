"""Made-up files for every image dataset of torchvision: `FAKES` maps a class's name to a function that writes them and opens
the dataset with a transform.

Files are as small and as few as each class allows, in the layout that torchvision's source reads. Where a class compares
checksums with the original archive's, `tests/datasets/test_torchvision.py` lets them pass.
"""

from __future__ import annotations

import bz2
import csv
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import datasets

from lightning_dali.testing import make_photos

Transform = Callable[[Any], Any]
FAKES: dict[str, Callable[[Path, Transform], Any]] = {}


def fake(function: Callable[[Path, Transform], Any]) -> Callable[[Path, Transform], Any]:
    """Registers a maker under its own name."""
    FAKES[function.__name__] = function
    return function


_random = np.random.default_rng(0)
_scratch = 0


def photo(path: Path, size: tuple[int, int] = (37, 49), mode: str = "RGB") -> Path:
    """A small picture, different each time; the ending says the format. Mode "P" holds class numbers 0 to 3 and 255."""
    global _scratch
    _scratch += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "P":
        ys, xs = np.mgrid[: size[0], : size[1]]
        classes = np.where((ys + xs) % 11 == 0, 255, (ys // 9 + xs // 9) % 4).astype(np.uint8)
        image = Image.fromarray(classes).convert("P")
        image.putpalette([value for n in range(256) for value in (n, 255 - n, (7 * n) % 256)])
    else:
        coarse = Image.fromarray(_random.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        image = coarse.resize(size[::-1], Image.Resampling.BICUBIC).convert(mode)
    image.save(path)
    return path


def text(path: Path, content: str) -> Path:
    """A text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def floats(path: Path, *, channels: int = 1, size: tuple[int, int] = (37, 49)) -> Path:
    """A PFM file."""
    values = _random.random((*size, channels), dtype=np.float32) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    header = f"{'PF' if channels == 3 else 'Pf'}\n{size[1]} {size[0]}\n-1.0\n"
    path.write_bytes(header.encode() + values.astype("<f4").tobytes())
    return path


def flow(path: Path, size: tuple[int, int] = (37, 49)) -> Path:
    """A Middlebury .flo file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"PIEH" + struct.pack("<ii", size[1], size[0]) + _random.random((*size, 2), dtype=np.float32).tobytes()
    )
    return path


def deep(path: Path, size: tuple[int, int] = (37, 49)) -> Path:
    """A gray PNG of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_random.integers(300, 60000, size).astype(np.uint16)).save(path)
    return path


def deep_colour(path: Path, size: tuple[int, int] = (37, 49)) -> Path:
    """A colour PNG of 16 bits, which PIL cannot write."""
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = _random.integers(0, 65535, (*size, 3)).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", size[1], size[0], 16, 2, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    )
    return path


def folders(root: Path, ending: str = "jpg", classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    """Two pictures in each class folder."""
    for name in classes:
        for n in range(2):
            photo(root / name / f"{n}.{ending}")
    return root


# -- folders and lists ------------------------------------------------------------------------------------------------


@fake
def ImageFolder(root: Path, transform: Transform) -> Any:
    return datasets.ImageFolder(folders(root), transform)


@fake
def DatasetFolder(root: Path, transform: Transform) -> Any:
    loader = datasets.folder.default_loader
    return datasets.DatasetFolder(folders(root, "png"), loader, extensions=(".png",), transform=transform)


@fake
def ImageNet(root: Path, transform: Transform) -> Any:
    folders(root / "val", "JPEG", ("n01", "n02"))
    torch.save(({"n01": ("tench",), "n02": ("goldfish",)}, ["n01", "n02"]), root / "meta.bin")
    return datasets.ImageNet(root, "val", transform=transform)


@fake
def Imagenette(root: Path, transform: Transform) -> Any:
    folders(root / "imagenette2-160" / "train", "jpeg", ("n01440764", "n02102040"))
    return datasets.Imagenette(root, size="160px", transform=transform)


@fake
def Country211(root: Path, transform: Transform) -> Any:
    folders(root / "country211" / "train")
    return datasets.Country211(root, transform=transform)


@fake
def EuroSAT(root: Path, transform: Transform) -> Any:
    folders(root / "eurosat" / "2750")
    return datasets.EuroSAT(root, transform=transform)


@fake
def RenderedSST2(root: Path, transform: Transform) -> Any:
    folders(root / "rendered-sst2" / "train", "png", ("negative", "positive"))
    return datasets.RenderedSST2(root, transform=transform)


@fake
def GTSRB(root: Path, transform: Transform) -> Any:
    folders(root / "gtsrb" / "GTSRB" / "Training", "ppm", ("00000", "00001"))
    return datasets.GTSRB(root, transform=transform)


@fake
def Caltech101(root: Path, transform: Transform) -> Any:
    photos = root / "caltech101" / "101_ObjectCategories"
    (photos / "BACKGROUND_Google").mkdir(parents=True)
    photo(photos / "ant" / "image_0001.jpg")
    photo(photos / "ant" / "image_0002.jpg", mode="L")  # some of the real ones are gray

    def rgb(image):
        return transform(image.convert("RGB"))

    return datasets.Caltech101(root, transform=rgb)


@fake
def Caltech256(root: Path, transform: Transform) -> Any:
    for n in (1, 2):
        photo(root / "caltech256" / "256_ObjectCategories" / "001.ak47" / f"001_{n:04d}.jpg")
    return datasets.Caltech256(root, transform=transform)


@fake
def CelebA(root: Path, transform: Transform) -> Any:
    base = root / "celeba"
    names = ["000001.jpg", "000002.jpg"]
    for name in names:
        photo(base / "img_align_celeba" / name)
    text(base / "list_eval_partition.txt", "".join(f"{name} 0\n" for name in names))
    text(base / "identity_CelebA.txt", "".join(f"{name} 7\n" for name in names))
    for file, columns in (("list_bbox_celeba", 4), ("list_landmarks_align_celeba", 10), ("list_attr_celeba", 40)):
        header = " ".join(f"c{n}" for n in range(columns))
        rows = "".join(f"{name} {' '.join(['1'] * columns)}\n" for name in names)
        text(base / f"{file}.txt", f"{len(names)}\n{header}\n{rows}")
    return datasets.CelebA(root, target_type=["attr", "identity", "bbox", "landmarks"], transform=transform)


@fake
def CLEVRClassification(root: Path, transform: Transform) -> Any:
    base = root / "clevr" / "CLEVR_v1.0"
    scenes = []
    for n in range(2):
        photo(base / "images" / "train" / f"{n}.png", mode="RGBA")  # the real ones have alpha
        scenes.append({"image_filename": f"{n}.png", "objects": [{}] * (n + 3)})
    text(base / "scenes" / "CLEVR_train_scenes.json", json.dumps({"scenes": scenes}))
    return datasets.CLEVRClassification(root, transform=transform)


@fake
def DTD(root: Path, transform: Transform) -> Any:
    base = folders(root / "dtd" / "dtd" / "images").parent
    text(base / "labels" / "train1.txt", "ant/0.jpg\nbee/1.jpg\n")
    return datasets.DTD(root, transform=transform)


@fake
def FGVCAircraft(root: Path, transform: Transform) -> Any:
    base = root / "fgvc-aircraft-2013b" / "data"
    photo(base / "images" / "1.jpg")
    photo(base / "images" / "2.jpg")
    text(base / "variants.txt", "707\n747\n")
    text(base / "images_variant_trainval.txt", "1 707\n2 747\n")
    return datasets.FGVCAircraft(root, transform=transform)


@fake
def Flickr8k(root: Path, transform: Transform) -> Any:
    rows = ""
    for n in range(2):
        photo(root / f"{n}_abc.jpg")
        rows += f"<tr><td><a href='x'>http://x/photos/{n}/</a></td><td><ul><li>one {n}</li><li>two</li></ul></td></tr>"
    return datasets.Flickr8k(root, str(text(root / "a.html", f"<table>{rows}</table>")), transform=transform)


@fake
def Flickr30k(root: Path, transform: Transform) -> Any:
    lines = [f"{photo(root / f'{n}.jpg').name}#{k}\tcaption {k}" for n in range(2) for k in range(2)]
    return datasets.Flickr30k(root, str(text(root / "a.txt", "\n".join(lines))), transform=transform)


@fake
def Flowers102(root: Path, transform: Transform) -> Any:
    from scipy.io import savemat

    base = root / "flowers-102"
    for n in (1, 2):
        photo(base / "jpg" / f"image_{n:05d}.jpg")
    savemat(base / "imagelabels.mat", {"labels": [5, 6]})
    savemat(base / "setid.mat", {"trnid": [1, 2], "valid": [1, 2], "tstid": [1, 2]})
    return datasets.Flowers102(root, transform=transform)


@fake
def Food101(root: Path, transform: Transform) -> Any:
    base = folders(root / "food-101" / "images").parent
    text(base / "meta" / "train.json", json.dumps({"ant": ["ant/0", "ant/1"], "bee": ["bee/0"]}))
    return datasets.Food101(root, transform=transform)


@fake
def INaturalist(root: Path, transform: Transform) -> Any:
    for n in range(2):
        name = f"{n:05d}_Animalia_Chordata_Aves_P_F_G_{n}"
        photo(root / "2021_train" / name / "a.jpg")
    return datasets.INaturalist(root, target_type=["kingdom", "full"], transform=transform)


def _lfw(root: Path) -> Path:
    base = root / "lfw-py"
    for name in ("Ann", "Bob"):
        for n in (1, 2):
            photo(base / "lfw_funneled" / name / f"{name}_{n:04d}.jpg")
    text(base / "lfw-names.txt", "Ann\t2\nBob\t2\n")
    text(base / "peopleDevTrain.txt", "2\nAnn\t2\nBob\t2\n")
    text(base / "pairsDevTrain.txt", "1\nAnn\t1\t2\nAnn\t1\tBob\t2\n")
    return root


@fake
def LFWPeople(root: Path, transform: Transform) -> Any:
    return datasets.LFWPeople(str(_lfw(root)), "train", transform=transform)


@fake
def LFWPairs(root: Path, transform: Transform) -> Any:
    return datasets.LFWPairs(str(_lfw(root)), "train", transform=transform)


@fake
def Omniglot(root: Path, transform: Transform) -> Any:
    for n in range(2):
        photo(root / "omniglot-py" / "images_background" / "Latin" / "character01" / f"{n}.png", mode="1")
    return datasets.Omniglot(root, transform=transform)


@fake
def Places365(root: Path, transform: Transform) -> Any:
    photo(root / "val_256" / "Places365_val_00000001.jpg")
    photo(root / "val_256" / "Places365_val_00000002.jpg")
    text(root / "categories_places365.txt", "/a/airfield 0\n/b/bakery 1\n")
    text(root / "places365_val.txt", "Places365_val_00000001.jpg 0\nPlaces365_val_00000002.jpg 1\n")
    return datasets.Places365(root, "val", small=True, transform=transform)


@fake
def SBU(root: Path, transform: Transform) -> Any:
    photo(root / "dataset" / "1_a.jpg")
    photo(root / "dataset" / "2_b.jpg")
    text(root / "dataset" / "SBU_captioned_photo_dataset_urls.txt", "http://x/1_a.jpg\nhttp://x/2_b.jpg\n")
    text(root / "dataset" / "SBU_captioned_photo_dataset_captions.txt", "one\ntwo\n")
    return datasets.SBU(root, transform=transform, download=False)


@fake
def StanfordCars(root: Path, transform: Transform) -> Any:
    from scipy.io import savemat

    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    names = ["1.jpg", "2.jpg"]
    for name in names:
        photo(base / "cars_train" / name)
    rows = np.array([(name, n + 1) for n, name in enumerate(names)], dtype=[("fname", "O"), ("class", "i4")])
    savemat(base / "devkit" / "cars_train_annos.mat", {"annotations": rows})
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": np.array(["a", "b"], dtype=object)})
    return datasets.StanfordCars(root, transform=transform)


@fake
def SUN397(root: Path, transform: Transform) -> Any:
    photo(root / "SUN397" / "a" / "abbey" / "sun_1.jpg")
    photo(root / "SUN397" / "b" / "bar" / "sun_2.jpg")
    text(root / "SUN397" / "ClassName.txt", "/a/abbey\n/b/bar\n")
    return datasets.SUN397(root, transform=transform)


@fake
def WIDERFace(root: Path, transform: Transform) -> Any:
    base = root / "widerface"
    for name in ("WIDER_val", "WIDER_test"):
        (base / name).mkdir(parents=True)
    row = "3 4 10 12 0 0 0 0 0 0"
    for n in (1, 2):
        photo(base / "WIDER_train" / "images" / "0--Parade" / f"{n}.jpg")
    text(
        base / "wider_face_split" / "wider_face_train_bbx_gt.txt",
        f"0--Parade/1.jpg\n1\n{row}\n0--Parade/2.jpg\n2\n{row}\n{row}\n",
    )
    return datasets.WIDERFace(root, transform=transform)


# -- in memory --------------------------------------------------------------------------------------------------------


def _cifar(root: Path, name: str, files: tuple[str, ...], labels: str, meta: str, key: str) -> Path:
    base = root / name
    base.mkdir(parents=True)
    for file in files:
        entry = {"data": _random.integers(0, 256, (2, 3072), dtype=np.uint8), labels: [0, 1]}
        (base / file).write_bytes(pickle.dumps(entry))
    (base / meta).write_bytes(pickle.dumps({key: ["a", "b"]}))
    return root


@fake
def CIFAR10(root: Path, transform: Transform) -> Any:
    files = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
    _cifar(root, "cifar-10-batches-py", files, "labels", "batches.meta", "label_names")
    return datasets.CIFAR10(root, train=False, transform=transform)


@fake
def CIFAR100(root: Path, transform: Transform) -> Any:
    _cifar(root, "cifar-100-python", ("train", "test"), "fine_labels", "meta", "fine_label_names")
    return datasets.CIFAR100(root, transform=transform)


def _idx(path: Path, values: np.ndarray[Any, Any], kind: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    big = values.astype(">i4" if kind == 12 else np.uint8)
    path.write_bytes(
        struct.pack(">BBBB", 0, 0, kind, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + big.tobytes()
    )


def _mnist(folder: Path, images: str, labels: str) -> None:
    _idx(folder / images, _random.integers(0, 256, (3, 28, 28)))
    _idx(folder / labels, np.array([3, 1, 2]))


def _mnist_like(name: str) -> Callable[[Path, Transform], Any]:
    def make(root: Path, transform: Transform) -> Any:
        for part in ("train", "t10k"):
            _mnist(root / name / "raw", f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
        return getattr(datasets, name)(root, transform=transform)

    return make


for _name in ("MNIST", "FashionMNIST", "KMNIST"):
    FAKES[_name] = _mnist_like(_name)


@fake
def EMNIST(root: Path, transform: Transform) -> Any:
    prefix = "emnist-letters-train"
    _mnist(root / "EMNIST" / "raw", f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    return datasets.EMNIST(root, "letters", transform=transform)


@fake
def QMNIST(root: Path, transform: Transform) -> Any:
    base = root / "QMNIST" / "raw"
    _idx(base / "qmnist-train-images-idx3-ubyte", _random.integers(0, 256, (3, 28, 28)))
    _idx(base / "qmnist-train-labels-idx2-int", _random.integers(0, 9, (3, 8)), kind=12)
    return datasets.QMNIST(root, transform=transform)


@fake
def STL10(root: Path, transform: Transform) -> Any:
    base = root / "stl10_binary"
    base.mkdir(parents=True)
    for name in ("train", "test", "unlabeled"):
        (base / f"{name}_X.bin").write_bytes(_random.integers(0, 256, 2 * 3 * 96 * 96, dtype=np.uint8).tobytes())
        (base / f"{name}_y.bin").write_bytes(bytes([1, 2]))
    return datasets.STL10(root, transform=transform)


@fake
def SVHN(root: Path, transform: Transform) -> Any:
    from scipy.io import savemat

    root.mkdir(parents=True, exist_ok=True)
    savemat(
        root / "train_32x32.mat", {"X": _random.integers(0, 256, (32, 32, 3, 3), dtype=np.uint8), "y": [[1], [10], [3]]}
    )
    return datasets.SVHN(root, transform=transform)


@fake
def USPS(root: Path, transform: Transform) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{n + 1} " + " ".join(f"{k + 1}:{value:.3f}" for k, value in enumerate(_random.uniform(-1, 1, 256)))
        for n in range(2)
    ]
    with bz2.open(root / "usps.bz2", "wt") as file:
        file.write("\n".join(rows) + "\n")
    return datasets.USPS(root, transform=transform)


@fake
def SEMEION(root: Path, transform: Transform) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    rows = np.concatenate([_random.integers(0, 2, (2, 256)), np.eye(10)[:2]], axis=1)
    np.savetxt(root / "semeion.data", rows)
    return datasets.SEMEION(root, transform=transform, download=False)


@fake
def FER2013(root: Path, transform: Transform) -> Any:
    (root / "fer2013").mkdir(parents=True)
    with open(root / "fer2013" / "train.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["emotion", "pixels"])
        for n in range(2):
            rows.writerow([n, " ".join(map(str, _random.integers(0, 256, 48 * 48)))])
    return datasets.FER2013(root, transform=transform)


@fake
def PCAM(root: Path, transform: Transform) -> Any:
    import h5py

    (root / "pcam").mkdir(parents=True)
    files = datasets.PCAM._FILES["train"]
    with h5py.File(root / "pcam" / files["images"][0], "w") as file:
        file["x"] = _random.integers(0, 256, (2, 96, 96, 3), dtype=np.uint8)
    with h5py.File(root / "pcam" / files["targets"][0], "w") as file:
        file["y"] = np.array([0, 1]).reshape(2, 1, 1, 1)
    return datasets.PCAM(root, transform=transform)


@fake
def LSUN(root: Path, transform: Transform) -> Any:
    import lmdb

    with lmdb.open(str(root / "bedroom_val_lmdb"), map_size=2**22) as db, db.begin(write=True) as transaction:
        for path in make_photos(root / "photos", 2, sizes=((37, 49),)):
            transaction.put(path.name.encode(), path.read_bytes())
    return datasets.LSUN(str(root), ["bedroom_val"], transform=transform)


@fake
def FakeData(root: Path, transform: Transform) -> Any:
    return datasets.FakeData(size=3, image_size=(3, 37, 49), transform=transform)


# -- targets that are images or boxes: tests/datasets/test_targets.py transforms them jointly ---------------------------


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
        classes[0, 0]["Segmentation"] = _random.integers(0, 20, (37, 49), dtype=np.uint8)
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


# -- pairs of images --------------------------------------------------------------------------------------------------


def _pair(transform: Transform) -> Callable[..., Any]:
    return lambda first, second, *rest: (transform(first), transform(second), *rest)


def _stereo(transform: Transform) -> Callable[..., Any]:
    return lambda images, maps, masks: (tuple(map(transform, images)), maps, masks)


@fake
def Sintel(root: Path, transform: Transform) -> Any:
    base = root / "Sintel" / "training"
    for n in range(3):
        photo(base / "clean" / "alley" / f"frame_{n}.png")
    for n in range(2):
        flow(base / "flow" / "alley" / f"frame_{n}.flo")
    return datasets.Sintel(root, transforms=_pair(transform))


@fake
def KittiFlow(root: Path, transform: Transform) -> Any:
    base = root / "KittiFlow" / "training"
    for n in range(2):
        photo(base / "image_2" / f"{n:06d}_10.png")
        photo(base / "image_2" / f"{n:06d}_11.png")
        deep_colour(base / "flow_occ" / f"{n:06d}_10.png")
    return datasets.KittiFlow(root, transforms=_pair(transform))


@fake
def FlyingChairs(root: Path, transform: Transform) -> Any:
    base = root / "FlyingChairs"
    for n in range(2):
        photo(base / "data" / f"{n:05d}_img1.ppm")
        photo(base / "data" / f"{n:05d}_img2.ppm")
        flow(base / "data" / f"{n:05d}_flow.flo")
    text(base / "FlyingChairs_train_val.txt", "1\n1\n")
    return datasets.FlyingChairs(root, transforms=_pair(transform))


@fake
def FlyingThings3D(root: Path, transform: Transform) -> Any:
    base = root / "FlyingThings3D"
    for n in range(3):
        photo(base / "frames_cleanpass" / "TRAIN" / "A" / "0000" / "left" / f"{n}.png")
        for way in ("into_future", "into_past"):
            floats(base / "optical_flow" / "TRAIN" / "A" / "0000" / way / "left" / f"{n}.pfm", channels=3)
    return datasets.FlyingThings3D(root, transforms=_pair(transform))


@fake
def HD1K(root: Path, transform: Transform) -> Any:
    base = root / "hd1k"
    for n in range(3):
        photo(base / "hd1k_input" / "image_2" / f"000000_{n:04d}.png")
        deep_colour(base / "hd1k_flow_gt" / "flow_occ" / f"000000_{n:04d}.png")
    return datasets.HD1K(root, transforms=_pair(transform))


@fake
def CarlaStereo(root: Path, transform: Transform) -> Any:
    for n in range(2):
        base = root / "carla-highres" / "trainingF" / f"scene{n}"
        for side in (0, 1):
            photo(base / f"im{side}.png")
            floats(base / f"disp{side}GT.pfm")
    return datasets.CarlaStereo(root, transforms=_stereo(transform))


@fake
def Kitti2012Stereo(root: Path, transform: Transform) -> Any:
    base = root / "Kitti2012" / "training"
    for n in range(2):
        photo(base / "colored_0" / f"{n:06d}_10.png")
        photo(base / "colored_1" / f"{n:06d}_10.png")
        deep(base / "disp_noc" / f"{n:06d}.png")
    return datasets.Kitti2012Stereo(root, transforms=_stereo(transform))


@fake
def Kitti2015Stereo(root: Path, transform: Transform) -> Any:
    base = root / "Kitti2015" / "training"
    for n in range(2):
        for folder in ("image_2", "image_3"):
            photo(base / folder / f"{n}.png")
        for folder in ("disp_occ_0", "disp_occ_1"):
            deep(base / folder / f"{n}.png")
    return datasets.Kitti2015Stereo(root, transforms=_stereo(transform))


@fake
def Middlebury2014Stereo(root: Path, transform: Transform) -> Any:
    for name in ("Adirondack", "Piano"):
        base = root / "Middlebury2014" / "train" / f"{name}-perfect"
        for side in (0, 1):
            photo(base / f"im{side}.png")
            floats(base / f"disp{side}.pfm")
        photo(base / "im1E.png")
        photo(base / "im1L.png")
    return datasets.Middlebury2014Stereo(root, use_ambient_views=True, transforms=_stereo(transform))


@fake
def CREStereo(root: Path, transform: Transform) -> Any:
    for kind in ("shapenet", "reflective", "tree", "hole"):
        for side in ("left", "right"):
            photo(root / "CREStereo" / kind / f"0_{side}.jpg")
            deep(root / "CREStereo" / kind / f"0_{side}.disp.png")
    return datasets.CREStereo(root, transforms=_stereo(transform))


@fake
def FallingThingsStereo(root: Path, transform: Transform) -> Any:
    base = root / "FallingThings" / "single" / "cup" / "kitchen"
    for n in range(2):
        for side in ("left", "right"):
            photo(base / f"{n}.{side}.jpg")
            deep(base / f"{n}.{side}.depth.png")
    text(base / "_camera_settings.json", json.dumps({"camera_settings": [{"intrinsic_settings": {"fx": 768.2}}]}))
    return datasets.FallingThingsStereo(root, transforms=_stereo(transform))


@fake
def SceneFlowStereo(root: Path, transform: Transform) -> Any:
    base = root / "SceneFlow" / "Monkaa"
    for n in range(2):
        for side in ("left", "right"):
            photo(base / "frames_cleanpass" / "s" / side / f"{n}.png")
            floats(base / "disparity" / "s" / side / f"{n}.pfm")
    return datasets.SceneFlowStereo(root, "Monkaa", transforms=_stereo(transform))


@fake
def SintelStereo(root: Path, transform: Transform) -> Any:
    base = root / "Sintel" / "training"
    for n in range(2):
        for folder in ("final_left", "final_right", "disparities"):
            photo(base / folder / "alley" / f"{n}.png")
        for folder in ("occlusions", "outofframe"):
            photo(base / folder / "alley" / f"{n}.png", mode="L")
    return datasets.SintelStereo(root, transforms=_stereo(transform))


@fake
def InStereo2k(root: Path, transform: Transform) -> Any:
    for n in range(2):
        base = root / "InStereo2k" / "train" / f"{n}"
        for side in ("left", "right"):
            photo(base / f"{side}.png")
            deep(base / f"{side}_disp.png")
    return datasets.InStereo2k(root, transforms=_stereo(transform))


@fake
def ETH3DStereo(root: Path, transform: Transform) -> Any:
    for n in range(2):
        photo(root / "ETH3D" / "two_view_training" / f"s{n}" / "im0.png")
        photo(root / "ETH3D" / "two_view_training" / f"s{n}" / "im1.png")
        truth = root / "ETH3D" / "two_view_training_gt" / f"s{n}"
        floats(truth / "disp0GT.pfm")
        photo(truth / "mask0nocc.png", mode="L")
    return datasets.ETH3DStereo(root, transforms=_stereo(transform))
