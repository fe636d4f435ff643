"""Spectral steps on a padded batch, each row as torchaudio's module would do it alone. Runs in the rank, on any device.

A step takes rows `(B, S)` or `(B, C, S)` (spectrograms are made of them), or `(B, F, T)` or `(B, C, F, T)`, the
settings its rows share, and what was drawn for each row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torchaudio import functional as F

from lightning_dali.graph.audio_rows import Rows, exact_matmul
from lightning_dali.graph.audio_wave import Drawn, Settings
from lightning_dali.proxies.audio_masks import MaskDraw, mask_bounds, mask_limit
from lightning_dali.proxies.audio_settings import make_window
from lightning_dali.proxies.audio_shapes import frame_count


@functools.lru_cache(maxsize=64)
def _window(name: str | bytes, length: int, device: torch.device) -> Tensor:
    return make_window(name, length).to(device)


@functools.lru_cache(maxsize=64)
def _mel_filters(
    n_stft: int,
    f_min: float,
    f_max: float,
    n_mels: int,
    sample_rate: int,
    norm: str | None,
    scale: str,
    device: torch.device,
) -> Tensor:
    filters: Tensor = F.melscale_fbanks(n_stft, f_min, f_max, n_mels, sample_rate, norm, scale)
    return filters.T.contiguous().to(device)


@functools.lru_cache(maxsize=64)
def _dct(n_mfcc: int, n_mels: int, norm: str | None, device: torch.device) -> Tensor:
    matrix: Tensor = F.create_dct(n_mfcc, n_mels, norm)
    return matrix.T.contiguous().to(device)


def clear_buffers() -> None:
    """Lets go of the windows, filters and matrices that were made on devices."""
    for cache in (_window, _mel_filters, _dct):
        cache.cache_clear()


def spectrogram(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.Spectrogram`; a centred one is padded at each row's own end."""
    n_fft, hop, pad, center = (settings[name] for name in ("n_fft", "hop_length", "pad", "center"))
    frames = tuple(frame_count(length, n_fft, hop, pad, center) for length in rows.lengths)
    if min(frames) < 1:
        raise ValueError(f"a row of {min(rows.lengths)} samples is less than one window of {n_fft}")
    data = torch.nn.functional.pad(rows.data, (pad, pad)) if pad else rows.data
    if center:
        data = _pad_ends(
            Rows(data, tuple(length + 2 * pad for length in rows.lengths)), n_fft // 2, settings["pad_mode"]
        )
    window = _window(settings["window"], settings["win_length"], rows.device)
    power = settings["power"]
    out = F.spectrogram(
        data,
        0,
        window,
        n_fft,
        hop,
        settings["win_length"],
        None if power == 2.0 else power,
        settings["normalized"],
        center=False,
        onesided=settings["onesided"],
    )
    if power == 2.0:  # not the square of a square root: that takes four times as long on the CPU
        squares = torch.view_as_real(out).square()
        out = squares[..., 0] + squares[..., 1]
    return Rows(out[..., : max(frames)], frames).cleaned()


def _pad_ends(rows: Rows, amount: int, mode: str) -> Tensor:
    """Pads each row by `amount` before its start and after its own end, as `torch.stft` pads one row."""
    if mode == "reflect" and min(rows.lengths) <= amount:
        raise ValueError(f"a row of {min(rows.lengths)} samples is too short to reflect {amount} of them at its ends")
    out = torch.nn.functional.pad(rows.data, (amount, amount))
    if mode == "constant" or amount == 0:
        return out
    steps = torch.arange(amount, device=rows.device)
    ends = rows.ends()
    if mode == "reflect":
        head, source = rows.data[..., 1 : amount + 1].flip(-1), ends - 2 - steps
    else:
        head, source = rows.data[..., :1], ends - 1 - torch.zeros_like(steps)
    out[..., :amount] = head
    leading = rows.data.shape[:-1]
    tail = rows.data.gather(-1, source.expand(*leading, -1))
    return out.scatter_(-1, (ends + amount + steps).expand(*leading, -1), tail)


