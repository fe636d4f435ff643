"""The transforms of `torchvision.transforms.v2`, each with the samples it is tried on, and how far DALI's result lies from
torchvision's own on the same draws. The table test and `docs/make_vocabulary_table.py` share it.
"""

# Over 300 lines: a table with a row for each of torchvision's transforms.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_dali.fetch import Fetcher
from lightning_dali.graph.spec import Device
from lightning_dali.loader import Loader
from lightning_dali.modalities import ImageModality
from lightning_dali.sampling import EvalPlan, Shard
from lightning_dali.seeding import sample_seed, seeded
from lightning_dali.server import Server
from lightning_dali.structure import leaves

SEED = 3
SIZES = ((61, 83), (83, 61), (70, 96), (64, 64))
"""(H, W) of the test pictures: odd ones, since that is where rounding shows."""
SAMPLES = ("image", "boxes and mask", "keypoints")


@dataclass
class Pictures:
    """Photo-like files, opened as most datasets do, with the targets asked for; `transform` gets image and target."""

    paths: list[Path]
    transform: Callable[..., Any]
    sample: str = "image"

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image: Any = Image.open(self.paths[index]).convert("RGB")
        if self.sample == "image":
            return self.transform(image), index
        return self.transform(image, {**self._target(image.height, image.width), "index": index})

    def _target(self, height: int, width: int) -> dict[str, Any]:
        if self.sample == "keypoints":
            points = torch.tensor([[10.0, 12.0], [40.0, 30.0], [50.0, 55.0]])
            return {"keypoints": tv_tensors.KeyPoints(points, canvas_size=(height, width))}
        boxes = torch.tensor([[5.0, 6.0, 45.0, 40.0], [20.0, 15.0, 58.0, 59.0]])
        ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
            "labels": torch.tensor([1, 2]),
            "mask": tv_tensors.Mask((ys // 16 + xs // 16) % 4),
        }


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    name: str
    """The class, and what is special about this use of it."""
    make: Callable[[], Callable[..., Any]]
    """Makes the transform. It ends in an image or a tensor."""
    interpolates: bool = False
    """Whether values between pixels are computed: DALI's and Pillow's filters then round differently."""
    worker: bool = False
    """Whether it needs pixels in the worker."""
    random: bool = False
    """Whether its values themselves are drawn, so that only their statistics can be compared."""


def _image(*transforms: Any) -> Callable[[], Any]:
    return lambda: v2.Compose([v2.ToImage(), *transforms])


def _float(*transforms: Any) -> Callable[[], Any]:
    return _image(v2.ToDtype(torch.float32, scale=True), *transforms)


BILINEAR, BICUBIC, NEAREST = (v2.InterpolationMode[name] for name in ("BILINEAR", "BICUBIC", "NEAREST"))
LANCZOS = v2.InterpolationMode.LANCZOS
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Fade(v2.Transform):
    """A user's own transform, built from functionals."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"factor": float(torch.rand(())) + 0.5, "angle": float(torch.rand(())) * 20}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, (Image.Image, tv_tensors.Image)):
            return inpt
        return F.adjust_brightness(F.rotate(inpt, params["angle"]), params["factor"])


ENTRIES = [
    Entry("AugMix", v2.AugMix, worker=True),
    *(Entry(f"AutoAugment ({p.value})", lambda p=p: v2.AutoAugment(p)) for p in v2.AutoAugmentPolicy),
    Entry("RandAugment", v2.RandAugment),
    Entry("RandAugment (tensors, bilinear)", _image(v2.RandAugment(interpolation=BILINEAR))),
    Entry("TrivialAugmentWide", v2.TrivialAugmentWide),
    Entry("CenterCrop", lambda: v2.CenterCrop(48)),
    Entry("CenterCrop (larger than the image)", lambda: v2.CenterCrop(90)),
    Entry("FiveCrop", lambda: v2.FiveCrop(40)),
    Entry("TenCrop", lambda: v2.TenCrop(40, vertical_flip=True)),
    Entry("RandomCrop", lambda: v2.RandomCrop(48)),
    Entry("RandomCrop (padding)", lambda: v2.RandomCrop(70, padding=8, pad_if_needed=True, fill=30)),
    Entry("RandomIoUCrop", lambda: v2.RandomIoUCrop()),
    Entry("Pad", lambda: v2.Pad(7, fill=100)),
    Entry("Pad (a colour)", lambda: v2.Pad((3, 5, 7, 9), fill=(10, 20, 30))),
    Entry("Pad (reflect)", lambda: v2.Pad(7, padding_mode="reflect")),
    Entry("RandomZoomOut", lambda: v2.RandomZoomOut(fill=100)),
    Entry("Resize", lambda: v2.Resize(40), interpolates=True),
    Entry("Resize (up)", lambda: v2.Resize(100, max_size=120), interpolates=True),
    Entry("Resize (bicubic)", lambda: v2.Resize((50, 40), interpolation=BICUBIC), interpolates=True),
    Entry("Resize (nearest)", lambda: v2.Resize(40, interpolation=NEAREST)),
    Entry("Resize (nearest, tensors)", _image(v2.Resize(40, interpolation=NEAREST))),
    Entry("Resize (lanczos)", lambda: v2.Resize(40, interpolation=LANCZOS), worker=True),
    Entry("Resize (tensors, no antialias)", _image(v2.Resize(40, antialias=False)), interpolates=True),
    Entry("RandomResizedCrop", lambda: v2.RandomResizedCrop(48), interpolates=True),
    Entry("RandomResizedCrop (floats)", _float(v2.RandomResizedCrop(48), v2.Normalize(MEAN, STD)), interpolates=True),
    Entry("RandomResize", lambda: v2.RandomResize(40, 70), interpolates=True),
    Entry("RandomShortestSize", lambda: v2.RandomShortestSize([40, 50], max_size=70), interpolates=True),
    Entry("ScaleJitter", lambda: v2.ScaleJitter((60, 60)), interpolates=True),
    Entry("RandomHorizontalFlip", v2.RandomHorizontalFlip),
    Entry("RandomVerticalFlip", v2.RandomVerticalFlip),
    Entry("RandomRotation", lambda: v2.RandomRotation(30, fill=128)),
    Entry("RandomRotation (bilinear)", lambda: v2.RandomRotation(30, interpolation=BILINEAR), interpolates=True),
    Entry("RandomRotation (bicubic)", lambda: v2.RandomRotation(30, interpolation=BICUBIC), worker=True),
    Entry("RandomRotation (expand)", lambda: v2.RandomRotation(30, expand=True)),
    Entry(
        "RandomRotation (tensors, bilinear)", _image(v2.RandomRotation(30, interpolation=BILINEAR)), interpolates=True
    ),
    Entry("RandomAffine", lambda: v2.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 10)),
    Entry(
        "RandomAffine (bilinear)",
        lambda: v2.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 10, interpolation=BILINEAR, fill=(1, 2, 3)),
        interpolates=True,
    ),
    Entry("RandomPerspective", lambda: v2.RandomPerspective(p=0.8), interpolates=True),
    Entry("RandomPerspective (tensors)", _image(v2.RandomPerspective(p=0.8)), interpolates=True),
    Entry("ElasticTransform", lambda: v2.ElasticTransform(30.0, 3.0), interpolates=True),
    Entry("ColorJitter", lambda: v2.ColorJitter(0.4, 0.4, 0.4, 0.1)),
    Entry("ColorJitter (tensors)", _image(v2.ColorJitter(0.4, 0.4, 0.4, 0.1))),
    Entry("ColorJitter (floats)", _float(v2.ColorJitter(0.4, 0.4, 0.4, 0.1))),
    Entry("RandomPhotometricDistort", v2.RandomPhotometricDistort),
    Entry("RandomChannelPermutation", v2.RandomChannelPermutation),
    Entry("Grayscale", v2.Grayscale),
    Entry("Grayscale (three channels, tensors)", _image(v2.Grayscale(3))),
    Entry("RandomGrayscale", lambda: v2.RandomGrayscale(0.5)),
    Entry("RGB", v2.RGB),
    Entry("RandomInvert", v2.RandomInvert),
    Entry("RandomPosterize", lambda: v2.RandomPosterize(3)),
    Entry("RandomSolarize", lambda: v2.RandomSolarize(128)),
    Entry("RandomAutocontrast", v2.RandomAutocontrast),
    Entry("RandomEqualize", v2.RandomEqualize),
    Entry("RandomAdjustSharpness", lambda: v2.RandomAdjustSharpness(2.0)),
    Entry("GaussianBlur", lambda: v2.GaussianBlur(5, (0.3, 2.0))),
    Entry("GaussianNoise", _image(v2.GaussianNoise(sigma=0.05)), random=True),
    Entry("JPEG", lambda: v2.JPEG((50, 90))),
    Entry("RandomErasing", _image(v2.RandomErasing(p=0.8, value=[10, 20, 30]))),
    Entry("RandomErasing (random fill)", _float(v2.RandomErasing(p=0.8, value="random"))),
    Entry("ToImage", v2.ToImage),
    Entry("PILToTensor", v2.PILToTensor),
    Entry("ToTensor", v2.ToTensor),
    Entry("ToPILImage", _image(v2.ToPILImage(), v2.Resize(40)), interpolates=True),
    Entry("ToPureTensor", _image(v2.ToPureTensor())),
    Entry("ToDtype", _float()),
    Entry("ToDtype (float16)", _image(v2.ToDtype(torch.float16, scale=True))),
    Entry("ToDtype (unscaled)", _image(v2.ToDtype(torch.float32))),
    Entry("ConvertImageDtype", _image(v2.ConvertImageDtype(torch.float32))),
    Entry("Normalize", _float(v2.Normalize(MEAN, STD))),
    Entry(
        "LinearTransformation",
        lambda: v2.Compose(
            [v2.CenterCrop(8), _float()(), v2.LinearTransformation(torch.eye(192) / 2, torch.zeros(192))]
        ),
        worker=True,
    ),
    Entry(
        "Lambda",
        _image(v2.Lambda(lambda image: image // 2 if isinstance(image, tv_tensors.Image) else image)),
        worker=True,
    ),
    Entry("Identity", v2.Identity),
    Entry("RandomApply", lambda: v2.RandomApply([v2.ColorJitter(0.4), v2.GaussianBlur(3)])),
    Entry(
        "RandomChoice", lambda: v2.RandomChoice([v2.RandomPosterize(3, p=1), v2.RandomRotation(10), v2.CenterCrop(50)])
    ),
    Entry("RandomOrder", lambda: v2.RandomOrder([v2.RandomInvert(), v2.CenterCrop(50), v2.ColorJitter(0.3)])),
    Entry("Transform (a user's subclass)", Fade),
    Entry("ClampBoundingBoxes", v2.ClampBoundingBoxes),
    Entry("ClampKeyPoints", v2.ClampKeyPoints),
    Entry("ConvertBoundingBoxFormat", lambda: v2.ConvertBoundingBoxFormat("CXCYWH")),
    Entry("SanitizeBoundingBoxes", lambda: v2.Compose([v2.RandomIoUCrop(), v2.SanitizeBoundingBoxes()])),
    Entry("SanitizeKeyPoints", lambda: v2.Compose([v2.CenterCrop(40), v2.SanitizeKeyPoints()])),
    Entry("SetClampingMode", lambda: v2.SetClampingMode("hard")),
]
ELSEWHERE = {
    "Transform": "the base class",
    "Compose": "in every recipe",
    "InterpolationMode": "no transform",
    "AutoAugmentPolicy": "no transform",
    "MixUp": "of batches: tests/datamodules",
    "CutMix": "of batches: tests/datamodules",
    "UniformTemporalSubsample": "of videos",
}
"""Names in `torchvision.transforms.v2` that have no line here, and why."""


@dataclass(frozen=True)
class Measured:
    """How far DALI's result is from torchvision's, in 255ths."""

    mean: float
    p99: float
    max: float
    where: str
    """"DALI", "device" (torchvision's or Pillow's arithmetic, batched) or "worker"."""
    notes: tuple[str, ...]
    """What the worker says it needed pixels for."""


@functools.cache
def shared_server(device: int | None) -> Server:
    """One for all transforms: few graphs serve them all, and to build a GPU's decoder takes 2 s."""
    return Server(Device(device, num_threads=2), max_batch_size=16)


def delivered(dataset: Any, size: int, *, server: Server | None = None) -> tuple[Any, Any]:
    """One batch of a whole dataset, through the real engine: the batch, and the request that a worker makes for it.

    Args:
        dataset: Map-style.
        size: Of the batch.
        server: What runs it; None: one for this batch, on the CPU.
    """
    fetcher = Fetcher(dataset=dataset, modality=ImageModality(), seed=SEED, ragged="list")
    device = Device(None, num_threads=2) if server is None else server.device
    loader = Loader(fetcher, EvalPlan(size, size, shard=Shard(0, 1)), device, num_workers=0)
    if server is not None:
        loader.server = server
    try:
        request = loader.fetcher(next(iter(loader.plan.batches(0, start=0))))
        one = iter(loader)
        try:
            return next(one), request
        finally:
            one.close()
    finally:
        loader.close() if server is None else loader.stop()


def expected(dataset: Any, index: int) -> Any:
    """What torchvision itself gives for a sample, under the same draw."""
    with seeded(sample_seed(SEED, 0, index), restore=True):
        return dataset[index]


def measure(make: Callable[[], Any], paths: list[Path], sample: str, *, device: int | None = None) -> Measured | None:
    """Compares a transform's results, sample by sample and field by field; None where torchvision refuses the sample.

    Raises:
        AssertionError: A field differs in size or dtype, or a target in value.
    """
    dataset = Pictures(paths, make(), sample)
    try:
        wanted = [expected(dataset, index) for index in range(len(paths))]
    except (TypeError, ValueError):
        return None
    batch, request = delivered(dataset, len(paths), server=shared_server(device))
    differences = [
        difference
        for row, one in enumerate(wanted)
        for difference in _differences(batch, row, one)
        if difference is not None
    ]
    every = torch.cat(differences)
    return Measured(
        every.mean().item(), every.quantile(0.99).item(), every.max().item(), _where(request), _reasons(request)
    )


def _differences(batch: Any, row: int, wanted: Any) -> Iterator[torch.Tensor | None]:
    for path, leaf in leaves(wanted):
        found = batch
        for key in path:
            found = found[key]
        yield compare(found[row], leaf, where=f"sample {row}, field {path}")


def compare(found: Any, wanted: Any, *, where: str) -> torch.Tensor | None:
    """Differences of an image in 255ths; None for a target, which must be equal."""
    is_image = isinstance(wanted, (Image.Image, tv_tensors.Image)) or (
        type(wanted) is torch.Tensor and wanted.ndim in (3, 4)
    )
    if not is_image:
        assert torch.equal(torch.as_tensor(found).cpu(), torch.as_tensor(wanted)), (where, found, wanted)
        return None
    pixels = F.pil_to_tensor(wanted) if isinstance(wanted, Image.Image) else wanted.as_subclass(torch.Tensor)
    assert (found.shape, found.dtype) == (pixels.shape, pixels.dtype), (where, found.shape, found.dtype, pixels.shape)
    scale = 255.0 if pixels.is_floating_point() else 1.0
    return (found.cpu().double() - pixels.double()).abs().flatten() * scale


def _where(request: Any) -> str:
    if request.notes or not request.lanes:
        return "worker"
    return "device" if any(lane.tail for lane in request.lanes) else "DALI"


def _reasons(request: Any) -> tuple[str, ...]:
    return tuple(note for _, note in request.notes)
