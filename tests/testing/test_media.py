"""The makers' media can be read back."""

import io
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_dali.testing import (
    IndexedImages,
    make_images,
    make_photos,
    make_wavs,
    recover_ids,
    recover_wav_ids,
)

TO_TENSOR = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["png", "jpeg"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_ids_come_back(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    paths = make_images(tmp_path, 131, format=format)
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(dtype, scale=True)])
    data = IndexedImages(paths, transform)
    batch = torch.stack([image for image, _ in (data[i] for i in range(len(data)))])
    assert batch.shape == (131, 3, 48, 48)
    assert recover_ids(batch) == list(range(131))
    assert recover_ids(list(batch)) == list(range(131))


def test_ids_come_back_from_normalised_batches(tmp_path: Path) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = IndexedImages(make_images(tmp_path, 70), v2.Compose([TO_TENSOR, v2.Normalize(mean, std)]))
    batch = torch.stack([data[i][0] for i in range(70)])
    assert recover_ids(batch, mean=mean, std=std) == list(range(70))
    assert recover_ids(batch.numpy(), mean=mean, std=std) == list(range(70))


def test_the_last_colour_comes_back() -> None:
    pixels = np.broadcast_to(np.array([252, 252, 0], np.uint8)[:, None, None], (1, 3, 8, 8))
    assert recover_ids(pixels) == [4095]
    assert recover_ids(pixels.astype(np.float32), scale=255) == [4095]


def test_image_folder_labels_are_the_ids(tmp_path: Path) -> None:
    paths = make_images(tmp_path, 70, classes=70)
    folder = ImageFolder(str(tmp_path), TO_TENSOR)
    assert [Path(path) for path, _ in folder.samples] == paths
    assert [label for _, label in folder.samples] == list(range(70))
    assert recover_ids([image for image, _ in folder]) == list(range(70))


def test_image_folder_of_few_classes(tmp_path: Path) -> None:
    make_images(tmp_path, 10, classes=3)
    folder = ImageFolder(str(tmp_path), TO_TENSOR)
    assert [recover_ids([image])[0] % 3 for image, _ in folder] == [label for _, label in folder]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 4097}, "n: got 4097; allowed: 0 to 4096"),
        ({"n": -1}, "n: got -1; allowed: 0 to 4096"),
        ({"n": 1, "format": "jpg"}, "format: got 'jpg'; allowed: 'png', 'jpeg'; do: .*format='jpeg'"),
        ({"n": 1, "classes": 0}, "classes: got 0; allowed: None or at least 1"),
    ],
)
def test_make_images_refuses(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_images(tmp_path, **arguments)  # type: ignore[arg-type]


def test_photos_are_smooth_odd_and_repeatable(tmp_path: Path) -> None:
    paths = make_photos(tmp_path / "a", 6)
    again = make_photos(tmp_path / "b", 6)
    other = make_photos(tmp_path / "c", 6, seed=1)
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    assert all(one.read_bytes() != two.read_bytes() for one, two in zip(paths, other, strict=True))
    images = [np.asarray(Image.open(path), np.float32) for path in paths]
    assert [image.shape for image in images][:3] == [(301, 453, 3), (453, 301, 3), (97, 129, 3)]
    for image in images:
        assert np.abs(np.diff(image, axis=1)).mean() < 8  # of 255, between neighbours
        assert image.std() > 15


# -- audio -----------------------------------------------------------------------------------------------------------


def test_tones_come_back_padded_or_not(tmp_path: Path) -> None:
    paths = make_wavs(tmp_path, 21)
    tones = []
    for i, path in enumerate(paths):
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
            assert file.getnframes() == round((0.5 + 0.1 * (i % 7)) * 16_000)
            tones.append(np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768)
    assert recover_wav_ids(tones) == list(range(21))
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(tone) for tone in tones], batch_first=True)
    assert recover_wav_ids(padded) == list(range(21))
    assert recover_wav_ids(padded[:, None]) == list(range(21))
    with pytest.raises(ValueError, match="n: got 500; allowed: pitches below 8000 Hz"):
        make_wavs(tmp_path, 500)


def test_testing_needs_no_torch(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import lightning_dali.testing, sys; print({'torch', 'nvidia.dali', 'lightning'} & set(sys.modules))"
    assert run_script(code)[1] == "set()\n"


def test_indexed_images_open_as_datasets_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `PIL.Image.open`, looked up when called: that is where capture sits."""
    data = IndexedImages(make_images(tmp_path, 3))
    assert [label for _, label in (data[i] for i in range(3))] == [0, 1, 2]
    seen = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda path: seen.append(path) or real(io.BytesIO(path.read_bytes())))
    image, label = data[2]
    assert (image.mode, image.size, label, seen) == ("RGB", (48, 48), 2, [data.paths[2]])
