"""Records what torchaudio's modules would do to a waveform: static settings, and the numbers they draw.

A module's random numbers are drawn here, from torch's default generator, in the order and with the calls of
torchaudio's own `forward`: under the same seed the same masks come out. Arithmetic on samples is left to
`lightning_dali.graph.audio`. Runs in the worker; `explain` and the rank read the result.
"""

# Over 300 lines: a table of modules, a few lines each.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchaudio import transforms as T

from lightning_dali.proxies import audio_modules as own
from lightning_dali.proxies.audio_masks import MaskDraw, draw_mask
from lightning_dali.proxies.audio_settings import Config, NotRecordable, config_of, require, settings_of
from lightning_dali.proxies.audio_shapes import Length, frame_count, resampled_length

__all__ = ["VOCABULARY", "AudioCall", "AudioState", "NotRecordable", "config_of", "record_audio", "record_module"]


class AudioCall(NamedTuple):
    """One module's work on one waveform or spectrogram."""

    name: str
    """The module's class name."""
    config: Config
    """Its settings."""
    drawn: Mapping[str, Any]
    """What it drew for this sample."""
    shape: tuple[Length, ...]
    """Shape after it: `(S,)`, `(C, S)`, `(F, T)` or `(C, F, T)`; None where only the samples tell (`TrimSilence`)."""
    sample_rate: int
    """Hz, after it."""

    @property
    def kwargs(self) -> dict[str, Any]:
        """Settings and drawn numbers, as `graph.audio.apply_audio` takes them."""
        return {**dict(self.config), **self.drawn}


class AudioState(NamedTuple):
    """What a stand-in for audio is like at some point of a pipeline."""

    shape: tuple[Length, ...]
    """`(S,)` or `(C, S)` for waveforms, `(F, T)` or `(C, F, T)` for spectrograms."""
    sample_rate: int
    """Hz."""
    features: bool = False
    """Whether it is a spectrogram."""


_Recorder = Callable[[Any, AudioState], AudioCall]


def record_audio(
    transform: Any, *, num_samples: Length, sample_rate: int, num_channels: int | None = 1
) -> list[AudioCall]:
    """Records a transform on a waveform of that size, drawing its random numbers.

    Args:
        transform: A torchaudio module of the vocabulary, one of `audio_modules`, or these in (nested) `nn.Sequential`
            or in a `Compose` (anything of that class name with a list `transforms`). None records nothing.
        num_samples: S; None when it is not known before decoding (time masks are then placed by the rank, from the same
            numbers).
        sample_rate: Hz.
        num_channels: C of `(C, S)`; None for `(S,)`.

    Returns:
        The calls in order. `calls[-1].shape` is the shape of the result.

    Raises:
        NotRecordable: When a part of it needs samples. The generator is then as it was before the call, so that running
            the transform itself draws the same numbers.
    """
    shape: tuple[Length, ...] = (num_samples,) if num_channels is None else (num_channels, num_samples)
    return record_module(transform, AudioState(shape, sample_rate))[0]


def record_module(module: Any, state: AudioState) -> tuple[list[AudioCall], AudioState]:
    """Records one module, or a container of them, on a stand-in in the given state; see `record_audio`.

    Returns:
        The calls, and the state after them.
    """
    before = torch.random.get_rng_state()
    try:
        return _walk(module, state)
    except NotRecordable:
        torch.random.set_rng_state(before)
        raise


def _walk(module: Any, state: AudioState) -> tuple[list[AudioCall], AudioState]:
    calls: list[AudioCall] = []
    parts = _parts(module)
    if parts is not None:
        for part in parts:
            more, state = _walk(part, state)
            calls += more
        return calls, state
    recorder = _RECORDERS.get(type(module))
    name = getattr(module, "__name__", type(module).__name__)
    if recorder is None:
        raise NotRecordable(f"{name} is not in the vocabulary ({', '.join(VOCABULARY)})")
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotRecordable(f"{name} has forward hooks")
    call = recorder(module, state)
    return [call], AudioState(call.shape, call.sample_rate, state.features or type(module) in _MAKE_FEATURES)


