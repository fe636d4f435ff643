"""Where samples come from: wrappers around datasets, other libraries' datasets, bytes, paths and arrays, several files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, read_file, read_image
from torchvision.transforms import functional as F1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_dali.datamodules import ImageDataModule
from lightning_dali.fetch import Fetcher
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.modalities import ImageModality
from lightning_dali.sampling import EvalPlan, Shard
from lightning_dali.testing import make_photos
from tests.datasets.fakes import folders
from tests.datasets.same import check_same

TO_FLOAT = v2.Compose([v2.Resize((32, 40)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 4, sizes=((61, 83), (83, 61), (70, 96), (64, 64)))


class From(Dataset[Any]):
    """Samples by a function of a path."""

    def __init__(self, paths: list[Path], sample: Any) -> None:
        self.paths, self.sample = paths, sample

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.sample(self.paths[index])


# -- datasets around datasets ------------------------------------------------------------------------------------------


class Wrapped(Dataset[Any]):
    """A wrapper that transforms what another dataset gives, as users write it."""

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        image, label = self.dataset[index]
        return {"pixels": self.transform(image), "label": label, "name": f"number {index}"}


def test_nested_wrappers(tmp_path: Path) -> None:
    folder = ImageFolder(folders(tmp_path / "a"), TO_FLOAT)
    parts = random_split(ConcatDataset([folder, Subset(folder, [3, 0])]), [4, 2], torch.Generator().manual_seed(0))
    for dataset in (*parts, Wrapped(Subset(ImageFolder(tmp_path / "a"), [2, 1]), TO_FLOAT)):
        assert not check_same(dataset).notes


# -- what users call in __getitem__ ------------------------------------------------------------------------------------

CALLS: dict[str, Any] = {
    "functionals": lambda path: F.to_dtype(
        F.horizontal_flip(F.resize(F.to_image(Image.open(path)), [32, 40])), torch.float32, scale=True
    ),
    "v1 functionals": lambda path: F1.to_tensor(
        F1.adjust_hue(F1.resize(Image.open(path).convert("RGB"), [32, 40]), 0.1)
    ),
    "PIL methods": lambda path: F.to_image(
        Image.open(path).convert("RGB").crop((3, 5, 50, 45)).transpose(Image.Transpose.ROTATE_90)
    ),
    "PIL resize": lambda path: F.to_image(Image.open(path).resize((40, 32), Image.Resampling.BILINEAR)),
    "PIL rotate": lambda path: F.to_image(Image.open(path).rotate(10, expand=True)),
    "PIL thumbnail": lambda path: F.to_image(_thumbnail(path)),
    "ImageOps": lambda path: F.to_image(ImageOps.exif_transpose(ImageOps.autocontrast(Image.open(path)))),
    "read_image": lambda path: TO_FLOAT(read_image(str(path))),
    "decode_image": lambda path: TO_FLOAT(decode_image(str(path), mode=ImageReadMode.RGB)),
    "decode_image of bytes": lambda path: TO_FLOAT(tv_tensors.Image(decode_image(read_file(str(path))))),
    "float() / 255": lambda path: F.resize(read_image(str(path)).float() / 255, [32, 40]),
    "numpy": lambda path: torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)[
        :, :30, :30
    ],
    "a cut in place": lambda path: _cut_out(F.to_image(Image.open(path))),
    "bytes in memory": lambda path: TO_FLOAT(Image.open(io.BytesIO(path.read_bytes()))),
    "an open file": lambda path: _from_open_file(path),
    "arithmetic": lambda path: (
        F.to_dtype(F.resize(F.to_image(Image.open(path)), [32, 40]), torch.float32, scale=True) * 2 - 1
    ),
    "size, mode and bands": lambda path: _facts(Image.open(path)),
}


def _thumbnail(path: Path) -> Any:
    image = Image.open(path)
    image.thumbnail((40, 40))
    return image


def _cut_out(image: torch.Tensor) -> torch.Tensor:
    image[:, 5:20, 5:20] = 0
    return image


def _from_open_file(path: Path) -> Any:
    with open(path, "rb") as file, Image.open(file) as image:
        return TO_FLOAT(image.convert("RGB"))


def _facts(image: Any) -> dict[str, Any]:
    width, height = image.size
    return {
        "image": TO_FLOAT(image),
        "size": (width, height, image.width, image.height),
        "mode": image.mode,
        "bands": "".join(image.getbands()),
    }


@pytest.mark.parametrize("name", CALLS)
def test_what_users_call(name: str, paths: list[Path]) -> None:
    check_same(From(paths, CALLS[name]))


V1: dict[str, Any] = {
    "train": [v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.5] * 3)],
    "eval": [v1.Resize(40), v1.CenterCrop(32), v1.ToTensor()],
    "jitter": [v1.Resize((32, 32)), v1.ColorJitter(0.4, 0.4, 0.4, 0.1), v1.RandomGrayscale(0.3), v1.ToTensor()],
    "geometry": [v1.Resize((40, 40)), v1.RandomAffine(15, (0.1, 0.1), (0.8, 1.2), 5), v1.RandomPerspective(p=1.0), v1.ToTensor()],
    "padding": [v1.Pad(4), v1.RandomCrop(50, pad_if_needed=True), v1.RandomRotation(20), v1.RandomVerticalFlip(), v1.ToTensor()],
    "policies": [v1.Resize((40, 40)), v1.RandAugment(), v1.TrivialAugmentWide(), v1.ToTensor(), v1.RandomErasing(p=1.0)],
    "autoaugment": [v1.Resize((40, 40)), v1.AutoAugment(), v1.ToTensor()],
    "colour": [v1.CenterCrop(32), v1.RandomInvert(), v1.RandomPosterize(3), v1.RandomSolarize(99), v1.RandomAutocontrast(), v1.RandomEqualize(), v1.RandomAdjustSharpness(2), v1.GaussianBlur(3), v1.PILToTensor(), v1.ConvertImageDtype(torch.float)],
    "choices": [v1.RandomChoice([v1.Resize((32, 32)), v1.RandomCrop(32)]), v1.Resize((32, 32)), v1.RandomApply([v1.ColorJitter(0.3)]), v1.RandomOrder([v1.RandomInvert(), v1.RandomVerticalFlip()]), v1.ToTensor()],
    "five crops": [v1.FiveCrop(32), v1.Lambda(lambda crops: torch.stack([v1.ToTensor()(crop) for crop in crops]))],
}  # fmt: skip


@pytest.mark.parametrize("name", V1)
def test_v1_transforms_run_unmodified(name: str, paths: list[Path]) -> None:
    transform = v1.Compose(V1[name])
    request = check_same(From(paths, lambda path: (transform(Image.open(path).convert("RGB")), path.name)))
    assert not request.notes, request.notes


# -- other libraries ---------------------------------------------------------------------------------------------------


def test_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="pip install 'lightning-dali[datasets]'")
    dataset = timm.data.ImageDataset(
        str(folders(tmp_path)), transform=timm.data.create_transform(32, is_training=False)
    )
    check_same(dataset, p99=8)  # divided by a std of 0.22, one level is 4.4
    augmented = timm.data.create_transform(
        32, is_training=True, auto_augment="rand-m9-mstd0.5", interpolation="bilinear", re_prob=0.5
    )
    check_same(timm.data.ImageDataset(str(folders(tmp_path)), transform=augmented), p99=8)


@pytest.mark.parametrize("decode", [True, False])
def test_hugging_face(decode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    hub = pytest.importorskip("datasets", reason="pip install 'lightning-dali[datasets]'")
    files = make_photos(tmp_path, 3, sizes=((61, 83), (83, 61)))
    table = hub.Dataset.from_dict({"image": [str(file) for file in files], "label": [0, 1, 2]})
    table = table.cast_column("image", hub.Image(decode=decode))

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        opened = (
            rows["image"]
            if decode
            else [Image.open(io.BytesIO(row["bytes"]) if row["bytes"] else row["path"]) for row in rows["image"]]
        )
        return {"pixels": [TO_FLOAT(image.convert("RGB")) for image in opened], "label": rows["label"]}

    request = check_same(table.with_transform(transform))
    assert all(lane.data[0].ndim == 1 for lane in request.lanes), "encoded bytes, decoded on the device"


# -- samples that are not transformed yet ------------------------------------------------------------------------------

RAW: dict[str, Any] = {
    "a path": lambda path: (str(path), 1),
    "a Path": lambda path: {"image": path, "label": 1},
    "bytes": lambda path: (path.read_bytes(), 1),
    "an array": lambda path: (np.asarray(Image.open(path)), 1),
    "a PIL image": lambda path: (Image.open(path), 1),
    "a tensor": lambda path: (read_image(str(path)), 1),
    "a label first": lambda path: (1, str(path)),
}


@pytest.mark.parametrize("name", RAW)
def test_train_transform_is_applied_to_what_the_dataset_gives(name: str, paths: list[Path]) -> None:
    fetcher = Fetcher(From(paths, RAW[name]), ImageModality(), transform=TO_FLOAT)
    loader = Loader(fetcher, EvalPlan(4, 4, shard=Shard(0, 1)), Device(None, num_threads=1))
    (batch,) = list(loader)
    loader.close()
    images = batch["image"] if isinstance(batch, dict) else batch[1 if name == "a label first" else 0]
    wanted = torch.stack([TO_FLOAT(Image.open(path)) for path in paths])
    assert images.shape == wanted.shape and (images - wanted).abs().mean() < 1 / 255


def test_a_sample_without_an_image_says_what_it_has(paths: list[Path]) -> None:
    data = ImageDataModule(
        train_dataset=From(paths, lambda path: ("hello", 1)),
        train_transform=TO_FLOAT,
        batch_size=2,
        num_workers=0,
        device="cpu",
    )
    with pytest.raises(TypeError, match=r"no image to transform.*str, int"):
        next(iter(data.train_dataloader()))
    data.close()
