"""Speech transforms that torchaudio has no module for, to use beside its own.

Called on a waveform or spectrogram they compute; on a stand-in they are recorded like torchaudio's (`audio_calls.py`),
and the rank does the arithmetic. All randomness comes from torch's default generator. Runs in the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchaudio
from torch import Tensor, nn

from lightning_dali.proxies.audio_noise import MAX_SEED, white_noise

MEL_PRESETS: dict[str, dict[str, Any]] = {"torchaudio": {}, "librosa": {"norm": "slaney", "mel_scale": "slaney"}}
"""What the presets change of torchaudio's defaults."""


def mel_spectrogram(preset: str = "torchaudio", **kwargs: Any) -> torchaudio.transforms.MelSpectrogram:
    """Makes torchaudio's `MelSpectrogram` with another library's mel filters.

    Args:
        preset: "torchaudio" (its defaults: HTK scale, no norm) or "librosa" (Slaney's scale and norm). librosa 0.10 and
            later also pads with zeros: add `pad_mode="constant"` to get that.
        kwargs: Passed on; they win over the preset.

    Raises:
        ValueError: For an unknown preset.
    """
    if preset not in MEL_PRESETS:
        raise ValueError(f"mel_spectrogram knows the presets {sorted(MEL_PRESETS)}, got {preset!r}")
    return torchaudio.transforms.MelSpectrogram(**{**MEL_PRESETS[preset], **kwargs})


class Log(nn.Module):
    """Natural logarithm of `x + offset`."""

    def __init__(self, offset: float = 1e-6) -> None:
        """Takes the offset that keeps silence finite; 1e-6 is what torchaudio's `MFCC(log_mels=True)` adds."""
        super().__init__()
        self.offset = offset

    def forward(self, specgram: Tensor) -> Tensor:
        """Any shape."""
        return torch.log(specgram + self.offset)


