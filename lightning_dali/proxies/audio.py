"""`ProxyAudio` stands in for a waveform, or what torchaudio made of it, while the dataset decides what to do with it.

Runs in the worker. It has the true shape `(C, S)`, the encoded bytes and the calls recorded so far; the tensor below is
one number with strides of zero. torchaudio's modules and the common tensor idioms are recorded (`audio_ops.py`);
whatever really needs samples *materialises* it: decode here, run the same steps with the same draws, go on eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass

from lightning_dali.proxies.audio_calls import AudioCall, AudioState
from lightning_dali.proxies.audio_source import AudioSource
from lightning_dali.proxies.stand_in import StaysHere, real_arguments, stand_in, who_needs_pixels

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "layout",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "is_meta",
    "grad_fn",
    "is_leaf",
)
_METADATA: set[Any] = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.is_tensor,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
}
"""What may be asked of a stand-in without touching a sample."""
_SIZES: set[Any] = {
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.numel,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]  # on the class it is a getter
}
"""Those that cannot be answered while the length is unknown (after `TrimSilence`)."""


class Replay(NamedTuple):
    """One recorded step, to be run on samples."""

    run: Callable[[Any], Any]
    """From a tensor to a tensor, or a tuple that begins with one."""
    generator: torch.Tensor | None = None
    """State of torch's default generator before it drew."""


class ProxyAudio(StaysHere, torch.Tensor):
    """Audio whose samples are still encoded; see the module."""

    source: AudioSource
    calls: tuple[AudioCall, ...]
    replays: tuple[Replay, ...]
    state: AudioState
    flat: bool
    """Whether it began as `(S,)`, as soundfile reads mono."""
    known: torch.Tensor | None
    """The samples, once materialised."""

    SIZE_ADVICE = "Mix to one channel (waveform.mean(0, keepdim=True), lightning_dali.proxies.audio_modules.Downmix)"
    """What to do where shapes of a batch differ in more than their lengths."""

    @classmethod
    def make(
        cls,
        source: AudioSource,
        *,
        calls: tuple[AudioCall, ...] = (),
        replays: tuple[Replay, ...] = (),
        state: AudioState | None = None,
        flat: bool = False,
    ) -> ProxyAudio:
        """Builds a proxy over `source`.

        Args:
            source: The samples, with the facts of their header.
            calls: What was recorded so far.
            replays: The same steps, as functions.
            state: Shape and rate after those calls; the source's own without any.
            flat: Whether one channel is `(S,)`.
        """
        if state is None:
            shape = (source.num_samples,) if flat else (source.num_channels, source.num_samples)
            state = AudioState(shape, source.sample_rate)
        size = [0 if length is None else length for length in state.shape]
        self: ProxyAudio = torch.Tensor._make_subclass(cls, stand_in(size, torch.float32))
        self.source, self.calls, self.replays, self.state, self.flat = source, calls, replays, state, flat
        self.known = None
        return self

    @classmethod
    def of_result(cls, result: torch.Tensor) -> ProxyAudio:
        """A proxy around a finished tensor, so that it may stand in a batch beside proxies."""
        plain = result.detach().as_subclass(torch.Tensor)
        self = cls.make(AudioSource.from_result(plain), state=AudioState(tuple(plain.shape), 0, plain.dim() > 2))
        self.known = plain
        return self

    @classmethod
    def stack(cls, items: Sequence[ProxyAudio]) -> AudioStack:
        """What collating makes of several."""
        return AudioStack(list(items))

    @property
    def batch_shape(self) -> tuple[int | None, ...]:
        """What must be the same in a batch: everything but the length."""
        return self.state.shape[:-1]

    def then(self, call: AudioCall, replay: Replay, *, features: bool | None = None) -> ProxyAudio:
        """A new proxy on which one more call was recorded."""
        state = AudioState(call.shape, call.sample_rate, self.state.features if features is None else features)
        return type(self).make(
            self.source,
            calls=(*self.calls, call),
            replays=(*self.replays, replay),
            state=state,
            flat=self.flat,
        )

    def become(self, other: ProxyAudio) -> ProxyAudio:
        """Takes over another's calls, for operations in place."""
        self.source, self.calls, self.replays, self.state, self.known = (
            other.source,
            other.calls,
            other.replays,
            other.state,
            other.known,
        )
        return self

    # -- samples, when they are really needed ---------------------------------------------------------------------

    def materialise(self, reason: str | None = None) -> torch.Tensor:
        """Decodes here and runs the recorded steps, with the numbers that were drawn."""
        if self.source.result is None or self.calls:
            self.source.note_materialised(reason or who_needs_pixels())
        if self.known is None:
            self.known = self._run()
        return self.known

    def _run(self) -> torch.Tensor:
        value: Any
        if self.source.result is not None:
            value = self.source.result
        else:
            value = torch.from_numpy(self.source.decode().copy())  # the user may write to it
            value = value[0] if self.flat else value
        before = None
        for replay in self.replays:
            if replay.generator is not None:
                before = torch.random.get_rng_state() if before is None else before
                torch.random.set_rng_state(replay.generator)
            value = replay.run(value)
            value = value[0] if isinstance(value, tuple) else value
        if before is not None:
            torch.random.set_rng_state(before)
        result: torch.Tensor = value
        return result

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """numpy's way to say `to`: what `soundfile.read` returned is expected to have it."""
        if str(dtype).endswith(("float32'>", "float64'>")) or str(dtype) in ("float32", "float64", "float", "f4", "f8"):
            return self
        return self.materialise("astype").numpy().astype(dtype, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from lightning_dali.proxies.audio_ops import record_function

        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _METADATA and isinstance(first, ProxyAudio):
            if func in _SIZES and None in first.state.shape:
                return func(first.materialise("its length, which trimming left open"), *args[1:], **kwargs)
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        recorded = record_function(func, args, kwargs)
        if recorded is not NotImplemented:
            return recorded
        reason = who_needs_pixels(func)
        real, more = real_arguments(args, kwargs, ProxyAudio, lambda proxy: proxy.materialise(reason))
        return func(*real, **more)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch passes its own options
        steps = ", ".join(call.name for call in self.calls)
        return f"ProxyAudio({self.source!r}, shape={self.state.shape}, calls=[{steps}])"


class AudioStack:
    """Several proxies that were collated: they become one `Padded` in the rank."""

    def __init__(self, items: list[ProxyAudio]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)
