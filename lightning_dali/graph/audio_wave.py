"""Waveform steps on a padded batch, each row as torchaudio's module would do it alone. Runs in the rank, on any device.

A step takes rows `(B, S)` or `(B, C, S)`, the settings its rows share, and what was drawn for each row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchaudio import functional as F
from torchaudio import transforms as T

from lightning_dali.graph.audio_rows import Rows, exact_matmul
from lightning_dali.proxies.audio_noise import white_noise
from lightning_dali.proxies.audio_shapes import resampled_length

Settings = Mapping[str, Any]
Drawn = Sequence[Mapping[str, Any]]
"""One mapping a row."""


@functools.lru_cache(maxsize=64)
def _resampler(settings: tuple[tuple[str, Any], ...], device: torch.device) -> T.Resample:
    return T.Resample(**dict(settings)).to(device)


def resample(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.Resample` and `Speed`: its kernel, and zeros after the row's own end.

    On the CPU it is a convolution, as torchaudio's is. On CUDA cuDNN would take TF32 by default, so it is a matrix
    product over overlapping windows there.
    """
    if settings["orig_freq"] == settings["new_freq"]:
        return rows
    module = _resampler(tuple(sorted(settings.items())), rows.device)
    before, after = (int(settings[name]) // module.gcd for name in ("orig_freq", "new_freq"))
    lengths = tuple(resampled_length(length, before, after) for length in rows.lengths)
    flat = rows.data.reshape(-1, rows.data.shape[-1])
    if rows.data.is_cuda:
        padded = torch.nn.functional.pad(flat, (module.width, module.width + before))
        windows = padded.unfold(-1, module.kernel.shape[-1], before)
        out = exact_matmul(windows, module.kernel[:, 0].T).reshape(len(flat), -1)
    else:
        out = module(flat)
    out = out[:, : max(lengths)].reshape(*rows.data.shape[:-1], -1)
    return Rows(out, lengths).cleaned()


def vol(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.Vol`: a factor, then clamped to full scale."""
    gain, kind = settings["gain"], settings["gain_type"]
    if kind == "amplitude":
        return Rows((rows.data * gain).clamp_(-1, 1), rows.lengths)
    decibels = gain if kind == "db" else 10 * math.log10(gain)
    return Rows(F.gain(rows.data, decibels).clamp(-1, 1), rows.lengths)


def preemphasis(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.Preemphasis`."""
    return Rows(F.preemphasis(rows.data, settings["coeff"]), rows.lengths).cleaned()


def deemphasis(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.Deemphasis`, `y[n] = x[n] + coeff * y[n - 1]`, clamped to full scale.

    By doubling: after the pass with shift d every sample holds the last 2d terms. It needs no loop over samples, so no
    compiled extension, and ends when the terms are below float32's resolution.
    """
    out, factor, shift = rows.data, settings["coeff"], 1
    while shift < out.shape[-1] and abs(factor) > 1e-9:
        out = torch.cat([out[..., :shift], out[..., shift:] + factor * out[..., :-shift]], dim=-1)
        factor, shift = factor * factor, 2 * shift
    return Rows(out.clamp(-1, 1), rows.lengths).cleaned()


@functools.lru_cache(maxsize=64)
def _fade_curves(length_in: int, length_out: int, shape: str, device: torch.device) -> tuple[Tensor, Tensor]:
    module = T.Fade(length_in, length_out, shape)
    curves = module._fade_in(length_in, torch.device("cpu")), module._fade_out(length_out, torch.device("cpu"))
    return curves[0].to(device), curves[1].to(device)


def fade(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.Fade`, the end faded at the row's own end."""
    length_in, length_out = settings["fade_in_len"], settings["fade_out_len"]
    if min(rows.lengths) < max(length_in, length_out):
        raise ValueError(f"Fade of {max(length_in, length_out)} samples on a row of {min(rows.lengths)}")
    start, end = _fade_curves(length_in, length_out, settings["fade_shape"], rows.device)
    out = rows.data.clone()
    out[..., :length_in] *= start
    if length_out:
        at = rows.ends() - length_out + torch.arange(length_out, device=rows.device)
        at = at.expand(*out.shape[:-1], -1)
        out.scatter_(-1, at, out.gather(-1, at) * end)
    return Rows(out, rows.lengths)


def add_noise(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.functional.add_noise`, with `snr` in dB and `noise` `(S,)` or a white noise's `seed` for each row.

    A ratio of infinity adds nothing, and so does noise that is silent (torchaudio gives NaN then).
    """
    noise = _noise_of(rows, drawn) * rows.valid()
    signal, disturbance = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 for x in (rows.data, noise))
    ratio = 10 * (torch.log10(signal) - torch.log10(disturbance))
    scale = 10 ** ((ratio - rows.host([row["snr"] for row in drawn])) / 20)
    return Rows(rows.data + scale.nan_to_num(0, posinf=0) * noise, rows.lengths)


def dither(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`Dither`: white noise of a fixed deviation."""
    if settings["amount"] == 0:
        return rows
    return Rows(rows.data + settings["amount"] * _noise_of(rows, drawn), rows.lengths).cleaned()


def _noise_of(rows: Rows, drawn: Drawn) -> Tensor:
    """Noise for each row, broadcastable to the data; not cut at the rows' ends."""
    channels = rows.data.shape[1] if rows.data.dim() == 3 else 1
    if all("seed" in row for row in drawn):
        seeds = rows.put(torch.tensor([row["seed"] for row in drawn]))
        noise = white_noise(seeds, channels, rows.data.shape[-1])
        return noise if rows.data.dim() == 3 else noise[:, 0]
    noise = rows.data.new_zeros((len(drawn), 1, rows.data.shape[-1]))
    for target, row, length in zip(noise, drawn, rows.lengths, strict=True):
        target[0, :length] = rows.put(row["noise"][:length])
    return noise.expand(rows.data.shape) if rows.data.dim() == 3 else noise[:, 0]


def downmix(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`Downmix`: the mean of the channels, `(B, C, S)` to `(B, 1, S)`."""
    return Rows(rows.data.mean(-2, keepdim=True), rows.lengths)


def opposite_phase(data: Tensor) -> Tensor:
    """Which rows' channels cancel each other when they are mixed to mono; see `media.audio_decode.downmix`.

    Args:
        data: `(B, C, S)`.

    Returns:
        `(B,)`, bool, on the data's device.
    """
    mixed = data.mean(-2).square().sum(-1)
    return (mixed < 1e-3 * data.square().mean(-2).sum(-1)) & (data.shape[-2] > 1)


def trim_silence(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`TrimSilence`; waits for the device, since the lengths depend on the samples."""
    hop, window = settings["hop_length"], settings["frame_length"]
    flat = rows.data.reshape(len(rows.lengths), -1, rows.data.shape[-1])
    power = torch.nn.functional.avg_pool1d(flat.square(), window, hop, window // 2).amax(1)
    frames = torch.arange(power.shape[-1], device=rows.device)
    own = frames <= rows.put(torch.tensor(rows.lengths)).unsqueeze(1) // hop
    power = power * own
    loud = power > power.amax(-1, keepdim=True) * 10 ** (-settings["top_db"] / 10)
    first, last = loud.int().argmax(-1), loud.shape[-1] - 1 - loud.flip(-1).int().argmax(-1)
    bounds = torch.stack([first * hop, (last + 1) * hop, loud.any(-1)]).tolist()
    starts = [start if some else 0 for start, _, some in zip(*bounds, strict=True)]
    stops = [min(n, stop) if some else n for n, _, stop, some in zip(rows.lengths, *bounds, strict=True)]
    lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    at = rows.host(starts, torch.int64) + torch.arange(max(lengths), device=rows.device)
    at = at.clamp(max=rows.data.shape[-1] - 1).expand(*rows.data.shape[:-1], -1)
    return Rows(rows.data.gather(-1, at), lengths).cleaned()
