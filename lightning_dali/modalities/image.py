"""Images: proxies to lanes.

Runs in the worker. DALI decodes what it decodes like PIL; every other file is decoded here by PIL and travels as a
lossless PNM beside the encoded ones; what is not 8-bit RGB or gray, or was materialised, travels as finished pixels.
"""

# Over 300 lines: from a sample's leaves to lanes is one path, and each step of it is short.

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors

from lightning_dali.graph.functionals import canonical_name, merge_family
from lightning_dali.graph.image import ImageSpec, head_inputs
from lightning_dali.graph.plan import IDENTITY_CALLS, Head, plan_item, plan_tail, unfinish
from lightning_dali.graph.views import combine
from lightning_dali.media import ImageError, encode_pnm
from lightning_dali.modalities.shared import OfSources, finished_lane
from lightning_dali.proxies import Call, ImageSource, ProxyImage, ProxyStack
from lightning_dali.proxies.calls import SharedArguments, shared
from lightning_dali.structure import leaves, map_leaves
from lightning_dali.wire import Blobs, Lane

Transform = Callable[[Any], Any] | None
SUFFIXES = frozenset(PIL.Image.registered_extensions()) | {".jpg", ".jpeg"}
"""File names that count as images when a dataset returns paths."""


@dataclass(frozen=True)
class ImageModality(OfSources):
    """How images are handled."""

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf stands in for an image."""
        return isinstance(value, ProxyImage)

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf is several of them, stacked by a collate function."""
        return isinstance(value, ProxyStack)

    def wrap(self, sample: Any, transform: Transform, *, mine: Callable[[Any], bool] = lambda leaf: True) -> Any:
        """Applies the field transform to the first leaf that is an image: a proxy, path, bytes, array or PIL image.

        Only leaves that are `mine` come into question. Images that the sample holds as pixels (a transform needed them, or the
        dataset made them) become proxies too, so that all images of a field are handled alike.
        """
        if transform is None:
            return map_leaves(self._settled, sample)
        done = False

        def visit(leaf: Any) -> Any:
            nonlocal done
            proxy = None if done or not mine(leaf) else self.as_proxy(leaf)
            if proxy is None:
                return leaf
            done = True
            return map_leaves(self._settled, transform(proxy))

        wrapped = map_leaves(visit, sample)
        if not done:
            raise TypeError(
                f"the sample has no image to transform: expected a path, bytes, an array (H, W, C) or a PIL image, got "
                f"{_kinds(sample)}. Let the dataset apply its own transform, or return one of these."
            )
        return wrapped

    def _settled(self, leaf: Any) -> Any:
        if isinstance(leaf, PIL.Image.Image):
            return self.as_proxy(leaf)
        if type(leaf) is tv_tensors.Image and leaf.ndim == 3:
            return ProxyImage.of_result(leaf)
        return leaf

    def as_proxy(self, leaf: Any) -> ProxyImage | None:
        """A proxy for a leaf that is an image in some form, else None.

        Paths and bytes are opened as torchvision's `default_loader` does, in RGB.
        """
        if isinstance(leaf, ProxyImage):
            return leaf
        if isinstance(leaf, (bytes, bytearray)):
            return _in_rgb(bytes(leaf), None)
        if isinstance(leaf, (str, os.PathLike)) and os.path.splitext(os.fspath(leaf))[1].lower() in SUFFIXES:
            path = os.fspath(leaf)
            with open(path, "rb") as stream:
                return _in_rgb(stream.read(), path)
        if (
            isinstance(leaf, np.ndarray)
            and leaf.dtype == np.uint8
            and (leaf.ndim == 2 or (leaf.ndim == 3 and leaf.shape[2] == 3))
        ):
            return ProxyImage.make(ImageSource.from_pixels(leaf))
        if isinstance(leaf, PIL.Image.Image):
            return ProxyImage.make(ImageSource.from_pixels(np.asarray(leaf), mode=leaf.mode))
        if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8 and leaf.ndim == 3 and leaf.shape[0] in (1, 3):
            pixels = leaf.permute(1, 2, 0).contiguous().numpy()
            return ProxyImage.make(ImageSource.from_pixels(pixels)).record("to_image", {})
        return None

    def check(self, proxy: ProxyImage) -> str | None:
        """What will be decoded here is decoded at once, as is a file that looks cut off: PIL's word counts."""
        source = proxy.source
        if source.header is None:
            return None
        reason = source.incomplete()
        if reason is None and source.encoded:
            return None
        try:
            source.settle()
        except ImageError as error:
            return f"{reason} ({error})" if reason else str(error)
        return None

    def settle(self, proxy: ProxyImage) -> None:
        """Decodes with PIL."""
        proxy.source.settle()

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """Plans the items of a batch, field by field."""
        planned: list[tuple[Lane, list[int]]] = []
        for group in _by_field(items).values():
            planned += _plan_field(items, group)
        return _share_decoding(items, planned)


def _in_rgb(data: bytes, path: str | None) -> ProxyImage:
    try:
        proxy: ProxyImage = ProxyImage.make(ImageSource.from_bytes(data, path=path)).convert("RGB")
    except ImageError as error:
        error.path = path
        raise
    return proxy


@dataclass
class _Item:
    position: int
    source: ImageSource
    head: Head
    tail: tuple[Call, ...]
    spec: ImageSpec


def _by_field(items: Sequence[tuple[str, int, Any]]) -> Mapping[Hashable, list[int]]:
    """Positions by field; crops of one image that a transform stacked count as a field each."""
    groups: dict[Hashable, list[int]] = {}
    seen: dict[Hashable, int] = {}
    for position, (name, _, proxy) in enumerate(items):
        source = (name, id(proxy.source))
        occurrence = seen[source] = seen.get(source, -1) + 1
        groups.setdefault((name, occurrence), []).append(position)
    return groups