class CMVN(nn.Module):
    """Normalises an utterance by its own mean and standard deviation over time.

    Args:
        per: "feature": every feature for itself (NeMo's `per_feature`); "utterance": one mean and deviation for all.
        norm_vars: Whether to divide by the deviation (unbiased), or only subtract the mean.
        eps: Added to the deviation; 1e-5 is NeMo's.
    """

    def __init__(self, per: str = "feature", *, norm_vars: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        if per not in ("feature", "utterance"):
            raise ValueError(f'CMVN normalises per "feature" or "utterance", got {per!r}')
        self.per, self.norm_vars, self.eps = per, norm_vars, eps

    def forward(self, specgram: Tensor) -> Tensor:
        """`(..., F, T)`, one utterance."""
        dims = (-1,) if self.per == "feature" else tuple(range(specgram.dim()))
        centred = specgram - specgram.mean(dims, keepdim=True)
        if not self.norm_vars:
            return centred
        count = specgram.shape[-1] if self.per == "feature" else specgram.numel()
        deviation = (centred.square().sum(dims, keepdim=True) / max(count - 1, 1)).sqrt()
        return centred / (deviation + self.eps)


class GlobalCMVN(nn.Module):
    """Normalises by the mean and standard deviation of a whole dataset.

    Args:
        mean: One number, or one for each feature.
        std: Likewise; above 0.
    """

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        self.mean = tuple(map(float, mean)) if isinstance(mean, Sequence) else (float(mean),)
        self.std = tuple(map(float, std)) if isinstance(std, Sequence) else (float(std),)
        if min(self.std) <= 0:
            raise ValueError(f"GlobalCMVN divides by std, which must be above 0, got {min(self.std)}")

    def forward(self, specgram: Tensor) -> Tensor:
        """`(..., F, T)`."""
        mean = torch.tensor(self.mean, device=specgram.device).unsqueeze(-1)
        std = torch.tensor(self.std, device=specgram.device).unsqueeze(-1)
        return (specgram - mean) / std


class Downmix(nn.Module):
    """Mono: the mean of the channels, `(C, S)` to `(1, S)`."""

    def forward(self, waveform: Tensor) -> Tensor:
        """`(C, S)`."""
        return waveform.mean(-2, keepdim=True)


class Dither(nn.Module):
    """Adds white noise of a fixed standard deviation; 0, the default, adds none (NeMo's and Kaldi's add 1e-5)."""

    def __init__(self, amount: float = 0.0) -> None:
        super().__init__()
        self.amount = amount

    def draw(self) -> dict[str, Any]:
        """Draws the noise's seed."""
        return {"seed": int(torch.randint(MAX_SEED, ()))}

    def forward(self, waveform: Tensor) -> Tensor:
        """`(S,)` or `(C, S)`."""
        if self.amount == 0:
            return waveform
        return waveform + self.amount * _noise_like(waveform, self.draw()["seed"])


class RandomNoise(nn.Module):
    """Adds noise at a signal-to-noise ratio drawn uniformly, with `torchaudio.functional.add_noise`'s scaling.

    Args:
        snr: Lowest and highest ratio in dB, or one number.
        noises: Waveforms `(S',)` to choose from, each tiled and started anywhere; None for white noise.
        p: Probability of adding any.
    """

    def __init__(
        self, snr: float | tuple[float, float] = (10.0, 20.0), *, noises: Sequence[Tensor] | None = None, p: float = 1.0
    ) -> None:
        super().__init__()
        self.snr = (snr, snr) if isinstance(snr, (int, float)) else (float(snr[0]), float(snr[1]))
        self.noises, self.p = noises, p
        if not 0 <= p <= 1:
            raise ValueError(f"RandomNoise adds noise with a probability p in [0, 1], got {p}")
        if noises is not None and (not noises or any(noise.dim() != 1 or not len(noise) for noise in noises)):
            raise ValueError("RandomNoise takes noises as waveforms (S',), at least one, none of them empty")

    def draw(self, num_samples: int) -> dict[str, Any]:
        """Draws the ratio, and the noise: a seed, or samples `(S,)`. No noise is a ratio of infinity."""
        low, high = self.snr
        absent = bool(torch.rand(()) >= self.p)
        drawn: dict[str, Any] = {"snr": low + (high - low) * float(torch.rand(()))}
        if self.noises is None:
            drawn["seed"] = int(torch.randint(MAX_SEED, ()))
        else:
            noise = self.noises[int(torch.randint(len(self.noises), ()))]
            start = int(torch.randint(len(noise), ()))
            drawn["noise"] = noise[(start + torch.arange(num_samples)) % len(noise)]
        return {**drawn, "snr": float("inf")} if absent else drawn

    def forward(self, waveform: Tensor) -> Tensor:
        """`(S,)` or `(C, S)`."""
        drawn = self.draw(waveform.shape[-1])
        if drawn["snr"] == float("inf"):
            return waveform
        noise = _noise_like(waveform, drawn["seed"]) if "seed" in drawn else drawn["noise"].expand(waveform.shape)
        ratio = torch.full(waveform.shape[:-1], drawn["snr"])
        noisy: Tensor = torchaudio.functional.add_noise(waveform, noise, ratio)
        return noisy


class TrimSilence(nn.Module):
    """Drops silence at both ends: what is more than `top_db` below the loudest frame, as `librosa.effects.trim` does.

    A waveform that is silent throughout is kept as it is.

    Args:
        top_db: How far below the loudest frame silence begins, in dB.
        frame_length: Samples of the window whose power is taken.
        hop_length: Samples between windows; the ends are found to this precision.
    """

    def __init__(self, top_db: float = 60.0, *, frame_length: int = 2048, hop_length: int = 512) -> None:
        super().__init__()
        self.top_db, self.frame_length, self.hop_length = top_db, frame_length, hop_length

    def forward(self, waveform: Tensor) -> Tensor:
        """`(S,)` or `(C, S)`; the shape after depends on the samples."""
        rows = waveform.reshape(1, -1, waveform.shape[-1])
        power = nn.functional.avg_pool1d(rows.square(), self.frame_length, self.hop_length, self.frame_length // 2)
        loud = power[0].amax(0)[: 1 + waveform.shape[-1] // self.hop_length]
        frames = (loud > loud.max() * 10 ** (-self.top_db / 10)).nonzero().flatten()
        if not len(frames):
            return waveform
        return waveform[..., int(frames[0]) * self.hop_length : (int(frames[-1]) + 1) * self.hop_length]


def _noise_like(waveform: Tensor, seed: int) -> Tensor:
    channels = waveform.shape[0] if waveform.dim() == 2 else 1
    return white_noise(torch.tensor([seed]), channels, waveform.shape[-1]).view(waveform.shape)
