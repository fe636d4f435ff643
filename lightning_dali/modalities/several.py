"""Several kinds of media in one sample: each leaf goes the way of its kind.

Runs in the worker. Capture, proxies, bad samples and lanes are the members' own; here it is only said which member a leaf
belongs to. In the rank the lanes of a batch run through graphs of one server (docs/decisions/0005).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors

from lightning_dali.fetch import Modality
from lightning_dali.media.kinds import KINDS, kind_of_bytes
from lightning_dali.modalities import audio, image, video
from lightning_dali.modalities.audio import decoded_array, is_encoded_dict
from lightning_dali.proxies import ProxyImage, ProxyStack, capture
from lightning_dali.proxies.audio import AudioStack, ProxyAudio
from lightning_dali.proxies.video import ProxyVideo, VideoStack
from lightning_dali.structure import leaves, map_leaves
from lightning_dali.wire import Lane

_PROXIES: dict[type, str] = {ProxyVideo: "video", ProxyImage: "image", ProxyAudio: "audio"}
_STACKS: dict[type, str] = {VideoStack: "video", ProxyStack: "image", AudioStack: "audio"}
_SUFFIXES = {"video": video.SUFFIXES, "image": image.SUFFIXES, "audio": audio.SUFFIXES}
_CHANNELS = 2
"""Most channels of a spectrogram; a tensor `(3, F, T)` would be a picture."""
_NOBODY = ""
"""Whose a leaf is that must be left alone."""


@dataclass(frozen=True)
class KindTransforms:
    """Field transforms, one a kind; called with a value, it applies the one for that value's kind."""

    by_kind: Mapping[str, Callable[[Any], Any]]
    """From "image", "video", "audio" to the transform."""

    def of(self, kind: str) -> Callable[[Any], Any] | None:
        """The transform of a kind, if there is one."""
        return self.by_kind.get(kind)

    def __call__(self, value: Any) -> Any:
        """As plain torchvision and torchaudio would, for what compares with them."""
        wave = isinstance(value, torch.Tensor) and value.dim() < 3
        kind = "video" if isinstance(value, tv_tensors.Video) else "audio" if wave else "image"
        transform = self.of(kind)
        return value if transform is None else transform(value)


