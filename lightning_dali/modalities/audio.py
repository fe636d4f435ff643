"""Speech: proxies to one lane.

Runs in the worker. DALI decodes what it decodes like libsndfile; every other file is decoded here and travels as a WAV of
floats beside the encoded ones; what was materialised travels as a finished tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors

from lightning_dali.graph.flac import is_decodable
from lightning_dali.graph.speech import RowPlan, SpeechSpec
from lightning_dali.media import MediaError, clip_span, decode_sound
from lightning_dali.modalities.shared import OfSources
from lightning_dali.proxies.audio import AudioStack, ProxyAudio
from lightning_dali.proxies.audio_calls import AudioCall
from lightning_dali.proxies.audio_capture import at_rate, capture_audio
from lightning_dali.proxies.audio_source import AudioSource
from lightning_dali.proxies.video_source import VideoSource
from lightning_dali.structure import Path, leaves, map_leaves
from lightning_dali.wire import Blobs, Lane

SUFFIXES = frozenset(
    [
        ".wav",
        ".flac",
        ".ogg",
        ".oga",
        ".opus",
        ".mp3",
        ".m4a",
        ".aac",
        ".mp4",
        ".webm",
        ".mka",
        ".aiff",
        ".aif",
        ".aifc",
        ".au",
        ".snd",
        ".caf",
        ".w64",
        ".wma",
        ".amr",
        ".sph",
    ]
)
"""File names that count as audio when a dataset returns paths."""
_RATES = ("sampling_rate", "sample_rate", "sr", "rate")
"""Names under which samples that are dicts say their rate."""
_LOWEST_RATE = 1000
"""Hz; a smaller number beside a waveform is something else, such as a label."""


@dataclass(frozen=True)
class AudioModality(OfSources):
    """How audio is handled."""

    sample_rate: int | None = None
    """Hz; what has another rate is resampled when it is loaded."""

    def scope(self) -> AbstractContextManager[None]:
        """What captures decoding."""
        return capture_audio(self.sample_rate)

    def is_proxy(self, value: Any) -> bool:
        """Whether a leaf stands in for audio."""
        return isinstance(value, ProxyAudio)

    def is_stack(self, value: Any) -> bool:
        """Whether a leaf is several of them, collated."""
        return isinstance(value, AudioStack)

    def wrap(
        self, sample: Any, transform: Callable[[Any], Any] | None, *, mine: Callable[[Any], bool] = lambda leaf: True
    ) -> Any:
        """Finds the audio field: what was captured, else the first leaf that is audio in some form; transforms it.

        Args:
            sample: From the dataset.
            transform: Applied to the audio field.
            mine: Which leaves come into question.
        """
        if not any(isinstance(leaf, ProxyAudio) for _, leaf in leaves(sample)):
            sample = self.find(sample, mine)
        elif self.sample_rate is not None:
            sample = _with_rate(sample, self.sample_rate)
        if transform is None:
            return sample
        done = False

        def visit(leaf: Any) -> Any:
            nonlocal done
            if done or not isinstance(leaf, ProxyAudio):
                return leaf
            done = True
            return as_proxy(transform(leaf if leaf.source.result is None else leaf.source.result))

        return map_leaves(visit, sample)

    def of_clip(self, source: VideoSource) -> ProxyAudio:
        """What is heard while a clip is seen.

        Raises:
            MediaError: It has no sound, or none that decodes; with the path.
            TypeError: The clip came as frames.
        """
        if source.video is None or source.index is None:
            raise TypeError(
                "a video that comes as frames has no sound: let the dataset return the file's path or bytes."
            )
        try:
            wave, rate = decode_sound(source.video, source.index, *clip_span(source.index, source.clip))
        except MediaError as error:
            error.path = source.path
            raise
        return self._at_rate(ProxyAudio.make(AudioSource.from_wave(torch.from_numpy(wave), rate, path=source.path)))

    def find(self, sample: Any, mine: Callable[[Any], bool] = lambda leaf: True) -> Any:
        """The sample with a proxy in the place of its audio, the first leaf that is some and `mine`.

        Raises:
            TypeError: It has none.
        """
        rate, decoded = stated_rate(sample), decoded_array(sample)
        done = False

        def visit(leaf: Any) -> Any:
            nonlocal done
            if done or (decoded is not None and leaf is not decoded) or not mine(leaf):
                return leaf
            proxy = self._as_proxy(leaf, rate)
            if proxy is None:
                return leaf
            done = True
            return proxy

        found = map_leaves(visit, sample, leaf=is_encoded_dict)
        if not done:
            raise TypeError(
                f"the sample has no audio: expected a waveform tensor (C, S) or (S,), a path ({', '.join(sorted(SUFFIXES)[:6])}, "
                f"...), encoded bytes or a dict with 'bytes' or 'array', got {_kinds(sample)}."
            )
        return found

    def _as_proxy(self, leaf: Any, rate: int) -> ProxyAudio | None:
        """A proxy for a leaf that is audio in some form, else None."""
        if is_encoded_dict(leaf):
            data, path = leaf["bytes"], leaf.get("path")
            source = AudioSource.from_path(path) if data is None else AudioSource.from_bytes(bytes(data), path=path)
            return self._at_rate(ProxyAudio.make(source))
        if isinstance(leaf, (bytes, bytearray)):
            return self._at_rate(ProxyAudio.make(AudioSource.from_bytes(bytes(leaf))))
        if isinstance(leaf, (str, os.PathLike)) and os.path.splitext(os.fspath(leaf))[1].lower() in SUFFIXES:
            return self._at_rate(ProxyAudio.make(AudioSource.from_path(leaf)))
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            leaf = torch.from_numpy(np.ascontiguousarray(leaf))
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dim() not in (1, 2, 3):
            return None
        leaf = leaf.float()
        if leaf.dim() == 3 or (leaf.dim() == 2 and leaf.shape[0] > _MOST_CHANNELS):
            return ProxyAudio.of_result(leaf)  # a spectrogram
        flat = leaf.dim() == 1
        source = AudioSource.from_wave(leaf[None] if flat else leaf, rate)
        return self._at_rate(ProxyAudio.make(source, flat=flat))

    def _at_rate(self, proxy: ProxyAudio) -> ProxyAudio:
        return at_rate(proxy, self.sample_rate)

    def check(self, proxy: ProxyAudio) -> str | None:
        """Why the audio is no use."""
        return proxy.source.check()

    def settle(self, proxy: ProxyAudio) -> None:
        """Decodes here."""
        proxy.source.decode()

    def lanes(self, items: Sequence[tuple[str, int, Any]]) -> list[tuple[Lane, list[int]]]:
        """One lane for everything: DALI decodes all audio of a batch at once."""
        if not items:
            return []
        plans = [_plan(name, proxy) for name, _, proxy in items]
        lane = Lane(
            field=", ".join(dict.fromkeys(name for name, _, _ in items)),
            spec=SpeechSpec(tuple(dict.fromkeys(call.name for plan in plans for call in plan.calls))),
            data=Blobs(_payload(proxy.source) for _, _, proxy in items),
            inputs={},
            heads=plans,
            tail=[],
            indices=[index for _, index, _ in items],
            paths=[proxy.source.path for _, _, proxy in items],
        )
        return [(lane, list(range(len(items))))]


_MOST_CHANNELS = 16
"""A tensor `(N, S)` of more rows than this is taken for a spectrogram."""


def as_proxy(value: Any) -> Any:
    """What a transform returned; a finished tensor becomes a proxy, so that all samples of a batch are alike."""
    if isinstance(value, ProxyAudio) or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return ProxyAudio.of_result(value)


def _plan(name: str, proxy: ProxyAudio) -> RowPlan:
    source = proxy.source
    if source.result is not None:
        return RowPlan(name, (), 1, 0, result=source.result)
    calls, length = proxy.calls, source.num_samples
    if source.in_file is not None:
        start, stop = source.in_file
        shape = (length,) if proxy.flat else (source.num_channels, length)
        calls = (AudioCall("Window", (), {"start": start, "stop": stop}, shape, source.sample_rate), *calls)
        assert source.header is not None and source.header.num_samples is not None
        length = source.header.num_samples
    flac = source.header.flac if source.encoded and source.header is not None else None
    if flac is not None and not is_decodable(flac):
        flac = None
    return RowPlan(name, calls, source.num_channels, length, flat=proxy.flat, flac=flac)


def _payload(source: AudioSource) -> np.ndarray:
    payload: np.ndarray = np.empty(0, np.uint8) if source.result is not None else source.payload()
    return payload


def is_encoded_dict(value: Any) -> bool:
    """Hugging Face's `Audio(decode=False)`."""
    return isinstance(value, Mapping) and "bytes" in value and set(value) <= {"bytes", "path"}