def record_run(modules: Sequence[Any], state: AudioState) -> tuple[list[tuple[AudioCall, Tensor | None]], AudioState]:
    """Records modules in turn until one has to be run itself, or is none of the vocabulary.

    Returns:
        For each that was recorded its call, and the generator's state before it where it drew; and the state after them.
    """
    recorded: list[tuple[AudioCall, Tensor | None]] = []
    for module in modules:
        if type(module) not in _RECORDERS:
            break
        before = torch.random.get_rng_state()
        try:
            (call,), state = _walk(module, state)
        except NotRecordable:
            torch.random.set_rng_state(before)
            break
        recorded.append((call, before if call.drawn else None))
    return recorded, state


def _parts(module: Any) -> list[Any] | None:
    """What a container applies in turn; None for anything else."""
    if module is None or type(module) is nn.Identity:
        return []
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return list(module)
    if type(module).__name__ == "Compose" and isinstance(getattr(module, "transforms", None), (list, tuple)):
        return list(module.transforms)
    return None


def _require_wave(module: Any, state: AudioState) -> None:
    require(not state.features, f"{type(module).__name__} takes a waveform, here comes a spectrogram {state.shape}")


def _require_features(module: Any, state: AudioState) -> None:
    require(state.features, f"{type(module).__name__} takes a spectrogram, here comes a waveform {state.shape}")


def _call(module: Any, state: AudioState, drawn: Mapping[str, Any] | None = None, **changes: Any) -> AudioCall:
    after = state._replace(**changes) if changes else state
    return AudioCall(type(module).__name__, settings_of(module), drawn or {}, after.shape, after.sample_rate)


# Recorders: waveforms


def _same_shape(module: Any, state: AudioState) -> AudioCall:
    return _call(module, state)


