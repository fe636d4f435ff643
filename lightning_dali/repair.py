"""A batch of which some samples are no good: who takes their places, and which ones do not fit the others.

Runs in the worker. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_dali.seeding import sample_seed
from lightning_dali.structure import field_name, leaves

Signature = dict[str, str]
"""What each field is, in words."""


def without_gaps(
    samples: Sequence[Any], indices: Sequence[int], *, policy: str, seed: int, epoch: int
) -> tuple[list[Any], list[int]]:
    """Drops or replaces the samples that are None; at least one must not be.

    Args:
        samples: Of one batch.
        indices: Their dataset indices.
        policy: "drop", or "replace": another sample of the batch, which one depends on the seed, epoch and index only.
        seed: Of the run.
        epoch: From 0.

    Returns:
        The samples and indices of the batch that is left.
    """
    good = [row for row, sample in enumerate(samples) if sample is not None]
    if policy == "drop":
        return [samples[row] for row in good], [indices[row] for row in good]
    rows = [
        row if sample is not None else good[sample_seed(seed, epoch, indices[row]) % len(good)]
        for row, sample in enumerate(samples)
    ]
    return [samples[row] for row in rows], [indices[row] for row in rows]


def outliers(samples: Sequence[Any], *, is_proxy: Callable[[Any], bool]) -> dict[int, str]:
    """The samples that are not like most others of the batch: their positions, and what is different.

    Structure, types and dtypes are compared first, shapes only where these agree. Empty where no more than half are alike.
    """
    for shapes in (False, True):
        signatures = [_signature(sample, is_proxy, shapes=shapes) for sample in samples]
        usual, count = Counter(tuple(one.items()) for one in signatures).most_common(1)[0]
        if count == len(samples):
            continue
        if 2 * count <= len(samples):
            return {}
        expected = dict(usual)
        return {row: _difference(expected, one) for row, one in enumerate(signatures) if one != expected}
    return {}


def _signature(sample: Any, is_proxy: Callable[[Any], bool], *, shapes: bool) -> Signature:
    return {field_name(path): _kind(leaf, is_proxy, shapes=shapes) for path, leaf in leaves(sample)}


def _kind(leaf: Any, is_proxy: Callable[[Any], bool], *, shapes: bool) -> str:
    if is_proxy(leaf):
        return "media"
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        kind = "array" if isinstance(leaf, np.ndarray) else "tensor"
        return f"{kind} {leaf.dtype} of {tuple(leaf.shape) if shapes else f'{leaf.ndim} dimensions'}"
    if isinstance(leaf, (int, float, np.number)):
        return "number"
    return type(leaf).__name__


def _difference(expected: Signature, found: Signature) -> str:
    for name in [*expected, *found]:
        ours, theirs = found.get(name, "missing"), expected.get(name, "missing")
        if ours != theirs:
            return f"unlike most samples of its batch: field {name!r} is {ours}, there {theirs}"
    return "unlike most samples of its batch: its fields come in another order"
