"""Pixels of a batch against PyAV and torchvision's transforms under the same seed; the same test for every decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from lightning_dali import ClipSampler
from tests.video.clips import SEED, Videos, batches, datamodule, eager, make_scene

CLIP = ClipSampler(4, stride=3)
EPOCHS = 1
MEAN, STD = [0.43, 0.39, 0.38], [0.22, 0.22, 0.21]
FLOAT = v2.ToDtype(torch.float32, scale=True)
FINISH = [FLOAT, v2.Normalize(MEAN, STD)]
BY_DALI = {
    "Kinetics training": v2.Compose([v2.RandomResizedCrop(80), v2.RandomHorizontalFlip(), *FINISH]),
    "Kinetics evaluation": v2.Compose([v2.Resize(90), v2.CenterCrop(80), *FINISH]),
    "no float": v2.Compose([v2.Resize((60, 80)), v2.RandomCrop(56)]),
    "float first": v2.Compose([FLOAT, v2.Resize((60, 80)), v2.RandomCrop(56), v2.Normalize(MEAN, STD)]),
    "much smaller": v2.Compose([v2.Resize((32, 40)), FLOAT]),
    "a window that sticks out": v2.Compose([v2.RandomCrop(180, pad_if_needed=True, fill=9), v2.Resize(77), *FINISH]),
    "nothing": None,
    "bicubic": v2.Compose([v2.RandomResizedCrop(80, interpolation=InterpolationMode.BICUBIC), FLOAT]),
}
ON_DEVICE = {
    "jitter": v2.Compose([v2.Resize((72, 88)), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), *FINISH]),
    "RandAugment": v2.Compose([v2.RandomResizedCrop(80), v2.RandAugment(), v2.RandomHorizontalFlip(), *FINISH]),
    "blur, gray, rotation": v2.Compose(
        [v2.GaussianBlur(5), v2.RandomGrayscale(0.5), v2.RandomRotation(20), v2.Resize((72, 80)), FLOAT]
    ),
    "erasing": v2.Compose([v2.Resize((72, 80)), *FINISH, v2.RandomErasing(1.0)]),
    "subsampling": v2.Compose([v2.UniformTemporalSubsample(3), v2.Resize((72, 80)), FLOAT]),
}  # fmt: skip
TOLERANCE = {"jitter": 1.0, "RandAugment": 1.0, "blur, gray, rotation": 1.0, "a window that sticks out": 1.0}
"""Mean, in 255ths, where rounding once more costs more than one part of one."""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("scenes")
    sizes = [(160, 120), (120, 160), (134, 106), (200, 112)]
    return [
        make_scene(folder / f"{n}.mp4", width=width, height=height, seed=n, num_frames=16)
        for n, (width, height) in enumerate(sizes)
    ]


def levels(found: torch.Tensor, expected: torch.Tensor, transform: Any) -> torch.Tensor:
    """Absolute difference in 255ths."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    steps = transform.transforms if isinstance(transform, v2.Compose) else [transform]
    scale = torch.ones(3) if found.dtype == torch.uint8 else torch.full((3,), 255.0)
    if any(isinstance(step, v2.Normalize) for step in steps):
        scale = scale * torch.tensor(STD)
    return (found.float() - expected.float()).abs() * scale[:, None, None]


@pytest.mark.parametrize("name", [*BY_DALI, *ON_DEVICE])
def test_batches_are_what_torchvision_would_have_made(name: str, scenes: list[Path], tmp_path: Path) -> None:
    transform = {**BY_DALI, **ON_DEVICE}[name]
    options = {"ragged": "list"} if name in ("nothing", "no float") else {}
    dm = datamodule(Videos(scenes), tmp_path, stage="train", clip=CLIP, train_transform=transform, **options)
    loader = dm.train_dataloader()
    seen = 0
    for epoch in range(EPOCHS):
        for clips, labels in loader:
            for clip, index in zip(clips, labels.tolist(), strict=True):
                off = levels(clip, eager(str(scenes[index]), CLIP, transform, index, epoch=epoch), transform)
                assert off.mean() < TOLERANCE.get(name, 0.8) and off.quantile(0.99) < 4, (index, epoch, off.mean())
                seen += 1
    assert seen == EPOCHS * len(scenes)
    assert loader.trace().notes == []  # nothing was decoded because a transform asked for pixels
    dm.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_make_the_same_batches_as_the_process_itself(method: str, scenes: list[Path], tmp_path: Path) -> None:
    transform = BY_DALI["Kinetics training"]
    passes = []
    for workers in (0, 2):
        options: dict[str, Any] = {"num_workers": workers, "train_transform": transform}
        context = method if workers else None
        found = batches(Videos(scenes), tmp_path, stage="train", clip=CLIP, multiprocessing_context=context, **options)
        passes.append(found)
    for (here, labels), (there, others) in zip(*passes, strict=True):
        assert torch.equal(here, there) and torch.equal(labels, others)


@pytest.mark.gpu
@pytest.mark.parametrize("decoder", ["cpu", "nvdec", "dali", "auto"])
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_decoders_agree_on_the_gpu(decoder: str, codec: str, tmp_path: Path) -> None:
    """Chroma is upsampled differently by each decoder: means agree, edges less."""
    if decoder in ("nvdec", "auto"):
        pytest.importorskip("PyNvVideoCodec")
    sizes = [(320, 256), (340, 256), (640, 360)]
    paths = [
        make_scene(tmp_path / f"{n}.mp4", codec=codec, width=width, height=height, seed=n)
        for n, (width, height) in enumerate(sizes)
    ]
    transform = BY_DALI["Kinetics training"]
    found = batches(
        Videos(paths), tmp_path, stage="train", batch_size=3, clip=CLIP, train_transform=transform, decoder=decoder,
        device="cuda:0", num_workers=2,
    )  # fmt: skip
    ((clips, labels),) = found
    assert clips.device.type == "cuda"
    for clip, index in zip(clips.cpu(), labels.tolist(), strict=True):
        off = levels(clip, eager(str(paths[index]), CLIP, transform, index), transform)
        assert off.mean() < (1 if decoder == "cpu" else 3), (index, off.mean())
        assert off.quantile(0.99) < (4 if decoder == "cpu" else 12), index


def test_the_seed_is_the_runs(scenes: list[Path], tmp_path: Path) -> None:
    one, two = (
        batches(Videos(scenes), tmp_path, stage="train", clip=CLIP, train_transform=BY_DALI["much smaller"], seed=seed)
        for seed in (SEED, SEED + 1)
    )
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