def _waveform(module: Any, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    return _call(module, state)


def _resample(module: T.Resample, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    length = resampled_length(state.shape[-1], module.orig_freq, module.new_freq)
    rate = round(state.sample_rate * module.new_freq / module.orig_freq)
    return _call(module, state, shape=(*state.shape[:-1], length), sample_rate=rate)


def _speed(module: T.Speed, state: AudioState) -> AudioCall:
    """Resamples and calls it the old rate. Returns the waveform only, where torchaudio adds lengths to it."""
    call = _resample(module.resampler, state)
    return call._replace(name="Speed", sample_rate=state.sample_rate)


def _speed_perturbation(module: T.SpeedPerturbation, state: AudioState) -> AudioCall:
    return _speed(module.speeders[int(torch.randint(len(module.speeders), ()))], state)


def _fade(module: T.Fade, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    longest, length = max(module.fade_in_len, module.fade_out_len), state.shape[-1]
    require(length is None or length >= longest, f"Fade of {longest} samples on {length}")
    return _call(module, state)


def _dither(module: own.Dither, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    return _call(module, state, module.draw() if module.amount else {"seed": 0})


def _random_noise(module: own.RandomNoise, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    length = state.shape[-1]
    require(length is not None or module.noises is None, "RandomNoise from waveforms on a length that is not known")
    return _call(module, state, module.draw(length or 0))._replace(name="AddNoise")


def _downmix(module: own.Downmix, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    require(len(state.shape) == 2, f"Downmix takes (C, S), here comes {state.shape}")
    return _call(module, state, shape=(1, state.shape[-1]))


def _trim(module: own.TrimSilence, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    return _call(module, state, shape=(*state.shape[:-1], None))


# Recorders: features


def _spectrogram(module: Any, state: AudioState) -> AudioCall:
    _require_wave(module, state)
    config, length = settings_of(module), state.shape[-1]
    settings = dict(config)
    n_fft, pad = settings["n_fft"], settings["pad"]
    frames = frame_count(length, n_fft, settings["hop_length"], pad, settings["center"])
    if length is not None:
        if settings["center"] and settings["pad_mode"] == "reflect":
            require(length + 2 * pad > n_fft // 2, f"{length} samples are too few to reflect {n_fft // 2} of them")
        require(frames is not None and frames > 0, f"{length} samples are less than one window of {n_fft}")
    bins = settings.get("n_mfcc") or settings.get("n_mels")
    if bins is None:
        bins = n_fft // 2 + 1 if settings["onesided"] else n_fft
    return AudioCall(type(module).__name__, config, {}, (*state.shape[:-1], bins, frames), state.sample_rate)


def _mel_scale(module: T.MelScale, state: AudioState) -> AudioCall:
    _require_features(module, state)
    require(state.shape[-2] == module.n_stft, f"MelScale(n_stft={module.n_stft}) on {state.shape[-2]} bins")
    return _call(module, state, shape=(*state.shape[:-2], module.n_mels, state.shape[-1]))


def _features(module: Any, state: AudioState) -> AudioCall:
    _require_features(module, state)
    return _call(module, state)


def _global_cmvn(module: own.GlobalCMVN, state: AudioState) -> AudioCall:
    _require_features(module, state)
    sizes = {len(module.mean), len(module.std)} - {1, state.shape[-2]}
    require(not sizes, f"GlobalCMVN of {sizes} features on {state.shape[-2]}")
    return _call(module, state)


# Recorders: masks


def _axis_masking(module: Any, state: AudioState) -> AudioCall:
    _require_features(module, state)
    axis = "frequency" if module.axis == 1 else "time"
    iid = bool(module.iid_masks)
    require(not iid or len(state.shape) > 2, f"{type(module).__name__}(iid_masks=True) takes (C, F, T): {state.shape}")
    return _call(module, state, {"masks": _masks([(axis, module.mask_param)], module.p, state, iid=iid)})


def _spec_augment(module: T.SpecAugment, state: AudioState) -> AudioCall:
    _require_features(module, state)
    wanted = [("time", module.time_mask_param)] * module.n_time_masks
    wanted += [("frequency", module.freq_mask_param)] * module.n_freq_masks
    iid = len(state.shape) > 2 and module.iid_masks is True
    return _call(module, state, {"masks": _masks(wanted, module.p, state, iid=iid)})


def _masks(wanted: list[tuple[str, int]], p: float, state: AudioState, *, iid: bool) -> tuple[MaskDraw, ...]:
    count = int(state.shape[0] or 1) if iid else 1
    sizes = {"time": state.shape[-1], "frequency": state.shape[-2]}
    return tuple(draw_mask(axis, param, p, size=sizes[axis], count=count) for axis, param in wanted)


_RECORDERS: dict[type, _Recorder] = {
    T.Resample: _resample,
    T.Speed: _speed,
    T.SpeedPerturbation: _speed_perturbation,
    T.Vol: _waveform,
    T.Preemphasis: _waveform,
    T.Deemphasis: _waveform,
    T.Fade: _fade,
    T.Spectrogram: _spectrogram,
    T.MelSpectrogram: _spectrogram,
    T.MFCC: _spectrogram,
    T.MelScale: _mel_scale,
    T.AmplitudeToDB: _features,
    T.FrequencyMasking: _axis_masking,
    T.TimeMasking: _axis_masking,
    T.SpecAugment: _spec_augment,
    own.Log: _same_shape,
    own.CMVN: _features,
    own.GlobalCMVN: _global_cmvn,
    own.Dither: _dither,
    own.RandomNoise: _random_noise,
    own.Downmix: _downmix,
    own.TrimSilence: _trim,
}
_MAKE_FEATURES = (T.Spectrogram, T.MelSpectrogram, T.MFCC)
VOCABULARY = tuple(sorted(kind.__name__ for kind in _RECORDERS))
"""Names of the modules that are recorded."""
