"""Rows of audio, run through torchaudio each alone and through this package as one padded batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchaudio import transforms as T

from lightning_dali.graph.audio import apply_calls
from lightning_dali.padded import Padded
from lightning_dali.proxies import audio_modules as own
from lightning_dali.proxies.audio_calls import record_audio

RATE = 16000
LENGTHS = (8000, 3721, 6400, 1600, 7999)


def make_rows(channels: int | None = 1, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Tones in noise, `(S,)` or `(C, S)`."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number, length in enumerate(lengths):
        time = torch.arange(length) / RATE
        noise = torch.randn(channels or 1, length, generator=generator)
        row = 0.3 * torch.sin(2 * math.pi * (440 + 50 * number) * time) + 0.01 * noise
        rows.append(row if channels else row[0])
    return rows


def run_alone(module: nn.Module, row: Tensor) -> Tensor:
    """torchaudio on one row; speed changes return the lengths too, which no later module could take."""
    for part in module if isinstance(module, nn.Sequential) else [module]:
        out = part(row)
        row = out[0] if isinstance(out, tuple) else out
    return row


def both(module: nn.Module, rows: Sequence[Tensor], device: str = "cpu") -> tuple[list[Tensor], Padded]:
    """Each row alone, and the batch, under the same seeds."""
    alone, calls = [], []
    for seed, row in enumerate(rows):
        torch.random.default_generator.manual_seed(seed)
        alone.append(run_alone(module, row))
        torch.random.default_generator.manual_seed(seed)
        channels = row.shape[0] if row.dim() == 2 else None
        calls.append(record_audio(module, num_samples=row.shape[-1], sample_rate=RATE, num_channels=channels))
    batch = Padded.stack(list(rows))
    out = apply_calls(Padded(batch.data.to(device), batch.lengths), calls)
    for row_calls, reference in zip(calls, alone, strict=True):
        known = row_calls[-1].shape
        assert known[:-1] == tuple(reference.shape[:-1]) and known[-1] in (None, reference.shape[-1])
    assert out.lengths.tolist() == [reference.shape[-1] for reference in alone]
    assert out.data.cpu().masked_fill(_valid(out), 0).eq(0).all(), "what lies beyond a row's length must be zero"
    return alone, out.to("cpu")


def _valid(batch: Padded) -> Tensor:
    return (
        Padded(batch.data.cpu(), batch.lengths.cpu())
        .mask()
        .view(len(batch.lengths), *(1,) * (batch.data.dim() - 2), -1)
    )


def worst(alone: Sequence[Tensor], batch: Padded) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(alone, batch.unpad(), strict=True))


MEL = {"sample_rate": RATE, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}


def pipeline() -> nn.Sequential:
    """A training pipeline for speech recognition."""
    return nn.Sequential(
        T.SpeedPerturbation(RATE, [0.9, 1.0, 1.1]),
        T.Preemphasis(),
        T.MelSpectrogram(**MEL),
        own.Log(),
        own.CMVN(),
        T.SpecAugment(2, 20, 2, 15, zero_masking=True),
    )
