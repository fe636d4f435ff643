"""Recorded audio calls, done on a padded batch: every row as torchaudio would do it alone.

Runs in the rank, on any device, with torch and torchaudio. Rows whose settings differ (a speed factor, another sample
rate) are done in groups. Lengths are host numbers on the way; pass them on the CPU and no step waits for the device
(except `TrimSilence`, whose lengths are in the samples).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_dali.graph import audio_features, audio_shape, audio_wave
from lightning_dali.graph.audio_features import clear_buffers
from lightning_dali.graph.audio_rows import Rows, merge
from lightning_dali.graph.audio_wave import Drawn, Settings, opposite_phase
from lightning_dali.padded import Padded
from lightning_dali.proxies.audio_calls import AudioCall
from lightning_dali.proxies.audio_settings import Config

__all__ = ["STEPS", "apply_audio", "apply_calls", "clear_buffers", "opposite_phase"]


class Step(NamedTuple):
    """How one module is done on a batch."""

    run: Callable[[Rows, Settings, Drawn], Rows]
    """The arithmetic."""
    drawn: frozenset[str] = frozenset()
    """Keyword arguments that belong to a row; the others are settings."""


_NOISE = frozenset({"snr", "seed", "noise"})
_MASKS = frozenset({"masks"})
STEPS: dict[str, Step] = {
    "Resample": Step(audio_wave.resample),
    "Speed": Step(audio_wave.resample),
    "Vol": Step(audio_wave.vol),
    "Preemphasis": Step(audio_wave.preemphasis),
    "Deemphasis": Step(audio_wave.deemphasis),
    "Fade": Step(audio_wave.fade),
    "AddNoise": Step(audio_wave.add_noise, _NOISE),
    "Dither": Step(audio_wave.dither, _NOISE),
    "Downmix": Step(audio_wave.downmix),
    "TrimSilence": Step(audio_wave.trim_silence),
    "Spectrogram": Step(audio_features.spectrogram),
    "MelScale": Step(audio_features.mel_scale),
    "MelSpectrogram": Step(audio_features.mel_spectrogram),
    "MFCC": Step(audio_features.mfcc),
    "AmplitudeToDB": Step(audio_features.amplitude_to_db),
    "Log": Step(audio_features.log),
    "CMVN": Step(audio_features.cmvn),
    "GlobalCMVN": Step(audio_features.global_cmvn),
    "FrequencyMasking": Step(audio_features.masking, _MASKS),
    "TimeMasking": Step(audio_features.masking, _MASKS),
    "SpecAugment": Step(audio_features.masking, _MASKS),
    "Channel": Step(audio_shape.channel),
    "Squeeze": Step(audio_shape.squeeze),
    "Unsqueeze": Step(audio_shape.unsqueeze),
    "Window": Step(audio_shape.window, frozenset({"start", "stop"})),
    "Pointwise": Step(audio_shape.pointwise),
}
"""The vocabulary, by the names that `proxies.audio_calls` and `proxies.audio_ops` record."""


CHUNK_SAMPLES = 2**17
"""Eight seconds at 16 kHz: a log-mel of them is made from 8 MB, in two thirds of the CPU time that a batch of 64 takes."""


def apply_audio(name: str, batch: Padded, kwargs: Sequence[Mapping[str, Any] | None]) -> Padded:
    """Does one call on every row.

    Args:
        name: The call's name, a key of `STEPS`.
        batch: Waveforms `(B, S)` or `(B, C, S)`, or spectrograms `(B, F, T)` or `(B, C, F, T)`; must be zero beyond the
            lengths.
        kwargs: One mapping a row, `AudioCall.kwargs`; None leaves the row as it is.

    Returns:
        The results, zero beyond their lengths, which are on the device that `batch.lengths` are on.

    Raises:
        ValueError: For an unknown name, another number of mappings than rows, or a row that is too short.
    """
    drawn = STEPS[name].drawn if name in STEPS else frozenset()
    return _run(batch, [[] if row is None else [_task(name, row, drawn)] for row in kwargs])


def apply_calls(batch: Padded, calls: Sequence[Sequence[AudioCall]]) -> Padded:
    """Does each row's own list of calls; rows with the same names in the same order go together.

    Args:
        batch: As for `apply_audio`.
        calls: One list a row.
    """
    return _run(batch, [[_Task(call.name, call.config, call.drawn) for call in row] for row in calls])


class _Task(NamedTuple):
    """One call on one row."""

    name: str
    settings: Config
    drawn: Mapping[str, Any]


def _task(name: str, kwargs: Mapping[str, Any], drawn: frozenset[str]) -> _Task:
    settings = tuple(sorted((key, value) for key, value in kwargs.items() if key not in drawn))
    return _Task(name, settings, {key: kwargs[key] for key in drawn & kwargs.keys()})


_Work = Sequence[_Task]


def _run(batch: Padded, work: Sequence[_Work]) -> Padded:
    if len(work) != len(batch.lengths):
        raise ValueError(f"{len(work)} lists of arguments for a batch of {len(batch.lengths)} rows")
    unknown = {task.name for row in work for task in row} - STEPS.keys()
    if unknown:
        raise ValueError(f"unknown audio calls {sorted(unknown)}; known are {', '.join(STEPS)}")
    if not work:
        return batch
    with torch.no_grad(), torch.autocast(batch.data.device.type, enabled=False):
        rows = Rows.of(batch)
        parts = _parts(rows)
        done = [
            (part, _run_rows(rows.select(part) if len(parts) > 1 else rows, [work[i] for i in part])) for part in parts
        ]
        return (done[0][1] if len(done) == 1 else merge(done)).padded(batch.lengths.device)


def _parts(rows: Rows) -> list[list[int]]:
    """All rows for a GPU; on the CPU a few at a time, so that what is made on the way stays in the cache."""
    if rows.device.type != "cpu":
        return [[*range(len(rows.lengths))]]
    most = CHUNK_SAMPLES * torch.get_num_threads()
    values = max(1, rows.data[0, ..., 0].numel())
    parts: list[list[int]] = [[]]
    longest = 0
    for row, length in enumerate(rows.lengths):
        longest = max(longest, length)
        if parts[-1] and (len(parts[-1]) + 1) * longest * values > most:
            parts.append([])
            longest = length
        parts[-1].append(row)
    return parts


def _run_rows(rows: Rows, work: Sequence[_Work]) -> Rows:
    return _by_groups(rows, [tuple(task.name for task in row) for row in work], work, _run_names)


def _run_names(rows: Rows, names: Sequence[str], work: Sequence[_Work]) -> Rows:
    """Does calls of the same names on all rows."""
    for position, name in enumerate(names):
        tasks = [row[position] for row in work]
        run = functools.partial(_run_step, STEPS[name])
        rows = _by_groups(rows, [task.settings for task in tasks], [task.drawn for task in tasks], run)
    return rows


def _run_step(step: Step, rows: Rows, settings: Config, drawn: Drawn) -> Rows:
    return step.run(rows, dict(settings), drawn)


def _by_groups(
    rows: Rows, keys: Sequence[Hashable], values: Sequence[Any], run: Callable[[Rows, Any, Sequence[Any]], Rows]
) -> Rows:
    """Runs `run(rows, key, values)` on the rows of each key, and puts the results back in order."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    if len(groups) == 1:
        return run(rows, keys[0], values)
    return merge([(group, run(rows.select(group), key, [values[i] for i in group])) for key, group in groups.items()])
