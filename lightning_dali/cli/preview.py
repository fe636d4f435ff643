"""`lightning-dali preview`: a batch as the model will see it, on a sheet. Runs in the rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_dali.cli import draw
from lightning_dali.cli.reference import plain_sample
from lightning_dali.explain import explain
from lightning_dali.loader import Loader
from lightning_dali.padded import Padded
from lightning_dali.streams import is_stream
from lightning_dali.structure import field_name, leaves

__all__ = ["Preview", "preview"]

_BOXES, _MASKS, _POINTS = ("boxes", "bbox", "bboxes"), ("masks", "mask", "segmentation"), ("keypoints", "points")
Normalised = Any


@dataclass
class Preview:
    """The sheet and what was found out on the way."""

    image: Image.Image
    notes: list[str] = field(default_factory=list)
    """For the person who looks: what could not be shown, how far torchvision's result is away."""


def preview(loader: Loader, *, count: int = 16, compare: bool = False) -> Preview:
    """Draws the batch that the next pass would begin with.

    Args:
        loader: Its position stays.
        count: So many samples of the batch.
        compare: Whether torchvision's result for the same draws, and the difference, stand beside each image.

    Raises:
        ValueError: The batch has nothing that can be drawn.
    """
    normalised = {plan.field: plan.normalised for plan in explain(loader).fields}
    notes: list[str] = []
    transform, batch_transform = loader.batch_transform, loader.batch_transform
    if compare and batch_transform is not None:
        notes.append("compare: shown without the batch_transform, which mixes samples.")
        transform = None
    loader.batch_transform = transform
    try:
        batch, known = loader.look()
    finally:
        loader.batch_transform = batch_transform
    rows = min(count, len(known.indices))
    fields = dict(_fields(batch, len(known.indices)))
    shown = _Shown(fields, normalised, _classes(loader.dataset))
    if not shown.media:
        kinds = ", ".join(f"{name}: {_kind(value)}" for name, value in fields.items())
        raise ValueError(f"the batch has nothing that can be drawn: {kinds or 'no tensors'}.")
    tiles: list[list[draw.Tile]] = []
    apart: list[np.ndarray[Any, Any]] = []
    for row in range(rows):
        index = known.indices[row]
        tiles.append(shown.tiles(row, f"#{index}"))
        if compare:
            tiles[-1] += _compared(shown, loader, known.task.epoch, index, row, apart, notes)
    if apart:
        worst, mean = max(float(one.max()) for one in apart), float(np.mean([one.mean() for one in apart]))
        notes.append(f"torchvision's result is {mean:.3f} levels of 255 away on average, {worst:.0f} at most.")
    widest = max(
        sum(draw.TILE if tile.pixels.shape[1] <= 2.5 * tile.pixels.shape[0] else 900 for tile in row) for row in tiles
    )
    return Preview(draw.sheet(tiles, columns=max(1, 1800 // widest)), list(dict.fromkeys(notes)))


def _fields(value: Any, rows: int, path: tuple[Any, ...] = ()) -> Any:
    """Yields (field, its value for the whole batch): tensors, `Padded`, and lists with an entry a row."""
    if isinstance(value, (Padded, torch.Tensor)):
        yield field_name(path), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _fields(item, rows, (*path, key))
    elif isinstance(value, (tuple, list)) and len(value) == rows and all(isinstance(one, Mapping) for one in value):
        for key in value[0]:  # a collate that only zips: one dict of targets a sample
            yield field_name((*path, key)), [one[key] for one in value]
    elif isinstance(value, (tuple, list)) and len(value) == rows and _one_a_row(value, path):
        yield field_name(path), list(value)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _fields(item, rows, (*path, number))
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _fields(getattr(value, name), rows, (*path, name))


def _one_a_row(values: Any, path: tuple[Any, ...]) -> bool:
    """Whether a sequence as long as the batch holds a value a sample, and is not itself the batch of so many fields."""
    if isinstance(values[0], (tuple, list, Mapping)):
        return False
    return isinstance(values, list) or bool(path)


class _Shown:
    """Which fields of a batch are drawn, which are drawn on them, and which are written below."""

    def __init__(self, fields: Mapping[str, Any], normalised: Mapping[str, Normalised], classes: list[str]) -> None:
        self.fields, self.normalised, self.classes = fields, normalised, classes
        roles = {name: _target(name, value) for name, value in fields.items()}
        self.media = [name for name, value in fields.items() if _kind(value) in _DRAWERS and not roles[name]]
        self.targets = {role: name for name, role in roles.items() if role}

    def tiles(self, row: int, title: str) -> list[draw.Tile]:
        """The pictures of one sample."""
        tiles = []
        for number, name in enumerate(self.media):
            pixels = self.pixels(name, row)
            words = [title if number == 0 else name, *(self._words(row) if number == 0 else [])]
            if _kind(self.fields[name]) == "image" and number == 0:
                pixels = draw.overlay(pixels, **self._targets(row))
            tiles.append(draw.Tile(pixels, "\n".join(words)))
        return tiles

    def pixels(self, name: str, row: int) -> draw.Pixels:
        """One field of one sample."""
        value = self.fields[name]
        drawn: draw.Pixels = _DRAWERS[_kind(value)](_row(value, row), self.normalised.get(name))
        return drawn

    def _targets(self, row: int) -> dict[str, Any]:
        found = {kind: _row(self.fields[name], row) for kind, name in self.targets.items()}
        if "boxes" in found:
            found["boxes"] = _corners(found["boxes"])
            count = len(found["boxes"])
            labels = [
                _row(value, row)
                for name, value in self.fields.items()
                if name.rsplit("/", 1)[-1] in ("labels", "label")
            ]
            if labels and isinstance(labels[0], torch.Tensor) and labels[0].numel() == count:
                found["words"] = [self._class(int(label)) for label in labels[0].reshape(-1).tolist()]
        return found

    def _words(self, row: int) -> list[str]:
        """Labels and numbers of a sample, in words."""
        words = []
        for name, value in self.fields.items():
            if name in self.media or name in self.targets.values():
                continue
            one = _row(value, row)
            if isinstance(one, torch.Tensor) and one.dim() == 0 and not one.is_floating_point():
                words.append(f"{name}: {self._class(int(one))}" if "index" not in name else f"{name}: {int(one)}")
            elif isinstance(one, torch.Tensor) and one.dim() == 1 and one.is_floating_point() and "seconds" in name:
                words.append(f"{name}: {float(one[0]):.2f} to {float(one[-1]):.2f}")
            elif isinstance(one, torch.Tensor) and one.dim() == 1 and one.is_floating_point() and len(one) <= 10_000:
                best = torch.topk(one, min(2, len(one)))  # what MixUp makes of labels
                pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                words.append(f"{name}: " + ", ".join(f"{self._class(n)} {v:.2f}" for v, n in pairs if v > 0))
            elif isinstance(one, (str, int, float)) or (isinstance(one, torch.Tensor) and one.dim() == 0):
                words.append(f"{name}: {str(one.item() if isinstance(one, torch.Tensor) else one)[:48]}")
        return words[:4]

    def _class(self, number: int) -> str:
        return self.classes[number] if 0 <= number < len(self.classes) else str(number)


def _row(value: Any, row: int) -> Any:
    return value.unpad()[row] if isinstance(value, Padded) else value[row]


def _kind(value: Any) -> str:
    """What a field of a batch is, by its shape."""
    if isinstance(value, Padded):
        return "wave" if value.data.dim() == 2 or value.data.shape[-2] <= 2 else "spectrogram"
    if isinstance(value, list):
        return (
            "image"
            if isinstance(value[0], torch.Tensor) and value[0].dim() == 3 and _colours(value[0].shape)
            else "list"
        )
    if value.dim() == 5:
        return "film"
    if value.dim() == 4 and _colours(value.shape[1:]):
        return "image"
    if value.dim() == 3 and value.is_floating_point():
        return "wave" if value.shape[1] <= 2 else "spectrogram"
    if value.dim() == 2 and value.is_floating_point() and value.shape[1] > 2000:
        return "wave"
    return "numbers"


def _colours(shape: Any) -> bool:
    return shape[0] in (1, 3, 4) or shape[-1] in (1, 3, 4)


_DRAWERS: dict[str, Any] = {
    "image": draw.picture,
    "film": lambda clip, normalised: draw.film(_frames_first(clip), normalised),
    "spectrogram": lambda values, _: draw.spectrogram(values.reshape(-1, *values.shape[-2:])[0]),
    "wave": lambda values, _: draw.wave(values.reshape(-1, values.shape[-1])[0]),
}


def _frames_first(clip: torch.Tensor) -> torch.Tensor:
    """`(T, C, H, W)` of a clip in either order."""
    return clip.transpose(0, 1) if clip.shape[0] in (1, 3) and clip.shape[1] not in (1, 3) else clip


def _target(name: str, value: Any) -> str:
    """What a field is to the image beside it: boxes, masks, points, or nothing."""
    last = name.rsplit("/", 1)[-1]
    kinds = (("boxes", _BOXES), ("masks", _MASKS), ("points", _POINTS))
    kind = next((kind for kind, names in kinds if last in names), "")
    flat = isinstance(value, torch.Tensor) and value.dim() < 3  # such as a clip's mask of real frames, (B, T)
    return "" if flat else kind


def _corners(boxes: torch.Tensor) -> torch.Tensor:
    form = getattr(boxes, "format", None)
    plain = boxes.as_subclass(torch.Tensor)
    if form is None or form.value == "XYXY" or plain.shape[-1] != 4:
        return plain
    from torchvision.ops import box_convert

    converted: torch.Tensor = box_convert(plain, form.value.lower(), "xyxy")
    return converted


def _classes(dataset: Any) -> list[str]:
    """Class names, from the dataset or what it wraps."""
    while dataset is not None:
        names = getattr(dataset, "classes", None)
        if isinstance(names, (list, tuple)):
            return [str(name) for name in names]
        dataset = getattr(dataset, "dataset", None)
    return []


def _compared(
    shown: _Shown, loader: Loader, epoch: int, index: int, row: int, apart: list[np.ndarray[Any, Any]], notes: list[str]
) -> list[draw.Tile]:
    """Torchvision's pictures, and how far they are away."""
    if is_stream(loader.dataset):
        notes.append("compare: a stream cannot be asked for the same sample again.")
        return []
    images = [name for name in shown.media if _kind(shown.fields[name]) == "image"]
    for name in shown.media:
        if name not in images:
            notes.append(f"compare: only images have a reference; field {name!r} is a {_kind(shown.fields[name])}.")
    if not images:
        return []
    found = {field_name(path): leaf for path, leaf in leaves(plain_sample(loader.fetcher, epoch, index))}
    tiles: list[draw.Tile] = []
    for name in images:
        words = "torchvision" if name == shown.media[0] else f"torchvision, {name}"
        tiles += _beside(shown, name, found.get(name), words, (row, index), apart, notes)
    return tiles


def _beside(
    shown: _Shown,
    name: str,
    theirs: Any,
    words: str,
    sample: tuple[int, int],
    apart: list[np.ndarray[Any, Any]],
    notes: list[str],
) -> list[draw.Tile]:
    """One image of torchvision's, and the difference; `sample` is its row and its index."""
    row, index = sample
    if not isinstance(theirs, torch.Tensor):
        if theirs is None:
            notes.append(f"compare: the dataset's own samples have no field {name!r} (a collate_fn made it?).")
            return []
        theirs = torch.from_numpy(np.array(theirs))
        theirs = theirs.permute(2, 0, 1) if theirs.dim() == 3 else theirs[None]
    pixels, ours = draw.picture(theirs, shown.normalised.get(name)), shown.pixels(name, row)
    if pixels.shape != ours.shape:
        notes.append(f"compare: sample {index} is {ours.shape[:2]} here and {pixels.shape[:2]} in torchvision.")
        return [draw.Tile(pixels, words)]
    apart.append(np.abs(pixels.astype(np.int16) - ours.astype(np.int16)))
    told = f"difference x 16\nmean {apart[-1].mean():.2f}, max {apart[-1].max()}"
    return [draw.Tile(pixels, words), draw.Tile(draw.difference(ours, pixels), told)]
