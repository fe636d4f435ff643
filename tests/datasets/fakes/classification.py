"""Datasets of a folder or a list of pictures with labels, attributes or captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets

from tests.datasets.fakes.files import Transform, fake, folders, photo, text


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
