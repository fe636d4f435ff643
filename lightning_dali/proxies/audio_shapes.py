"""Lengths after an operation, exactly torchaudio's. Runs in the worker (drawing) and in the rank (computing)."""

from __future__ import annotations

import math
from typing import overload

import numpy as np

Length = int | None
"""Samples or frames; None when only the samples tell."""


@overload
def resampled_length(length: int, orig_freq: int, new_freq: int) -> int: ...
@overload
def resampled_length(length: Length, orig_freq: int, new_freq: int) -> Length: ...


def resampled_length(length: Length, orig_freq: int, new_freq: int) -> Length:
    """Samples after resampling.

    torchaudio rounds the quotient to float32 before it takes the ceiling
    (`torch.ceil(torch.as_tensor(new_freq * length / orig_freq))`), which matters from about 2**20 samples on.

    Args:
        length: S.
        orig_freq: Hz before.
        new_freq: Hz after.
    """
    if length is None or orig_freq == new_freq:
        return length
    gcd = math.gcd(int(orig_freq), int(new_freq))
    return math.ceil(float(np.float32((int(new_freq) // gcd) * length / (int(orig_freq) // gcd))))


@overload
def frame_count(length: int, n_fft: int, hop_length: int, pad: int, center: bool) -> int: ...
@overload
def frame_count(length: Length, n_fft: int, hop_length: int, pad: int, center: bool) -> Length: ...


def frame_count(length: Length, n_fft: int, hop_length: int, pad: int, center: bool) -> Length:
    """Frames of a spectrogram; `1 + length // hop_length` for a centred one of even `n_fft` without padding.

    Args:
        length: S.
        n_fft: Samples of the transform.
        hop_length: Samples between frames.
        pad: Zeros put at both ends first.
        center: Whether half a window more is put at both ends.
    """
    if length is None:
        return None
    total = length + 2 * pad + (2 * (n_fft // 2) if center else 0)
    return 1 + (total - n_fft) // hop_length if total >= n_fft else 0
