"""Seeds of every draw: which number seeds a sample, a batch, an epoch's order, and how to put it in force.

Runs in the worker (`seeded` around each sample) and in the rank (the order of an epoch, batch transforms).
Needs no GPU and never touches CUDA.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["batch_seed", "epoch_seed", "sample_seed", "seed_all", "seeded", "stream_seed"]

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _mix(x: int) -> int:
    """One output of splitmix64 for the state `x`; a bijection on 64 bits.

    Increment: the golden ratio, odd, of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014. Shifts and multipliers: variant 13 of David Stafford, "Better Bit Mixing" (2011), as in Vigna's
    https://prng.di.unimi.it/splitmix64.c.
    """
    x = (x + 0x9E37_79B9_7F4A_7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return x ^ (x >> 31)


# One domain for each use, so that sample 7 and step 7 of an epoch do not draw the same numbers.
_SAMPLE, _BATCH, _ORDER, _STREAM = _mix(1), _mix(2), _mix(3), _mix(4)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Seed of one sample's transforms in one epoch, whichever rank and worker fetches it.

    Args:
        seed: the run's seed; any integer, taken modulo 2**64.
        epoch: the epoch.
        index: the dataset index; no two of an epoch share a seed.

    Returns:
        64 bits, as a non-negative integer.
    """
    return _mix(_mix(_mix(_SAMPLE ^ (seed & _MASK)) ^ (epoch & _MASK)) ^ (index & _MASK))


def batch_seed(seed: int, epoch: int, step: int) -> int:
    """Seed of what is drawn once a batch (MixUp and friends), 64 bits; `step` is `BatchTask.step`."""
    return _mix(_mix(_mix(_BATCH ^ (seed & _MASK)) ^ (epoch & _MASK)) ^ (step & _MASK))


def stream_seed(seed: int, epoch: int, number: int) -> int:
    """Seed of what an iterated dataset itself draws for its sample `number`, 64 bits; `sample_seed` is what follows it."""
    return _mix(_mix(_mix(_STREAM ^ (seed & _MASK)) ^ (epoch & _MASK)) ^ (number & _MASK))


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed of an epoch's order, 64 bits, the same on every rank."""
    return _mix(_mix(_ORDER ^ (seed & _MASK)) ^ (epoch & _MASK))


@contextmanager
def seeded(seed: int, *, restore: bool) -> Iterator[None]:
    """Seed Python's `random`, numpy's global state and torch's CPU generator for a block.

    These states belong to the process, not to the thread: no other thread may draw from them meanwhile.

    Args:
        seed: any integer, taken modulo 2**64.
        restore: put the three states back afterwards, also after an exception. True in the rank's own process, where
            the states are the user's. It costs 120 us where False costs 11 (numpy's state is slow to read and write):
            for many samples in a row put one `restore=True` around several `restore=False`.
    """
    if not restore:
        seed_all(seed)
        yield
        return
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        seed_all(seed)
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def seed_all(seed: int) -> None:
    """Seeds the three states for good: `seeded(seed, restore=False)` where there is no block to put around."""
    seed = _mix(seed)
    random.seed(seed)
    # numpy and torch take 32 bits each and seed the same Mersenne Twister: from the same bits they would draw alike.
    np.random.seed(seed >> 32)
    # Not torch.manual_seed: it seeds CUDA too, which `restore` would not undo, and before CUDA is initialised it stores
    # that for later with a formatted traceback, for 130 us a sample (torch 2.11, torch.cuda._lazy_call).
    torch.default_generator.manual_seed(seed & 0xFFFF_FFFF)
