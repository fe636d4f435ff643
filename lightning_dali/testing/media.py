"""Small pictures and tones whose content says which sample they are, and the way back from a batch. Runs anywhere."""

from __future__ import annotations

import os
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_dali.failures import check_choice

_FORMATS = {"png": ("png", {}), "jpeg": ("jpg", {"quality": 95})}
_SHADES = 64
"""Values that a channel can take: 0, 4, ..., 252, far enough apart to survive JPEG."""

# -- images ----------------------------------------------------------------------------------------------------------


def make_images(
    folder: str | os.PathLike[str], n: int, *, format: str = "png", size: int = 48, classes: int | None = None
) -> list[Path]:
    """Writes `n` solid pictures whose colour is their number, for `recover_ids`.

    Sample `i` has red `4 * (i % 64)`, green `4 * (i // 64)`, blue 0.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many, up to 4,096.
        format: "png" is exact, "jpeg" (quality 95) is within 2 levels.
        size: Height and width.
        classes: None writes into the folder itself. A number makes as many class folders, and sample `i` goes into
            `i % classes`: with `classes=n` torchvision's `ImageFolder` gives sample `i` at index `i` with label `i`.

    Returns:
        The files, sample 0 first.
    """
    check_choice("format", format, _FORMATS)
    if not 0 <= n <= _SHADES**2:
        raise ValueError(f"n: got {n}; allowed: 0 to {_SHADES**2} colours that can be told apart; do: make fewer")
    if classes is not None and classes < 1:
        raise ValueError(f"classes: got {classes}; allowed: None or at least 1; do: pass classes=n for one each")
    ending, options = _FORMATS[format]
    paths = []
    for i in range(n):
        parent = Path(folder) if classes is None else Path(folder) / f"{i % classes:05d}"
        parent.mkdir(parents=True, exist_ok=True)
        paths.append(parent / f"{i:05d}.{ending}")
        colour = (4 * (i % _SHADES), 4 * (i // _SHADES), 0)
        Image.new("RGB", (size, size), colour).save(paths[-1], format=format, **options)
    return paths


def make_photos(
    folder: str | os.PathLike[str],
    n: int,
    *,
    format: str = "jpeg",
    sizes: Sequence[tuple[int, int]] = ((301, 453), (453, 301), (97, 129), (375, 500), (223, 225), (333, 111)),
    seed: int = 0,
) -> list[Path]:
    """Writes `n` smooth random pictures, photo-like enough for comparing pixels: soft shapes, a ramp, a little grain.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many.
        format: "jpeg" (quality 95, chroma at half resolution as cameras do) or "png".
        sizes: (H, W), taken in turn; odd ones by default, since that is where rounding shows.
        seed: Of the shapes.

    Returns:
        The files, sample 0 first.
    """
    check_choice("format", format, _FORMATS)
    ending, options = _FORMATS[format]
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(n):
        paths.append(Path(folder) / f"{i:05d}.{ending}")
        _photo(*sizes[i % len(sizes)], np.random.default_rng((seed, i))).save(paths[-1], format=format, **options)
    return paths


def _photo(height: int, width: int, random: np.random.Generator) -> Image.Image:
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    shapes = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    ramp = np.linspace(-40, 40, width, dtype=np.float32)[None, :, None]
    grain = random.normal(0, 3, (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(shapes + ramp + grain, 0, 255).astype(np.uint8))


@dataclass
class IndexedImages:
    """A map-style dataset of image files whose label is the index: `(image, i)`.

    It opens files as most datasets do, with `PIL.Image.open(path).convert("RGB")`.
    """

    paths: Sequence[str | os.PathLike[str]]
    """The files, sample 0 first, as the makers return them."""
    transform: Callable[[Any], Any] | None = None
    """Applied to the image, as in torchvision's datasets."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = Image.open(self.paths[index]).convert("RGB")
        return image if self.transform is None else self.transform(image), index


def recover_ids(
    batch: Any, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None, scale: float | None = None
) -> list[int]:
    """Which samples of `make_images` a batch holds.

    Args:
        batch: `(B, 3, H, W)`, or a list of `(3, H, W)`, on any device.
        mean: What was subtracted a channel, if it was normalised.
        std: What it was divided by.
        scale: What white is in the batch's own numbers before `mean` and `std`: by default 1 for floats, 255 else.
    """
    ids = []
    for image in batch:
        pixels = _array(image)
        white = scale or (1 if pixels.dtype.kind == "f" else 255)
        channels = pixels.reshape(3, -1).mean(axis=1, dtype=np.float64)
        channels = channels * np.asarray(1 if std is None else std) + np.asarray(0 if mean is None else mean)
        red, green, _ = np.rint(channels * (255 / white) / 4)
        ids.append(int(red) + _SHADES * int(green))
    return ids


def _array(value: Any) -> np.ndarray[Any, Any]:
    """An array or a tensor on any device as an array; bfloat16, which NumPy lacks, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    return np.asarray(value)


# -- audio -----------------------------------------------------------------------------------------------------------


def make_wavs(folder: str | os.PathLike[str], n: int, *, sample_rate: int = 16_000) -> list[Path]:
    """Writes `n` mono 16-bit tones whose pitch is their number, for `recover_wav_ids`.

    Sample `i` is a sine of `200 + 20 * i` Hz and lasts `0.5 + 0.1 * (i % 7)` seconds.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many; the highest pitch must stay below half of `sample_rate`.
        sample_rate: In Hz.

    Returns:
        The files, sample 0 first.
    """
    if n and 2 * (200 + 20 * (n - 1)) >= sample_rate:
        raise ValueError(
            f"n: got {n}; allowed: pitches below {sample_rate / 2:g} Hz; do: make fewer or raise sample_rate"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(n):
        length = round((0.5 + 0.1 * (i % 7)) * sample_rate)
        tone = 0.5 * np.sin(2 * np.pi * (200 + 20 * i) * np.arange(length) / sample_rate)
        paths.append(Path(folder) / f"{i:05d}.wav")
        with wave.open(str(paths[-1]), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate)
            file.writeframes(np.rint(tone * 32767).astype("<i2").tobytes())
    return paths


def recover_wav_ids(waves: Any, *, sample_rate: int = 16_000) -> list[int]:
    """Which samples of `make_wavs` these are.

    Args:
        waves: Several of `(S,)` or `(1, S)`, with or without padding by zeros.
        sample_rate: Theirs, in Hz.
    """
    ids = []
    for samples in map(_array, waves):
        size = 8 * samples.size  # padding by zeros finds the peak between two bins
        peak = float(np.argmax(np.abs(np.fft.rfft(samples.reshape(-1), size)))) * sample_rate / size
        ids.append(round((peak - 200) / 20))
    return ids
