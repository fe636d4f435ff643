"""Datasets of pairs of images: optical flow and stereo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchvision import datasets

from tests.datasets.fakes.files import Transform, deep, deep_colour, fake, floats, flow, photo, text


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
