"""`explain`: which step runs where, what was materialised, sizes; and that looking changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from lightning_dali import ImageDataModule
from lightning_dali.testing import IndexedImages, make_photos

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
FINISH = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"), 8, sizes=((60, 80), (80, 60)))


def datamodule(paths: list[Path], *transforms: Any, **options: Any) -> ImageDataModule:
    options = {"batch_size": 4, "num_workers": 0, "device": "cpu", **options}
    return ImageDataModule(train_dataset=IndexedImages(paths, v2.Compose([*transforms, *FINISH])), **options)


def steps(told: Any) -> dict[str, Any]:
    return {step.name: step for graph in told.fields[0].graphs for step in graph}


def test_head_tail_and_sizes(paths: list[Path]) -> None:
    told = datamodule(paths, v2.RandomResizedCrop(32), v2.RandomApply([v2.ColorJitter(hue=0.1)], p=0.5)).explain()
    found = steps(told)
    assert found["decode"].where == "DALI" and found["resize (bilinear, antialias)"].where == "DALI"
    assert found["adjust_hue"].where == "batched, on the device"
    assert found["adjust_hue"].sometimes and not found["normalize"].sometimes
    assert told.fields[0].normalised == (pytest.approx(tuple(MEAN)), pytest.approx(tuple(STD)))
    image, label = told.outputs
    assert (image.shape, image.dtype, image.nbytes) == ((4, 3, 32, 32), "float32", 4 * 3 * 32 * 32 * 4)
    assert (label.shape, label.nbytes) == ((4,), 32)
    assert told.device_bytes == (image.nbytes + label.nbytes) * (told.prefetch + told.depth + 1)
    sizes = [path.stat().st_size for path in paths[:2]]
    assert told.fields[0].encoded_bytes == sum(sizes) / 2
    assert told.problem is None and not told.materialised
    text = str(told)
    assert "field '0'" in text and "in flight" in text and "adjust_hue" in text


def test_what_needs_pixels_is_named(paths: list[Path]) -> None:
    told = datamodule(paths, v2.Resize((32, 32)), v2.ToImage(), v2.Lambda(lambda image: image.flip(0))).explain()
    assert any(reason == "Lambda" for _, reason in told.materialised), told.materialised
    assert "materialised" in str(told) and told.outputs[0].shape == (4, 3, 32, 32)


def test_looking_changes_nothing(paths: list[Path]) -> None:
    """Neither the position nor the random state; the next pass begins where it would have."""
    seen, looked = datamodule(paths, v2.RandomResizedCrop(32)), datamodule(paths, v2.RandomResizedCrop(32))
    state = torch.get_rng_state()
    looked.setup("fit")
    looked.explain()
    assert torch.equal(state, torch.get_rng_state())
    for ours, theirs in zip(looked.train_dataloader(), seen.train_dataloader(), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_a_bad_file_is_a_problem_not_an_exception(paths: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"nothing")
    told = datamodule([broken, *paths], v2.Resize((32, 32))).explain()
    assert told.problem is not None and "broken.jpg" in told.problem and "problem: " in str(told)


def test_a_stage_without_dataset_says_which_there_are(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="stage is 'val': the datamodule has a dataset for 'train'. Pass val_dataset"):
        datamodule(paths).explain("val")
