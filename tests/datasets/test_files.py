"""Files of every kind, through the real engine: what PIL and the dataset's own conversion give, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from lightning_dali.failures import BadSampleError
from lightning_dali.testing import IndexedImages
from tests.datasets.same import check_same
from tests.graph.vocabulary import delivered

MEDIA = Path(__file__).parents[3] / "shared" / "media" / "images"
TRAIN = v2.Compose(
    [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
)


def _picture() -> Image.Image:
    coarse = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((83, 61), Image.Resampling.BICUBIC)


def _rotated() -> Any:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _write(folder: Path) -> dict[str, Path]:
    """One file of each kind, by name."""
    rgb = _picture()
    gray, alpha = rgb.convert("L"), rgb.convert("L").point(lambda value: 0 if value < 128 else value)
    deep = (1000 * (np.arange(61 * 83).reshape(61, 83) % 64) + 5).astype(np.uint16)
    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "baseline.jpg": (rgb, {"quality": 90}),
        "progressive.jpg": (rgb, {"quality": 90, "progressive": True}),
        "full_chroma.jpg": (rgb, {"quality": 90, "subsampling": 0}),
        "gray.jpg": (gray, {}),
        "cmyk.jpg": (rgb.convert("CMYK"), {}),
        "turned.jpg": (rgb, {"exif": _rotated()}),
        "rgb.png": (rgb, {}),
        "rgba.png": (Image.merge("RGBA", (*rgb.split(), alpha)), {}),
        "palette.png": (rgb.convert("P"), {}),
        "one_bit.png": (gray.convert("1"), {}),
        "gray.png": (gray, {}),
        "gray_alpha.png": (Image.merge("LA", (gray, alpha)), {}),
        "sixteen.png": (Image.fromarray(deep), {}),
        "rgb.bmp": (rgb, {}),
        "animated.gif": (rgb.convert("P"), {}),
        "rgb.tif": (rgb, {}),
        "float.tif": (Image.fromarray(np.asarray(gray, np.float32) / 255), {}),
        "rgb.ppm": (rgb, {}),
    }
    for name, feature in (("rgb.webp", "webp"), ("rgb.jp2", "jpg_2000"), ("rgb.avif", "avif")):
        if features.check(feature):
            kinds[name] = (rgb, {})
    for name, (image, options) in kinds.items():
        image.save(folder / name, **options)
    (folder / "misnamed.jpg").write_bytes((folder / "rgb.png").read_bytes())
    return {name: folder / name for name in [*kinds, "misnamed.jpg"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _write(tmp_path_factory.mktemp("files"))


def test_a_folder_of_odd_files_in_one_batch(files: dict[str, Path]) -> None:
    """`convert("RGB")`, as folder datasets do: every file is three channels, equal to PIL's."""
    eight_bits = [path for name, path in files.items() if name not in ("sixteen.png", "float.tif")]
    request = check_same(IndexedImages(eight_bits, TRAIN))
    assert not request.notes
    assert len(request.lanes) == 1, "all in one graph: what DALI cannot decode travels as pixels beside the files"


@pytest.mark.parametrize("mode", ["L", "RGB", None])
def test_each_file_alone_in_each_mode(files: dict[str, Path], mode: str | None) -> None:
    """In the mode that the file has (None), too: two or four channels are delivered as torchvision would."""
    for name, path in files.items():
        if mode is not None and name in ("sixteen.png", "float.tif"):
            continue

        class One:
            def __len__(self) -> int:
                return 1

            def __getitem__(self, index: int, path: Path = path) -> Any:
                image = Image.open(path)
                return F.to_image(image if mode is None else image.convert(mode)), path.name

        check_same(One(), mean=0.01, p99=1)


def test_orientation_is_the_datasets_business(files: dict[str, Path]) -> None:
    """PIL does not turn by EXIF, so neither does the engine; a dataset that does is followed."""
    from PIL import ImageOps

    plain, _ = delivered(IndexedImages([files["turned.jpg"]], v2.ToImage()), 1)
    assert plain[0].shape == (1, 3, 61, 83)

    class Turned(IndexedImages):
        def __getitem__(self, index: int) -> Any:
            return v2.functional.to_image(ImageOps.exif_transpose(Image.open(self.paths[index]))), index

    assert not check_same(Turned([files["turned.jpg"]]), mean=0.01, p99=1).notes
    assert delivered(Turned([files["turned.jpg"]]), 1)[0][0].shape == (1, 3, 83, 61)


def test_sixteen_bits_and_floats_keep_their_values(files: dict[str, Path]) -> None:
    class Deep:
        names = ("sixteen.png", "float.tif")

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return {self.names[index]: F.to_image(Image.open(files[self.names[index]]))}

    for index in range(2):

        class One(Deep):
            def __len__(self) -> int:
                return 1

            def __getitem__(self, _: int, index: int = index) -> Any:
                return super().__getitem__(index)

        batch, _ = delivered(One(), 1)
        (found,) = batch.values()
        wanted = np.asarray(Image.open(files[Deep.names[index]]))
        np.testing.assert_array_equal(np.asarray(found[0, 0]), wanted)
        assert wanted.max() > 60000 or found.dtype == torch.float32


@pytest.mark.parametrize("name", ["sixteen.png", "float.tif"])
def test_narrowing_is_never_silent(files: dict[str, Path], name: str) -> None:
    """PIL's `convert("RGB")` clips 16 bits to 255; a batch of white is not what anybody wants."""
    with pytest.raises(BadSampleError, match=rf"sample 0 .*{name}.*would narrow it to 8 bits.*keep the mode"):
        delivered(IndexedImages([files[name]], TRAIN), 1)


@pytest.mark.skipif(not MEDIA.is_dir(), reason="no shared media beside the repository")
def test_real_photographs() -> None:
    paths = sorted(path for path in MEDIA.iterdir() if path.suffix not in (".md", ".psd"))
    check_same(IndexedImages(paths, TRAIN))
    assert len(paths) > 10
