"""While a dataset's `__getitem__` runs, what it loads with torchaudio or soundfile is a `ProxyAudio`.

Runs in the worker. Captured are `torchaudio.load` (also where a dataset imported it by name), `soundfile.read` of mono,
`torchaudio.functional.resample`, and calls of modules on a proxy. `probing` stops a dataset at what it would load.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import soundfile
import torch
import torchaudio
import torchaudio.datasets
from torch import nn

from lightning_dali.proxies.audio import ProxyAudio
from lightning_dali.proxies.audio_ops import record_call, resample
from lightning_dali.proxies.audio_source import AudioSource, Span, frames_span, seconds_span
from lightning_dali.proxies.capture import Replaced, capture, register_capture

_options = threading.local()


class Probed(BaseException):
    """What a dataset was about to load. Not an `Exception`: a dataset may catch those."""

    def __init__(self, file: Any, span: Span | None) -> None:
        super().__init__(file)
        self.file, self.span = file, span


@contextmanager
def capture_audio(sample_rate: int | None = None) -> Iterator[None]:
    """While it is open, what this thread loads comes as proxies.

    Args:
        sample_rate: Hz; what has another rate is resampled when it is loaded.
    """
    _options.sample_rate, _options.on = sample_rate, True
    try:
        with capture("audio"):
            yield
    finally:
        _options.sample_rate, _options.on = None, False


@contextmanager
def probing() -> Iterator[None]:
    """While it is open, loading raises `Probed` with the file."""
    _options.probing = True
    try:
        with capture_audio():
            yield
    finally:
        _options.probing = False


def load_audio(
    file: Any, *, offset_seconds: float = 0.0, duration_seconds: float | None = None
) -> tuple[torch.Tensor, int]:
    """Loads audio or a segment of it, like `torchaudio.load`, which needs torchcodec and counts in samples.

    Inside a `SpeechDataModule`'s worker this returns a stand-in, like every other loader.

    Args:
        file: A path, encoded bytes or a binary file object.
        offset_seconds: Where to begin.
        duration_seconds: How much, up to the end of the file; None: all.

    Returns:
        Samples `(C, S)`, float32, and their rate in Hz.

    Raises:
        AudioError: It is no usable audio.
    """
    span = seconds_span(offset_seconds, duration_seconds)
    if getattr(_options, "on", False):
        return _captured(file, span)
    source = _source(file, span)
    return torch.from_numpy(source.decode()), source.sample_rate


def _source(file: Any, span: Span | None) -> AudioSource:
    if isinstance(file, (str, os.PathLike)):
        return AudioSource.from_path(os.fspath(file), span=span)
    if isinstance(file, (bytes, bytearray, memoryview)):
        return AudioSource.from_bytes(bytes(file), span=span)
    name = getattr(file, "name", None)
    return AudioSource.from_bytes(file.read(), path=name if isinstance(name, str) else None, span=span)


def _captured(file: Any, span: Span | None, *, flat: bool = False) -> tuple[ProxyAudio, int]:
    if getattr(_options, "probing", False):
        raise Probed(file, span)
    proxy = at_rate(ProxyAudio.make(_source(file, span), flat=flat), getattr(_options, "sample_rate", None))
    return proxy, proxy.state.sample_rate


def at_rate(proxy: ProxyAudio, sample_rate: int | None) -> ProxyAudio:
    """The waveform at that rate; as it is where its own rate is not known."""
    found = proxy.state.sample_rate
    if sample_rate is None or not found or found == sample_rate or proxy.state.features:
        return proxy
    run = functools.partial(torchaudio.functional.resample, orig_freq=found, new_freq=sample_rate)
    return resample(proxy, run, orig_freq=found, new_freq=sample_rate)


def _load(
    original: Callable[..., Any],
    uri: Any,
    frame_offset: int = 0,
    num_frames: int = -1,
    normalize: bool = True,
    channels_first: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Any:
    proxy, rate = _captured(uri, frames_span(frame_offset, num_frames))
    return (proxy if channels_first else proxy.materialise("channels_first=False").T), rate


def _load_waveform(original: Callable[..., Any], root: str, filename: str, exp_sample_rate: int) -> Any:
    """torchaudio's own datasets check the file's rate, which `sample_rate` may change."""
    proxy, _ = _captured(os.path.join(root, filename), None)
    found = proxy.source.sample_rate
    if exp_sample_rate != found:
        raise ValueError(f"sample rate should be {exp_sample_rate}, but got {found}")
    return proxy


def _read(
    original: Callable[..., Any],
    file: Any,
    frames: int = -1,
    start: int = 0,
    stop: int | None = None,
    dtype: str = "float64",
    always_2d: bool = False,
    fill_value: Any = None,
    out: Any = None,
    **kwargs: Any,
) -> Any:
    """`soundfile.read` of mono; more channels come as samples, for `(S, C)` has its length first."""
    plain = dtype in ("float32", "float64") and not always_2d and fill_value is None and out is None and start >= 0
    given = {"frames": frames, "start": start, "stop": stop, "dtype": dtype, "always_2d": always_2d}
    if not plain or kwargs or hasattr(file, "read"):
        return original(file, **given, fill_value=fill_value, out=out, **kwargs)
    count = frames if stop is None else stop - start
    proxy, rate = _captured(file, frames_span(start, count), flat=True)
    if proxy.source.num_channels > 1:
        return proxy.source.decode().T.astype(dtype), rate
    return proxy, rate


def _from_numpy(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """What `soundfile.read` returned is a tensor already."""
    if not isinstance(data, ProxyAudio):
        return original(data, *args, **kwargs)
    dtype = kwargs.get("dtype", args[0] if args else None)
    if dtype in (None, torch.float32):
        return data
    return original(data.materialise(f"dtype={dtype}"), *args, **kwargs)


def _resample(
    original: Callable[..., Any], waveform: Any, orig_freq: int, new_freq: int, *args: Any, **kwargs: Any
) -> Any:
    if not isinstance(waveform, ProxyAudio) or waveform.state.features or waveform.source.result is not None:
        return original(waveform, orig_freq, new_freq, *args, **kwargs)
    names = ("lowpass_filter_width", "rolloff", "resampling_method", "beta")
    settings = {**dict(zip(names, args, strict=False)), **kwargs}
    run = functools.partial(original, orig_freq=orig_freq, new_freq=new_freq, **settings)
    return resample(waveform, run, orig_freq=orig_freq, new_freq=new_freq, **settings)


def _call(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], ProxyAudio) and args[0].source.result is None:
        _check_rate(module, args[0])
        recorded = record_call(module, args[0], args[1:], kwargs)
        if recorded is not NotImplemented:
            return recorded
    return original(module, *args, **kwargs)


def _check_rate(module: nn.Module, proxy: ProxyAudio) -> None:
    """Refuses to resample twice."""
    wanted = getattr(_options, "sample_rate", None)
    if wanted is None or not isinstance(module, torchaudio.transforms.Resample):
        return
    before, rate = int(module.orig_freq), proxy.state.sample_rate
    if rate == wanted and before != rate and before == proxy.source.sample_rate:
        raise ValueError(
            f"Resample({before}, {int(module.new_freq)}) on audio that sample_rate={wanted} has resampled from {before} Hz "
            "already. Drop one of the two."
        )


@functools.lru_cache(maxsize=1)
def _replacements() -> list[Replaced]:
    datasets = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith("torchaudio.datasets.") and hasattr(module, "_load_waveform")
    ]
    return [
        (torchaudio, "load", _load),
        (torchaudio, "load_with_torchcodec", _load),
        (torchaudio.functional, "resample", _resample),
        (soundfile, "read", _read),
        (torch, "from_numpy", _from_numpy),
        (torch, "as_tensor", _from_numpy),
        (torch, "tensor", _from_numpy),
        (nn.Module, "__call__", _call),
        *((module, "_load_waveform", _load_waveform) for module in datasets),
    ]


register_capture("audio", _replacements)