def mel_scale(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.MelScale`."""
    names = ("n_stft", "f_min", "f_max", "n_mels", "sample_rate", "norm", "mel_scale")
    filters = _mel_filters(*(settings[name] for name in names), rows.device)
    return Rows(exact_matmul(filters, rows.data), rows.lengths)


def mel_spectrogram(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.MelSpectrogram`."""
    return mel_scale(spectrogram(rows, settings, drawn), settings, drawn)


def mfcc(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.MFCC`; its two logarithms are `AmplitudeToDB("power", top_db)` and `log(x + 1e-6)`."""
    mels = mel_spectrogram(rows, settings, drawn)
    if settings["log_mels"]:
        logs = log(mels, {"offset": 1e-6}, drawn)
    else:
        decibels = {"multiplier": 10.0, "amin": 1e-10, "db_multiplier": 0.0, "top_db": settings["top_db"]}
        logs = amplitude_to_db(mels, decibels, drawn)
    matrix = _dct(settings["n_mfcc"], settings["n_mels"], settings["dct_norm"], rows.device)
    return Rows(exact_matmul(matrix, logs.data), mels.lengths)


def amplitude_to_db(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`torchaudio.transforms.AmplitudeToDB`, `top_db` below each row's own maximum."""
    multiplier = settings["multiplier"]
    out = multiplier * torch.log10(rows.data.clamp(min=settings["amin"]))
    out -= multiplier * settings["db_multiplier"]
    if settings["top_db"] is not None:  # padding is at the least possible value, so it never is the maximum
        floor = out.flatten(1).amax(1) - settings["top_db"]
        out = torch.maximum(out, floor.view(-1, *(1,) * (out.dim() - 1)))
    return Rows(out, rows.lengths).cleaned()


def log(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`Log`."""
    return Rows((rows.data + settings["offset"]).log_(), rows.lengths).cleaned()


def cmvn(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`CMVN`: over each row's own frames."""
    per_feature = settings["per"] == "feature"
    dims = (-1,) if per_feature else tuple(range(1, rows.data.dim()))
    others = 1 if per_feature else rows.data[0, ..., 0].numel()
    counts = [max(length, 1) * others for length in rows.lengths]
    mean = rows.data.sum(dims, keepdim=True) / rows.host(counts)
    centred = Rows(rows.data - mean, rows.lengths).cleaned()
    if not settings["norm_vars"]:
        return centred
    free = rows.host([max(count - 1, 1) for count in counts])
    deviation = (centred.data.square().sum(dims, keepdim=True) / free).sqrt()
    return Rows(centred.data / (deviation + settings["eps"]), rows.lengths)


def global_cmvn(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`GlobalCMVN`."""
    mean, std = (rows.put(torch.tensor(settings[name]).unsqueeze(-1)) for name in ("mean", "std"))
    return Rows((rows.data - mean) / std, rows.lengths).cleaned()


def masking(rows: Rows, settings: Settings, drawn: Drawn) -> Rows:
    """`FrequencyMasking`, `TimeMasking`, `SpecAugment`: zeros, or the row's own mean, in the ranges that were drawn."""
    masked = _masked(rows, [row["masks"] for row in drawn])
    if masked is None:
        return rows
    if settings.get("zero_masking", True):
        return Rows(rows.data.masked_fill(masked, 0.0), rows.lengths)
    others = rows.data[0, ..., 0].numel()
    sums = rows.data.sum(tuple(range(1, rows.data.dim())), keepdim=True)
    mean = sums / rows.host([max(length, 1) * others for length in rows.lengths])
    return Rows(torch.where(masked, mean, rows.data), rows.lengths).cleaned()


def _masked(rows: Rows, drawn: Sequence[Sequence[MaskDraw]]) -> Tensor | None:
    """Which positions any mask covers, broadcastable to the data; None where there is no mask."""
    covered: dict[str, Tensor] = {}
    bins, frames = rows.data.shape[-2:]
    for masks in zip(*drawn, strict=True):  # the same mask of every row
        axis = masks[0].axis
        sizes = rows.lengths if axis == "time" else (bins,) * len(masks)
        start, stop = (rows.put(bound) for bound in _bounds(masks, sizes))
        positions = torch.arange(frames if axis == "time" else bins, device=rows.device)
        inside = (positions >= start.unsqueeze(-1)) & (positions < stop.unsqueeze(-1))  # (B, 1 or C, T or F)
        covered[axis] = inside | covered[axis] if axis in covered else inside
    parts = [inside.unsqueeze(-2 if axis == "time" else -1) for axis, inside in covered.items()]
    if not parts:
        return None
    whole = functools.reduce(torch.bitwise_or, parts)  # (B, 1 or C, F, T)
    return whole if rows.data.dim() == 4 else whole[:, 0]


def _bounds(masks: Sequence[MaskDraw], sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Ranges `(B, 1 or C)` of one mask of every row, on the host."""
    count = max(1, *(len(mask.width) for mask in masks))
    none = (0.0,) * count
    width, start = torch.tensor([[m.width or none, m.start or none] for m in masks], dtype=torch.float32).unbind(1)
    limit = [[mask_limit(m.mask_param, m.p, size)] for m, size in zip(masks, sizes, strict=True)]
    return mask_bounds(width, start, torch.tensor(limit), torch.tensor(sizes).unsqueeze(1))