def _share_decoding(
    items: Sequence[tuple[str, int, Any]], planned: list[tuple[Lane, list[int]]]
) -> list[tuple[Lane, list[int]]]:
    """Makes one lane of those that decode the same files: the views of SimCLR, DINO or five crops."""
    by_files: dict[Hashable, list[tuple[Lane, list[int]]]] = {}
    for number, (lane, positions) in enumerate(planned):
        spec = lane.spec
        files: Hashable = number
        if isinstance(spec, ImageSpec) and spec.encoded:
            files = (spec.mode, *(id(items[position][2].source) for position in positions))
        by_files.setdefault(files, []).append((lane, positions))
    shared = []
    for members in by_files.values():
        if len(members) == 1:
            shared += members
        else:
            positions = [position for _, each in members for position in each]
            shared.append((combine([lane for lane, _ in members]), positions))
    return shared


def _plan_field(items: Sequence[tuple[str, int, Any]], group: list[int]) -> list[tuple[Lane, list[int]]]:
    done = [position for position in group if items[position][2].source.finished or not _in_graph(items[position][2])]
    rest = sorted(set(group) - set(done))
    lanes = [_pixel_lane(items, done)] if done else []
    if not rest:
        return lanes
    # An encoded lane unless every item is pixels in memory already (then nothing is gained by packing them as PNM).
    encoded = any(items[position][2].source.header is not None for position in rest)
    planned = [_plan_one(position, items[position][2], encoded) for position in rest]
    if len({item.head.finish for item in planned}) > 1:
        planned = [_unfinished(item) for item in planned]
    for spec, members in _merge_specs(planned):
        lanes.append(_image_lane(items, spec, members))
    return lanes


def _in_graph(proxy: ProxyImage) -> bool:
    return proxy.source.mode in ("RGB", "L")


def _plan_one(position: int, proxy: ProxyImage, encoded: bool) -> _Item:
    source = proxy.source
    channels = 3 if source.mode == "RGB" else 1
    head, tail = plan_item((source.height, source.width), proxy.calls, channels, pil=True)
    return _Item(position, source, head, tail, ImageSpec.of_head(head, mode=source.mode, encoded=encoded))


def _unfinished(item: _Item) -> _Item:
    """The item with its finish moved to the tail, for a batch whose items do not share one."""
    tail = (*unfinish(item.head), *item.tail)
    head = replace(item.head, finish=None, float_resize=False)
    return replace(item, head=head, tail=tail, spec=_without_finish(item.spec))


@functools.lru_cache(maxsize=256)
def _without_finish(spec: ImageSpec) -> ImageSpec:
    return replace(spec, finish=None, float_resize=False)


def _merge_specs(planned: list[_Item]) -> list[tuple[ImageSpec, list[_Item]]]:
    """Few specs that together serve every item."""
    by_spec: dict[int, list[_Item]] = {}  # by identity, which is cheap: items that need the same have the same object
    for item in planned:
        by_spec.setdefault(id(item.spec), []).append(item)
    merged: list[tuple[ImageSpec, list[_Item]]] = []
    for members in by_spec.values():
        spec = members[0].spec
        for number, (other, owners) in enumerate(merged):
            union = other.merge(spec)
            if union is not None:
                merged[number] = (union, [*owners, *members])
                break
        else:
            merged.append((spec, members))
    return merged


def _image_lane(items: Sequence[tuple[str, int, Any]], spec: ImageSpec, members: list[_Item]) -> tuple[Lane, list[int]]:
    members = sorted(members, key=lambda item: item.position)
    positions = [item.position for item in members]
    heads = [item.head for item in members]
    lane = Lane(
        field=items[positions[0]][0],
        spec=spec,
        data=Blobs(_payload(item.source, encoded=spec.encoded) for item in members),
        inputs=head_inputs(spec, heads),
        heads=[],
        tail=plan_tail([families(item.tail) for item in members]),
        indices=[items[position][1] for position in positions],
        paths=[item.source.path for item in members],
    )
    return lane, positions


def families(tail: tuple[Call, ...]) -> list[Call]:
    """Calls that may share a kernel get its name (affine and rotate are both warps); those that do nothing are left out."""
    return [_in_family(call) for call in tail if call.name not in IDENTITY_CALLS]


def _in_family(call: Call) -> Call:
    name, kwargs = call
    if not isinstance(kwargs, SharedArguments):
        family = merge_family(name)
        return call if family == name else Call(family, {**kwargs, "_call": canonical_name(name)})
    known: Call | None = kwargs.made.get(("family", name))
    if known is None:
        known = kwargs.made["family", name] = shared(_in_family(Call(name, dict(kwargs))))
    return known


def _payload(source: ImageSource, *, encoded: bool) -> np.ndarray:
    """What travels: the file's bytes, pixels as PNM beside them, or bare pixels (H, W, C)."""
    if encoded and source.encoded:
        return np.frombuffer(source.data, np.uint8)
    pixels = source.pixels()
    if encoded:
        return np.frombuffer(encode_pnm(pixels), np.uint8)
    return np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[:, :, None])


def _pixel_lane(items: Sequence[tuple[str, int, Any]], positions: list[int]) -> tuple[Lane, list[int]]:
    arrays = []
    for position in positions:
        proxy = items[position][2]
        if proxy.source.finished and not proxy.calls:
            result = proxy.source.data
        else:
            result = proxy.materialise_tensor(f"mode {proxy.source.mode}")
        arrays.append(result.as_subclass(torch.Tensor).contiguous())
    return finished_lane(items, positions, arrays)


def _kinds(sample: Any) -> str:
    return ", ".join(type(leaf).__name__ for _, leaf in leaves(sample)) or "nothing"
