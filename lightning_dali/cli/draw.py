"""Pictures of what is in a batch: images with boxes and masks, film strips, spectrograms, waves. Runs in the rank.

Everything ends as arrays `(H, W, 3)` of uint8, so that a sheet is pasted of tiles of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

__all__ = ["Tile", "difference", "film", "overlay", "picture", "sheet", "spectrogram", "wave"]

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
TILE = 224
"""Longest side of a picture on the sheet."""
_COLOURS = ((230, 60, 60), (60, 160, 250), (80, 200, 90), (250, 180, 40), (180, 100, 240), (40, 210, 210))
_HEAT = np.array([(0, 0, 4), (81, 18, 124), (183, 55, 121), (252, 137, 97), (252, 253, 191)], np.float32)
"""Five colours of matplotlib's magma, dark to bright."""
_INK, _PAPER = (30, 30, 30), (255, 255, 255)


@dataclass
class Tile:
    """One picture of the sheet with the words below it."""

    pixels: Pixels
    """`(H, W, 3)`."""
    words: str = ""


def picture(image: torch.Tensor, normalised: tuple[Sequence[float], Sequence[float]] | None) -> Pixels:
    """An image as a person sees it.

    Args:
        image: `(C, H, W)`, or `(H, W, C)` of uint8; one or three channels are shown in colour, of others the first.
        normalised: The (mean, std) to undo; None: values outside of 0 to 1 are stretched to the range there is.
    """
    values = image.detach().cpu()
    if values.dim() == 3 and values.shape[0] not in (1, 3) and values.shape[-1] in (1, 3):
        values = values.permute(2, 0, 1)
    values = values if values.shape[0] in (1, 3) else values[:1]
    if not values.is_floating_point():
        shown = values.to(torch.float32) / (255 if values.dtype == torch.uint8 else max(1, int(values.max())))
    else:
        shown = values.float()
        if normalised is not None:
            mean, std = (torch.tensor(one, dtype=torch.float32).reshape(-1, 1, 1) for one in normalised)
            shown = shown * std + mean
        elif float(shown.min()) < -0.01 or float(shown.max()) > 1.01:
            low, high = float(shown.min()), float(shown.max())
            shown = (shown - low) / max(high - low, 1e-6)
    array = (shown.clamp(0, 1) * 255).round().to(torch.uint8).expand(3, -1, -1)
    return np.ascontiguousarray(array.permute(1, 2, 0).numpy())


def overlay(
    pixels: Pixels,
    *,
    boxes: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    points: torch.Tensor | None = None,
    words: Sequence[str] = (),
) -> Pixels:
    """Draws targets on an image.

    Args:
        pixels: `(H, W, 3)`.
        boxes: `(N, 4)`: left, top, right, bottom.
        masks: `(N, H, W)`, or `(H, W)` of class numbers.
        points: `(..., 2)`: x, y.
        words: Of the boxes.
    """
    shown = pixels.astype(np.float32)
    if masks is not None:
        for number, mask in enumerate(_planes(masks.detach().cpu())):
            chosen = mask.numpy().astype(bool)
            if chosen.shape == shown.shape[:2]:
                shown[chosen] = 0.5 * shown[chosen] + 0.5 * np.array(_COLOURS[number % len(_COLOURS)], np.float32)
    image = Image.fromarray(shown.round().astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for number, box in enumerate([] if boxes is None else boxes.detach().cpu().tolist()):
        colour = _COLOURS[number % len(_COLOURS)]
        left, top, right, bottom = box
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour)
        if number < len(words):
            pen.text((left + 2, top + 1), words[number], fill=colour)
    for x, y in [] if points is None else points.detach().cpu().reshape(-1, 2).tolist():
        pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill=_COLOURS[0])
    return _array(image)


def _array(image: Image.Image) -> Pixels:
    pixels: Pixels = np.asarray(image, np.uint8)
    return pixels


def _planes(masks: torch.Tensor) -> list[torch.Tensor]:
    """Masks `(N, H, W)` of yes and no, or the classes of `(H, W)` but the background."""
    if masks.dim() == 3 and masks.shape[0] != 1:
        return list(masks)
    plane = masks.reshape(masks.shape[-2:])
    return [plane == value for value in plane.unique().tolist()[:20] if value not in (0, 255)]