@dataclass(frozen=True)
class SeveralModality:
    """How samples with media of several kinds are handled."""

    members: Mapping[str, Modality]
    """By kind: "video", "image", "audio"."""
    uncaptured: frozenset[str] = field(default=frozenset())
    """Kinds that come decoded when the dataset decodes them itself."""

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What captures decoding, of all kinds together."""
        with ExitStack() as scopes:
            for kind, member in self.members.items():
                if kind not in self.uncaptured:
                    scopes.enter_context(getattr(member, "scope", capture)())
            yield

    def less(self) -> Iterator[tuple[str, SeveralModality]]:
        """For a dataset that insists on real media of one kind: (that kind, the modality without its capture)."""
        left = [kind for kind in ("image", "video", "audio") if kind in self.members and kind not in self.uncaptured]
        if len(left) > 1:
            for kind in left:
                yield kind, replace(self, uncaptured=self.uncaptured | {kind})

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf stands in for media of any kind."""
        return type(value) in _PROXIES

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf is several of them, stacked."""
        return type(value) in _STACKS

    def wrap(self, sample: Any, transform: Callable[[Any], Any] | None) -> Any:
        """Lets each member make proxies of what is its own, and apply its transform.

        A path belongs to the kind of its ending, bytes to that of how they begin; of both, what may be several is a video
        first, then an image. A waveform counts only where no leaf is an audio file: then it is the largest float array.
        """
        captured = any(type(leaf) is ProxyAudio for _, leaf in leaves(sample))
        for kind in (kind for kind in KINDS if kind in self.members):  # videos first: a clip brings its sound along
            own = transform.of(kind) if isinstance(transform, KindTransforms) else None
            member: Any = self.members[kind]
            if kind != "audio":
                sample = member.wrap(sample, own, mine=functools.partial(self._claims, kind))
                continue
            found = [] if captured else self._find_audio(sample)
            if found:  # also where a clip has brought sound of its own
                sample = member.find(sample, mine=lambda leaf, found=found: any(leaf is one for one in found))
            sample = member.wrap(sample, own, mine=lambda leaf: False)
        return sample

    def _claims(self, kind: str, leaf: Any) -> bool:
        """Whether the member of a kind may make a proxy of a leaf: unless it is another's."""
        return self._owner(leaf) in (kind, None)

    def _find_audio(self, sample: Any) -> list[Any]:
        """The leaves of a sample that are audio, though not loaded by its dataset: one that is decoded, else files."""
        decoded = decoded_array(sample)
        if decoded is not None:
            return [decoded]
        leaves_of_sample: list[Any] = []
        map_leaves(leaves_of_sample.append, sample, leaf=is_encoded_dict)
        owned = [leaf for leaf in leaves_of_sample if self._owner(leaf) == "audio"]
        waves = [] if owned else [leaf for leaf in leaves_of_sample if self._owner(leaf) is None and _may_be_wave(leaf)]
        largest = sorted(waves, key=lambda wave: wave.size if isinstance(wave, np.ndarray) else wave.numel())[-1:]
        return largest or [leaf for leaf in owned if not self.is_proxy(leaf)]

    def _owner(self, leaf: Any) -> str | None:
        """The kind that a leaf is, `_NOBODY` if it is media of none of the members', None if it does not say."""
        kind = _PROXIES.get(type(leaf)) or _STACKS.get(type(leaf))
        if kind is not None:
            return kind
        if isinstance(leaf, tv_tensors.TVTensor):
            return {tv_tensors.Video: "video", tv_tensors.Image: "image"}.get(type(leaf), _NOBODY)
        if is_encoded_dict(leaf):
            leaf = leaf.get("path") if leaf["bytes"] is None else leaf["bytes"]
        if isinstance(leaf, (bytes, bytearray)):
            return kind_of_bytes(leaf, self.members) or _NOBODY
        if isinstance(leaf, (str, os.PathLike)):
            suffix = os.path.splitext(os.fspath(leaf))[1].lower()
            return next((kind for kind in KINDS if kind in self.members and suffix in _SUFFIXES[kind]), None)
        return "image" if isinstance(leaf, PIL.Image.Image) else None

    def check(self, proxy: Any) -> str | None:
        """Why the proxy cannot be decoded, as far as a cheap look tells."""
        return self._member(proxy).check(proxy)

    def settle(self, proxy: Any) -> None:
        """Decodes in this process."""
        self._member(proxy).settle(proxy)

    def path(self, proxy: Any) -> str | None:
        """The file behind it."""
        return self._member(proxy).path(proxy)

    def notes(self, proxy: Any) -> Iterable[str]:
        """What needed pixels or samples in the worker."""
        return self._member(proxy).notes(proxy)

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """The members' lanes, one member after the other."""
        planned: list[tuple[Lane, list[int]]] = []
        for kind, member in self.members.items():
            own = [position for position, (_, _, proxy) in enumerate(items) if _PROXIES[type(proxy)] == kind]
            for lane, rows in member.lanes([items[position] for position in own]) if own else ():
                planned.append((lane, [own[row] for row in rows]))
        return planned

    def _member(self, proxy: Any) -> Modality:
        return self.members[_PROXIES[type(proxy)]]


def _may_be_wave(leaf: Any) -> bool:
    """Whether a leaf could be a waveform `(C, S)`, `(S,)` or a spectrogram, and no picture `(3, H, W)`."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind == "f" and leaf.ndim in (1, 2)
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return False
    return leaf.dim() in (1, 2) or (leaf.dim() == 3 and leaf.shape[0] <= _CHANNELS)
