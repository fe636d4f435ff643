"""A torchaudio module's settings as values: hashable, small to send, enough to compute the same elsewhere.

Runs in the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torchaudio import functional as F
from torchaudio import transforms as T

from lightning_dali.proxies import audio_modules as own

Config = tuple[tuple[str, Any], ...]
"""Settings sorted by name. Equal ones are the same object, so that a pickle of many calls holds each once."""


class NotRecordable(Exception):
    """A transform that needs samples in the worker; the message says which, and why."""


def require(condition: bool, reason: str) -> None:
    """Raises `NotRecordable` unless the condition holds."""
    if not condition:
        raise NotRecordable(reason)


def settings_of(module: nn.Module) -> Config:
    """The settings of a module, as they are now.

    Raises:
        NotRecordable: When its settings do not say all (a complex spectrogram, filters of its own, a rare padding
            mode).
    """
    values = _values(module)
    known = _known.get(module)
    if known is None or known[0] != values:
        known = _known[module] = (values, _interned(tuple(sorted(_settings(module).items()))))
    return known[1]


class _Itself:
    """Equal to what holds the same object, which it keeps alive: a number alone could be another one's by then."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


_known: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Config]] = WeakKeyDictionary()
"""Settings by what they were made of: a sample's calls ask for the same ones again and again."""


def _values(module: Any) -> tuple[Any, ...]:
    """All that the settings of a module depend on, cheap to compare."""
    kind = type(module)
    values = tuple([getattr(module, name) for name in _ATTRIBUTES.get(kind, ())])
    if kind is T.Spectrogram or kind is T.MelScale:
        buffer = module.window if kind is T.Spectrogram else module.fb
        return (*values, _Itself(buffer), buffer._version)
    if kind is T.MelSpectrogram:
        return (*_values(module.spectrogram), *_values(module.mel_scale))
    if kind is T.MFCC:
        return (*values, module.norm, *_values(module.MelSpectrogram))
    return values


def config_of(module: nn.Module) -> dict[str, Any]:
    """The settings of a module, as `graph.audio.apply_audio` takes them (without what is drawn)."""
    return _settings(module)


@functools.lru_cache(maxsize=256)
def _interned(config: Config) -> Config:
    return config


_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    T.Spectrogram: (
        "n_fft",
        "win_length",
        "hop_length",
        "pad",
        "power",
        "normalized",
        "center",
        "pad_mode",
        "onesided",
    ),
    T.MelScale: ("n_mels", "sample_rate", "f_min", "f_max", "n_stft", "norm", "mel_scale"),
    T.MFCC: ("n_mfcc", "log_mels", "top_db"),
    T.AmplitudeToDB: ("multiplier", "amin", "db_multiplier", "top_db"),
    T.Resample: ("orig_freq", "new_freq", "resampling_method", "lowpass_filter_width", "rolloff", "beta"),
    T.Vol: ("gain", "gain_type"),
    T.Preemphasis: ("coeff",),
    T.Deemphasis: ("coeff",),
    T.Fade: ("fade_in_len", "fade_out_len", "fade_shape"),
    T.FrequencyMasking: ("mask_param", "iid_masks", "p"),
    T.TimeMasking: ("mask_param", "iid_masks", "p"),
    T.SpecAugment: (
        "n_time_masks",
        "time_mask_param",
        "n_freq_masks",
        "freq_mask_param",
        "iid_masks",
        "p",
        "zero_masking",
    ),
    own.Log: ("offset",),
    own.CMVN: ("per", "norm_vars", "eps"),
    own.GlobalCMVN: ("mean", "std"),
    own.Dither: ("amount",),
    own.TrimSilence: ("top_db", "frame_length", "hop_length"),
}


def _settings(module: Any) -> dict[str, Any]:
    kind = type(module)
    settings = {name: getattr(module, name) for name in _ATTRIBUTES.get(kind, ())}
    if kind is T.Spectrogram:
        require(module.power is not None, "Spectrogram(power=None) is complex")
        require(module.pad_mode in ("reflect", "constant", "replicate"), f"Spectrogram(pad_mode={module.pad_mode!r})")
        settings["window"] = _remembered(module, module.window, _window)
    elif kind is T.MelScale:
        require(
            _remembered(module, module.fb, functools.partial(_is_standard, module)), "MelScale with filters of its own"
        )
    elif kind is T.MelSpectrogram:
        settings = {**_settings(module.spectrogram), **_settings(module.mel_scale)}
    elif kind is T.MFCC:
        settings = {**_settings(module.MelSpectrogram), **settings, "dct_norm": module.norm}
    return settings


_remembered_facts: WeakKeyDictionary[nn.Module, tuple[Tensor, int, Any]] = WeakKeyDictionary()


def _remembered(module: nn.Module, buffer: Tensor, look: Callable[[Tensor], Any]) -> Any:
    """What `look` says about a module's buffer; asked again when the buffer is another or has been written to."""
    known = _remembered_facts.get(module)
    if known is None or known[0] is not buffer or known[1] != buffer._version:
        known = _remembered_facts[module] = (buffer, buffer._version, look(buffer))
    return known[2]


_WINDOWS: dict[str, Callable[..., Tensor]] = {
    "hann_window": torch.hann_window,
    "hamming_window": torch.hamming_window,
    "blackman_window": torch.blackman_window,
    "bartlett_window": torch.bartlett_window,
    "ones": torch.ones,
}
"""Windows that travel by name; any other travels as its values."""


def _window(window: Tensor) -> str | bytes:
    for name, make in _WINDOWS.items():
        if torch.equal(window, make(len(window))):
            return name
    return window.detach().to(torch.float32).cpu().numpy().tobytes()


def make_window(name: str | bytes, length: int) -> Tensor:
    """The window that a setting stands for, `(length,)`, float32."""
    if isinstance(name, bytes):
        return torch.frombuffer(bytearray(name), dtype=torch.float32)
    return _WINDOWS[name](length)


def _is_standard(mel: Any, filters: Tensor) -> bool:
    return torch.equal(
        filters,
        F.melscale_fbanks(mel.n_stft, mel.f_min, mel.f_max, mel.n_mels, mel.sample_rate, mel.norm, mel.mel_scale),
    )