def film(clip: torch.Tensor, normalised: tuple[Sequence[float], Sequence[float]] | None, *, frames: int = 8) -> Pixels:
    """Frames of a clip `(T, C, H, W)` side by side, evenly chosen, first and last among them."""
    chosen = np.linspace(0, len(clip) - 1, min(frames, len(clip))).round().astype(int)
    # one picture of all frames below each other, so that all are stretched alike
    tall = picture(torch.cat([clip[number] for number in chosen], dim=-2), normalised)
    return np.concatenate([_fit(part, TILE // 2) for part in np.split(tall, len(chosen))], axis=1)


def spectrogram(values: torch.Tensor) -> Pixels:
    """Heat of `(F, T)`, low bins below; its own minimum is dark and its maximum bright."""
    heat = values.detach().cpu().float().flip(0)
    low, high = float(heat.min()), float(heat.max())
    places = ((heat - low) / max(high - low, 1e-6)).numpy() * (len(_HEAT) - 1)
    below = np.minimum(places.astype(int), len(_HEAT) - 2)
    share = (places - below)[..., None]
    colours = (1 - share) * _HEAT[below] + share * _HEAT[below + 1]
    heated: Pixels = colours.round().astype(np.uint8)
    return heated


def wave(samples: torch.Tensor, *, width: int = 2 * TILE, height: int = TILE // 2) -> Pixels:
    """The envelope of `(S,)`: lowest and highest value of each column."""
    line = samples.detach().cpu().float().reshape(-1).numpy()
    top = max(float(np.abs(line).max(initial=0.0)), 1e-6)
    canvas = np.full((height, width, 3), 255, np.uint8)
    for column, part in enumerate(np.array_split(line, width)):
        if part.size:
            low, high = ((1 - value / top) / 2 * (height - 1) for value in (part.max(), part.min()))
            canvas[int(low) : int(high) + 1, column] = _COLOURS[1]
    return canvas


def difference(ours: Pixels, theirs: Pixels, *, gain: int = 16) -> Pixels:
    """`gain` times the absolute difference of two pictures."""
    apart = np.abs(ours.astype(np.int16) - theirs.astype(np.int16)) * gain
    shown: Pixels = np.minimum(apart, 255).astype(np.uint8)
    return shown


def _fit(pixels: Pixels, longest: int) -> Pixels:
    """Scaled so that its longest side is `longest`; small pictures grow in whole pixels."""
    height, width = pixels.shape[:2]
    scale = longest / max(height, width)
    filter_ = Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return _array(Image.fromarray(pixels).resize(size, filter_))


def sheet(rows: Sequence[Sequence[Tile]], *, columns: int = 1) -> Image.Image:
    """A contact sheet.

    Args:
        rows: What belongs side by side, one sample each.
        columns: So many samples in a line.
    """
    blocks = [_row([_framed(tile) for tile in row]) for row in rows]
    lines = [_row(blocks[start : start + columns]) for start in range(0, len(blocks), columns)]
    width = max(line.width for line in lines)
    whole = Image.new("RGB", (width, sum(line.height for line in lines)), _PAPER)
    top = 0
    for line in lines:
        whole.paste(line, (0, top))
        top += line.height
    return whole


def _framed(tile: Tile) -> Image.Image:
    longest = TILE if tile.pixels.shape[1] <= 2.5 * tile.pixels.shape[0] else 4 * TILE
    image = Image.fromarray(_fit(tile.pixels, longest))
    lines = tile.words.split("\n") if tile.words else []
    pen = ImageDraw.Draw(image)
    width = max([image.width, *(round(pen.textlength(line)) for line in lines)])
    framed = Image.new("RGB", (width + 8, image.height + 8 + 13 * len(lines)), _PAPER)
    framed.paste(image, (4, 4))
    pen = ImageDraw.Draw(framed)
    for number, line in enumerate(lines):
        pen.text((4, image.height + 5 + 13 * number), line, fill=_INK)
    return framed


def _row(images: Sequence[Image.Image]) -> Image.Image:
    joined = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), _PAPER)
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width
    return joined
