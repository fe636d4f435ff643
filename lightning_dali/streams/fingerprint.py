"""Whether two processes got the same samples: a digest of what a stream began with. Runs in the worker."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch

from lightning_dali.structure import field_name, leaves

SAMPLES = 8
"""How many are looked at."""


def fingerprint(samples: Sequence[Any]) -> str | None:
    """A digest of the first samples, as the dataset gave them; None: they tell nothing, being all alike.

    Where a sample has encoded media, its tensors are left out: they may be augmented, differently in each process.
    """
    digests = [_digest(sample) for sample in samples[:SAMPLES]]
    if len(set(digests)) < 2:
        return None
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _digest(sample: Any) -> bytes:
    parts = []
    encoded = False
    for path, leaf in leaves(sample):
        media = _media(leaf)
        encoded = encoded or media is not None
        parts.append((field_name(path).encode(), leaf, media))
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf, media in parts:
        if media is not None or not encoded or isinstance(leaf, (str, int)):
            digest.update(name)
            digest.update(_bytes(leaf) if media is None else media)
    return digest.digest()


def _media(leaf: Any) -> bytes | None:
    """A file's bytes, its path, or what a stand-in stands for."""
    if isinstance(leaf, (bytes, bytearray)):
        return bytes(leaf)
    source = getattr(leaf, "source", None)
    for name in ("data", "video", "path"):
        value = getattr(source, name, None)
        if isinstance(value, (bytes, str)):
            return value.encode() if isinstance(value, str) else value
        if isinstance(value, np.ndarray):
            return value.tobytes()
    inputs = getattr(getattr(leaf, "call", None), "inputs", None)  # of a pipeline of the user's own
    encoded = [array.tobytes() for array in inputs.values() if array.dtype == np.uint8] if inputs else []
    return b"".join(encoded) or None


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().as_subclass(torch.Tensor).cpu()
        leaf = leaf.float().numpy() if leaf.is_floating_point() else leaf.numpy()
    if isinstance(leaf, PIL.Image.Image):
        return leaf.tobytes()
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return leaf.tobytes()
    return repr(leaf).encode()
