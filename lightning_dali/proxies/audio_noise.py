"""White noise that depends on a seed and a position only: the same in the worker, on the CPU and on a GPU.

A generator's stream would differ between devices, and one for each row would mean one kernel launch for each row. Here
a position's number is a hash of the row's seed and the position, so a whole batch is a few elementwise passes and a row
does not depend on its batch mates. Runs in the worker and in the rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


_WEYL = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
"""SplitMix64's increment and multipliers (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014)."""
_CHANNEL_BITS = 40
"""A channel's positions start at a multiple of 2**40 samples."""
MAX_SEED = 1 << 62
"""Seeds lie in `[0, MAX_SEED)`."""


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def white_noise(seeds: Tensor, num_channels: int, num_samples: int) -> Tensor:
    """Standard normal noise.

    Args:
        seeds: `(B,)`, int64, one a row.
        num_channels: C.
        num_samples: S. A shorter row is the start of a longer one.

    Returns:
        `(B, C, S)`, float32, on the seeds' device.
    """
    channels = torch.arange(num_channels, device=seeds.device).view(1, -1, 1) << _CHANNEL_BITS
    samples = torch.arange(1, num_samples + 1, device=seeds.device)
    bits = (channels + samples) * _WEYL + seeds.view(-1, 1, 1)
    bits = (bits ^ _shifted(bits, 30)) * _MIX_1
    bits = (bits ^ _shifted(bits, 27)) * _MIX_2
    bits = bits ^ _shifted(bits, 31)
    radius = (_shifted(bits, 40).to(torch.float32) + 0.5) * 2.0**-24
    angle = (bits & 0xFFFFFF).to(torch.float32) * (2 * math.pi * 2.0**-24)
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(angle)