def decoded_array(sample: Any) -> Any:
    """Hugging Face's `Audio()`, a dict whose path may not exist beside its array: the array, if there is one."""
    return next((leaf for path, leaf in leaves(sample) if path and path[-1] == "array"), None)


def stated_rate(sample: Any) -> int:
    """The rate that a sample states beside its waveform: under its name in a dict, or as torchaudio's second item."""
    first: dict[Path, Any] = {}
    for path, leaf in leaves(sample):
        if path and path[-1] == 0:
            first[path[:-1]] = leaf
        number = isinstance(leaf, (int, np.integer)) and not isinstance(leaf, bool)
        if number and path and leaf >= _LOWEST_RATE:
            second = path[-1] == 1 and not isinstance(first.get(path[:-1]), (tv_tensors.TVTensor, str, bytes))
            if path[-1] in _RATES or second:
                return int(leaf)
    return 0


def _with_rate(sample: Any, sample_rate: int) -> Any:
    """torchaudio's `(waveform, sample_rate, ...)`, where a dataset states the rate of its files itself."""
    if type(sample) is not tuple or len(sample) < 2 or not isinstance(sample[0], ProxyAudio):
        return sample
    stated = sample[1]
    if type(stated) is int and stated == sample[0].source.sample_rate and sample[0].source.result is None:
        return (sample[0], sample_rate, *sample[2:])
    return sample


def _kinds(sample: Any) -> str:
    return ", ".join(type(leaf).__name__ for _, leaf in leaves(sample)) or "nothing"
