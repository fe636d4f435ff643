"""What is recorded on a `ProxyAudio`: torchaudio's modules, and the tensor idioms that stand beside them.

Runs in the worker. A function of the table answers with a new proxy, or with `NotImplemented`: then samples are needed.
"""

# Over 300 lines: a table of torch's operations on audio, a few lines each.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchaudio import transforms as T

from lightning_dali.proxies.audio import ProxyAudio, Replay
from lightning_dali.proxies.audio_calls import AudioCall, NotRecordable, record_module, record_run
from lightning_dali.proxies.audio_settings import _interned
from lightning_dali.proxies.audio_shapes import resampled_length

_SPEED = (T.Speed, T.SpeedPerturbation)
POINTWISE = frozenset({"add", "mul", "div", "pow", "clamp", "log", "log10", "log2", "log1p", "exp", "sqrt", "abs"})
"""Elementwise functions that are recorded, by torch's names."""


# -- modules


def record_call(module: nn.Module, proxy: ProxyAudio, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `module(proxy, *args, **kwargs)` returns, recorded; `NotImplemented` where the module has to run itself."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not args and not kwargs:
        return _sequence(module, proxy)
    if type(module) is T.AddNoise:
        return _add_noise(module, proxy, *args, **kwargs)
    lengths = args[0] if args else kwargs.get("lengths")
    if type(module) in _SPEED and len(args) + len(kwargs) <= 1:
        recorded = _record(module, proxy)
        return recorded if recorded is NotImplemented else (recorded, _speed_lengths(recorded, lengths))
    return NotImplemented if args or kwargs else _record(module, proxy)


def _record(module: nn.Module, proxy: ProxyAudio) -> Any:
    before = torch.random.get_rng_state()
    try:
        calls, state = record_module(module, proxy.state)
    except NotRecordable:
        return NotImplemented
    if len(calls) != 1:  # a container: its parts are recorded one by one
        return proxy if not calls else NotImplemented
    replay = Replay(module, before if calls[0].drawn or type(module) is T.SpeedPerturbation else None)
    return proxy.then(calls[0], replay, features=state.features)


def _sequence(module: nn.Sequential, value: Any) -> Any:
    """`nn.Sequential`, where `Speed` hands on its waveform only."""
    if module._forward_hooks or module._forward_pre_hooks:
        return NotImplemented
    parts = list(module)
    while parts:
        if isinstance(value, ProxyAudio) and value.source.result is None:
            value, done = _record_run(parts, value)
            parts = parts[done:]
            if not parts:
                break
        part = parts.pop(0)
        value = part(value)
        if type(part) in _SPEED and isinstance(value, tuple):
            value = value[0]
    return value


_ONE_BY_ONE = (*_SPEED, T.Resample)
"""Modules whose call does more than to be recorded (`_speed_lengths`, `audio_capture._check_rate`)."""


def _record_run(parts: Sequence[nn.Module], proxy: ProxyAudio) -> tuple[ProxyAudio, int]:
    """Records as many of the first modules as can be at once; the proxy after them, and how many they were."""
    stop = next((i for i, part in enumerate(parts) if type(part) in _ONE_BY_ONE), len(parts))
    recorded, state = record_run(parts[:stop], proxy.state)
    if not recorded:
        return proxy, 0
    replays = [Replay(part, before) for part, (_, before) in zip(parts, recorded, strict=False)]
    after = proxy.make(
        proxy.source,
        calls=(*proxy.calls, *(call for call, _ in recorded)),
        replays=(*proxy.replays, *replays),
        state=state,
        flat=proxy.flat,
    )
    return after, len(recorded)


def _speed_lengths(proxy: ProxyAudio, lengths: Any) -> Any:
    if lengths is None:
        return None
    settings = dict(proxy.calls[-1].config)
    return torch.ceil(lengths * settings["new_freq"] / settings["orig_freq"]).to(lengths.dtype)


def _add_noise(module: nn.Module, proxy: ProxyAudio, noise: Any = None, snr: Any = None, lengths: Any = None) -> Any:
    """`AddNoise` with one ratio and noise that is the same for all channels."""
    shape = proxy.state.shape
    single = len(shape) == 1 or shape[0] == 1
    if not isinstance(noise, torch.Tensor) or lengths is not None or proxy.state.features or not single:
        return NotImplemented
    samples = noise.materialise("AddNoise's noise") if isinstance(noise, ProxyAudio) else noise
    ratio = torch.as_tensor(snr)
    if samples.numel() != shape[-1] or ratio.numel() != 1:
        return NotImplemented
    drawn = {"snr": float(ratio), "noise": samples.reshape(-1)}
    call = AudioCall("AddNoise", (), drawn, shape, proxy.state.sample_rate)
    return proxy.then(call, Replay(lambda wave: module(wave, samples, ratio)))


# -- functions


def resample(
    proxy: ProxyAudio, run: Callable[[Any], Any], *, orig_freq: int, new_freq: int, **settings: Any
) -> ProxyAudio:
    """Records `torchaudio.functional.resample`; `run` does it on samples."""
    if orig_freq == new_freq:
        return proxy
    defaults = {"lowpass_filter_width": 6, "rolloff": 0.99, "resampling_method": "sinc_interp_hann", "beta": None}
    config = {"orig_freq": int(orig_freq), "new_freq": int(new_freq), **defaults, **settings}
    *leading, length = proxy.state.shape
    rate = round(proxy.state.sample_rate * new_freq / orig_freq)
    shape = (*leading, resampled_length(length, orig_freq, new_freq))
    return proxy.then(AudioCall("Resample", _config(**config), {}, shape, rate), Replay(run))


def _config(**settings: Any) -> Any:
    return _interned(tuple(sorted(settings.items())))


def _then(proxy: ProxyAudio, name: str, shape: Sequence[int | None], run: Callable[[Any], Any], **settings: Any) -> Any:
    call = AudioCall(name, _config(**settings), {}, tuple(shape), proxy.state.sample_rate)
    return proxy.then(call, Replay(run))


def _identity(proxy: ProxyAudio, *args: Any, **kwargs: Any) -> Any:
    return proxy


def _to(proxy: ProxyAudio, *args: Any, **kwargs: Any) -> Any:
    """`to` and `type`: it is float32 on the CPU already."""
    if not args and not kwargs:
        return NotImplemented
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            if value != torch.float32:
                return NotImplemented
        elif isinstance(value, (str, torch.device)) and torch.device(value).type != "cpu":
            return NotImplemented
    return proxy


def _mean(proxy: ProxyAudio, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """The mean of the channels: mono."""
    dim = kwargs.pop("axis", dim)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if kwargs or proxy.state.features or len(proxy.state.shape) != 2 or dim not in (0, -2):
        return NotImplemented
    length = proxy.state.shape[-1]
    if proxy.state.shape[0] != 1:
        proxy = _then(proxy, "Downmix", (1, length), lambda wave: wave.mean(0, keepdim=True))
    return proxy if keepdim else _squeeze(proxy, 0)


def _squeeze(proxy: ProxyAudio, dim: Any = None) -> Any:
    shape = proxy.state.shape
    if len(shape) < 2 or shape[0] != 1:
        return proxy if dim in (0, -len(shape)) or (dim is None and 1 not in shape) else NotImplemented
    if dim not in (None, 0, -len(shape)) or (dim is None and 1 in shape[1:]):
        return NotImplemented
    return _then(proxy, "Squeeze", shape[1:], lambda value: value.squeeze(0))


def _unsqueeze(proxy: ProxyAudio, dim: Any) -> Any:
    shape = proxy.state.shape
    if dim not in (0, -len(shape) - 1) or len(shape) > 2 or (len(shape) == 2 and not proxy.state.features):
        return NotImplemented
    return _then(proxy, "Unsqueeze", (1, *shape), lambda value: value.unsqueeze(0))


def _narrow(proxy: ProxyAudio, dim: int, start: int, length: int) -> Any:
    rank = len(proxy.state.shape)
    return _slice(proxy, start, start + length) if dim in (rank - 1, -1) else NotImplemented


def _slice(proxy: ProxyAudio, start: Any, stop: Any) -> Any:
    """Positions `[start, stop)` of the last dimension."""
    length = proxy.state.shape[-1]
    if length is None:
        return NotImplemented
    first, last, _ = slice(start, stop).indices(length)
    if first < last and not proxy.calls and (part := proxy.source.cut(first, last)) is not None:
        return ProxyAudio.make(part, flat=proxy.flat)
    return _window(proxy, first, last)


def _window(proxy: ProxyAudio, start: int, stop: int) -> Any:
    """Positions `[start, stop)` of the last dimension, zeros where there are none."""
    *leading, length = proxy.state.shape
    if length is None or start >= stop:
        return NotImplemented
    if (start, stop) == (0, length):
        return proxy
    run = functools.partial(torch.nn.functional.pad, pad=(-start, stop - length))
    call = AudioCall("Window", (), {"start": start, "stop": stop}, (*leading, stop - start), proxy.state.sample_rate)
    return proxy.then(call, Replay(run))


def _getitem(proxy: ProxyAudio, index: Any) -> Any:
    """`[0]`, `[:, a:b]`, `[..., a:b]`, `[:1]`, `[None]`."""
    keys = index if isinstance(index, tuple) else (index,)
    rank = len(proxy.state.shape)
    if len(keys) == 1 and keys[0] is None:
        return _unsqueeze(proxy, 0)
    if Ellipsis in [key for key in keys if not isinstance(key, torch.Tensor)]:
        at = keys.index(Ellipsis)
        keys = (*keys[:at], *[slice(None)] * (rank - len(keys) + 1), *keys[at + 1 :])
    keys = (*keys, *[slice(None)] * (rank - len(keys)))
    plain = all(type(key) is int or (isinstance(key, slice) and key.step in (None, 1)) for key in keys)
    if len(keys) != rank or not plain or any(key != slice(None) for key in keys[1:-1]):
        return NotImplemented
    if isinstance(keys[-1], int):
        return NotImplemented
    if rank > 1:
        proxy = _channel(proxy, keys[0])
        if proxy is NotImplemented:
            return NotImplemented
    return _slice(proxy, keys[-1].start, keys[-1].stop)


def _channel(proxy: ProxyAudio, key: Any) -> Any:
    """One channel, as `[0]` or `[:1]`."""
    shape = proxy.state.shape
    count = shape[0]
    if key == slice(None) or (isinstance(key, slice) and count is not None and key.indices(count)[:2] == (0, count)):
        return proxy
    if count is None or (proxy.state.features and len(shape) == 2):
        return NotImplemented  # rows of a spectrogram without channels
    first, last, _ = (slice(key, key + 1 or None) if isinstance(key, int) else key).indices(count)
    if last - first != 1:
        return NotImplemented
    if count > 1:
        run = functools.partial(torch.Tensor.narrow, dim=0, start=first, length=1)
        proxy = _then(proxy, "Channel", (1, *shape[1:]), run, index=first)
    return _squeeze(proxy, 0) if isinstance(key, int) else proxy


def _pad(proxy: ProxyAudio, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Zeros at the ends of the last dimension; a negative number cuts."""
    length = proxy.state.shape[-1]
    if mode != "constant" or value or len(pad) != 2 or length is None:
        return NotImplemented
    return _window(proxy, -int(pad[0]), length + int(pad[1]))


_OPERATORS = {
    "__add__": "add",
    "__radd__": "add",
    "__iadd__": "add",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__imul__": "mul",
    "__truediv__": "div",
    "__itruediv__": "div",
    "true_divide": "div",
    "__pow__": "pow",
    "square": "square",
    "clip": "clamp",
    "multiply": "mul",
    "divide": "div",
}


def _pointwise(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An elementwise function with plain numbers."""
    proxy, *rest = args
    op = _OPERATORS.get(name, name.removesuffix("_"))
    values = list(rest)
    if op in ("sub", "subtract", "__sub__", "__isub__") and len(rest) == 1 and isinstance(rest[0], (int, float)):
        op, values = "add", [-rest[0]]
    elif op == "square":
        op, values = "pow", [2]
    if op not in POINTWISE or not isinstance(proxy, ProxyAudio):
        return NotImplemented
    if op == "clamp":
        values = [rest[0] if rest else kwargs.get("min"), rest[1] if len(rest) > 1 else kwargs.get("max")]
    elif kwargs:
        return NotImplemented
    if not all(value is None or type(value) in (int, float) for value in values):
        return NotImplemented
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    out_of_place = getattr(torch, op)

    def run(value: Any) -> Any:
        return out_of_place(value, *values)

    recorded = _then(proxy, "Pointwise", proxy.state.shape, run, op=op, values=tuple(values))
    return proxy.become(recorded) if in_place else recorded


_TABLE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("contiguous", "clone", "detach", "cpu", "float", "requires_grad_"), _identity),
    "to": _to,
    "type": _to,
    "mean": _mean,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "narrow": _narrow,
    "__getitem__": _getitem,
    "pad": _pad,
}


def record_function(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a torch function returns on a proxy, recorded; `NotImplemented` where it needs samples."""
    name = getattr(func, "__name__", "")
    if not args or not isinstance(args[0], ProxyAudio) or args[0].source.result is not None:
        return NotImplemented
    recorder = _TABLE.get(name)
    if recorder is None:
        return _pointwise(name, func, args, kwargs)
    try:
        return recorder(*args, **kwargs)
    except TypeError:  # an overload that is not recorded
        return NotImplemented
