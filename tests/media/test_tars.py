"""`TarSamples`: every sample of every tar, by index, also in workers; through the datamodule the right pictures."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from lightning_dali import ImageDataModule
from lightning_dali.media import MediaError, TarSamples
from lightning_dali.testing import make_images, recover_ids


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tars")
    images = make_images(folder / "images", 12)
    paths = [folder / "a.tar", folder / "b.tar"]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for index in range(number * 6, number * 6 + 6):
                for ending, data in (("jpg", images[index].read_bytes()), ("cls.txt", str(index).encode())):
                    member = tarfile.TarInfo(f"part/{index:03d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def pair(files: dict[str, Any]) -> Any:
    return files["jpg"], int(files["cls.txt"])


def test_samples_by_index(tars: list[Path]) -> None:
    dataset = TarSamples(tars)
    assert len(dataset) == 12
    for index in (11, 0, 6):
        assert dataset[index]["__key__"] == f"part/{index:03d}" and dataset[index]["cls.txt"] == str(index).encode()
    assert pickle.loads(pickle.dumps(dataset))[3] == dataset[3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_datamodule_on_tars(tars: list[Path], num_workers: int) -> None:
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    dm = ImageDataModule(
        train_dataset=TarSamples(tars, pair),
        train_transform=transform,
        batch_size=4,
        num_workers=num_workers,
        device="cpu",
    )
    dm.setup("fit")
    seen = []
    for images, ids in dm.train_dataloader():
        assert recover_ids(images) == ids.tolist()
        seen += ids.tolist()
    assert sorted(seen) == list(range(12)) != seen
    dm.close()


def test_what_is_cut_off_or_no_tar(tars: list[Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar"
    cut.write_bytes(tars[0].read_bytes())
    dataset = TarSamples([cut])
    with cut.open("r+b") as stream:
        stream.truncate(520)
    with pytest.raises(MediaError, match=r"of \d+ bytes of part/000.jpg") as caught:
        dataset[0]
    assert caught.value.path == str(cut)
    (tmp_path / "no.tar").write_bytes(b"x" * 2000)
    with pytest.raises(ValueError, match="no.tar: .*expected an uncompressed tar"):
        TarSamples([tmp_path / "no.tar"])
