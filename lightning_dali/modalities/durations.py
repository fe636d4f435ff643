"""How long the samples of a dataset are, without decoding and mostly without reading them.

Runs in the rank, while batches are planned. The dataset is run up to the point where it would load its audio.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_dali.media import read_audio_header
from lightning_dali.media.durations import audio_lengths
from lightning_dali.modalities.audio import SUFFIXES, decoded_array, is_encoded_dict, stated_rate
from lightning_dali.proxies.audio_capture import Probed, probing
from lightning_dali.proxies.audio_source import Span
from lightning_dali.seeding import sample_seed, seeded
from lightning_dali.structure import map_leaves

_RATE = 16_000
"""Hz, for waveforms in memory whose rate nobody says: only the proportions matter then."""


def dataset_durations(dataset: Any, *, cache: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Seconds of each sample, float64; 0 where they cannot be told (the run will say why, if the sample is bad).

    Args:
        dataset: If it has `durations`, one number of seconds a sample, those are taken. Otherwise each sample is asked for
            once, and stopped at `torchaudio.load` or the like.
        cache: See `media.durations.audio_lengths`.
    """
    known = getattr(dataset, "durations", None)
    if known is not None and not callable(known) and len(known) == len(dataset) and None not in known:
        return np.asarray(known, np.float64)
    found = [_look(dataset, index) for index in range(len(dataset))]
    lengths = audio_lengths([one[0] for one in found if isinstance(one, tuple)], cache=cache)
    seconds = np.zeros(len(found))
    for index, one in enumerate(found):
        if isinstance(one, float):
            seconds[index] = one
        elif one is not None:
            seconds[index] = _seconds(*lengths[one[0]], one[1])
    return seconds


def _seconds(rate: int, seconds: float, span: Span | None) -> float:
    """Of a segment."""
    if span is None or not rate:
        return seconds
    first, last = span(rate)
    end = seconds if last < 0 else min(seconds, last / rate)
    return max(0.0, end - first / rate)


def _look(dataset: Any, index: int) -> tuple[str, Span | None] | float | None:
    """A sample's file and segment, or its seconds."""
    try:
        with probing(), seeded(sample_seed(0, 0, index), restore=True):
            sample = dataset[index]
        return _of_sample(sample)
    except Probed as probed:
        return _of_file(probed.file, probed.span)
    except Exception:  # the run meets it again, and handles it by its policy
        return None


def _of_file(file: Any, span: Span | None) -> tuple[str, Span | None] | float | None:
    if isinstance(file, (str, os.PathLike)):
        return os.fspath(file), span
    data = file if isinstance(file, (bytes, bytearray, memoryview)) else file.read()
    header = read_audio_header(bytes(data))
    return _seconds(header.sample_rate, header.duration_seconds or 0.0, span)


def _of_sample(sample: Any) -> tuple[str, Span | None] | float | None:
    """Of a sample that holds paths, bytes or waveforms: its first audio."""
    found: list[Any] = []
    decoded = decoded_array(sample)
    map_leaves(found.append, sample if decoded is None else decoded, leaf=is_encoded_dict)
    rate = stated_rate(sample) or _RATE
    for leaf in found:
        if isinstance(leaf, Mapping):
            return _of_file(leaf["path"] if leaf["bytes"] is None else leaf["bytes"], None)
        if isinstance(leaf, (bytes, bytearray)):
            return _of_file(leaf, None)
        if isinstance(leaf, (str, os.PathLike)) and os.path.splitext(os.fspath(leaf))[1].lower() in SUFFIXES:
            return os.fspath(leaf), None
        if isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim and torch.as_tensor(leaf).is_floating_point():
            return float(leaf.shape[-1]) / rate
    return None
