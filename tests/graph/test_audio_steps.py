"""Every recorded step on a padded batch against torchaudio on each row alone, with the same draw."""

from __future__ import annotations

import pytest
import torch
import torchaudio
from torch import nn
from torchaudio import transforms as T

from lightning_dali.graph.audio import STEPS, apply_calls
from lightning_dali.padded import Padded
from lightning_dali.proxies import audio_modules as own
from lightning_dali.proxies.audio_calls import record_audio
from tests.graph.audio_rows import MEL, RATE, both, make_rows, pipeline, worst


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the batch lies."""
    return str(request.param)


POWER = [
    T.Spectrogram(),
    T.Spectrogram(n_fft=512, win_length=400, hop_length=160, power=1.0),
    T.Spectrogram(n_fft=401, hop_length=100, center=True),
    T.Spectrogram(n_fft=400, pad=37, pad_mode="constant"),
    T.Spectrogram(n_fft=400, pad_mode="replicate"),
    T.Spectrogram(n_fft=400, center=False, normalized=True),
    T.Spectrogram(n_fft=400, normalized="frame_length", onesided=False),
    T.Spectrogram(n_fft=400, window_fn=torch.hamming_window),
    T.Spectrogram(n_fft=400, window_fn=torch.hann_window, wkwargs={"periodic": False}),
    T.MelSpectrogram(),
    T.MelSpectrogram(**MEL),
    own.mel_spectrogram("librosa", **MEL),
    nn.Sequential(T.Spectrogram(n_fft=512), T.MelScale(n_stft=257, n_mels=40)),
]
FADES = [T.Fade(300, 500, shape) for shape in ("linear", "exponential", "logarithmic", "quarter_sine", "half_sine")]
WAVES: list[tuple[nn.Module, float]] = [
    (T.Resample(RATE, 8000), 1e-6),
    (T.Resample(RATE, 22050), 1e-6),
    (T.Resample(RATE, RATE), 0),
    (T.Resample(RATE, 11025, resampling_method="sinc_interp_kaiser", lowpass_filter_width=12, beta=9.0), 1e-6),
    (T.Speed(RATE, 0.9), 1e-6),
    (T.Speed(RATE, 1.0), 0),
    (T.SpeedPerturbation(RATE, [0.9, 1.1, 1.0]), 1e-6),
    (T.Vol(1.7), 0),
    (T.Vol(-6.0, gain_type="db"), 0),
    (T.Vol(0.5, gain_type="power"), 0),
    (T.Preemphasis(), 0),
    (T.Deemphasis(0.9), 1e-5),
    (T.Deemphasis(), 1e-5),
    *((module, 1e-6) for module in FADES),
    (T.Fade(0, 100), 1e-6),
    (T.Fade(100, 0), 1e-6),
    (own.RandomNoise((5.0, 15.0)), 1e-5),
    (own.RandomNoise(10.0, p=0.5), 1e-5),
    (own.RandomNoise(10.0, noises=[torch.rand(5000) - 0.5, torch.rand(20000) - 0.5]), 1e-5),
    (own.Dither(1e-3), 1e-7),
    (own.Dither(), 0),
    (own.TrimSilence(), 0),
]


def ident(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, nn.Module) else None


@pytest.mark.parametrize("channels", [None, 1, 2])
@pytest.mark.parametrize(("module", "atol"), WAVES, ids=ident)
def test_waveform_steps(module, atol, channels, device):
    alone, batch = both(module, make_rows(channels), device)
    assert worst(alone, batch) <= max(atol, 0 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("channels", [None, 2])
@pytest.mark.parametrize("module", POWER, ids=ident)
def test_spectrograms(module, channels, device):
    alone, batch = both(module, make_rows(channels), device)
    if device == "cpu":
        floor = 1e-6
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(alone, batch.unpad(), strict=True))
    else:
        # Another FFT rounds another way. Below -60 dB of the strongest bin float32 has no digits left to compare: there
        # torchaudio itself is up to 0.019 from its own result in float64.
        power = getattr(module, "power", 2.0)
        floor = max(float(row.abs().max()) for row in alone) * 10 ** (-3 * power)
    logs = [(row + floor).log() for row in alone]
    assert worst(logs, Padded((batch.data + floor).log(), batch.lengths)) < 1e-3


FEATURES: list[tuple[nn.Module, float]] = [
    (T.AmplitudeToDB(top_db=80), 1e-3),
    (T.AmplitudeToDB(top_db=20), 1e-3),
    (T.AmplitudeToDB("magnitude"), 1e-3),
    (own.Log(), 1e-3),
    (nn.Sequential(own.Log(), own.CMVN()), 1e-4),
    (nn.Sequential(own.Log(), own.CMVN("utterance")), 1e-4),
    (nn.Sequential(own.Log(), own.CMVN(norm_vars=False)), 1e-4),
    (nn.Sequential(own.Log(), own.GlobalCMVN(-3.0, 2.0)), 1e-4),
    (nn.Sequential(own.Log(), own.GlobalCMVN(list(range(80)), [0.5 + i for i in range(80)])), 1e-3),
]


@pytest.mark.parametrize("channels", [None, 2])
@pytest.mark.parametrize(("module", "atol"), FEATURES, ids=ident)
def test_feature_steps(module, atol, channels, device):
    alone, batch = both(_after_mel(module), make_rows(channels), device)
    assert worst(alone, batch) < atol


def _after_mel(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(T.MelSpectrogram(**MEL), *(module if isinstance(module, nn.Sequential) else [module]))


@pytest.mark.parametrize("log_mels", [False, True])
@pytest.mark.parametrize("channels", [None, 2])
def test_mfcc(log_mels, channels, device):
    module = T.MFCC(
        RATE, n_mfcc=20, log_mels=log_mels, melkwargs={key: v for key, v in MEL.items() if key != "sample_rate"}
    )
    alone, batch = both(module, make_rows(channels), device)
    assert worst(alone, batch) < 1e-2


MASKS = [
    T.FrequencyMasking(30),
    T.FrequencyMasking(30, iid_masks=True),
    T.TimeMasking(40),
    T.TimeMasking(40, p=0.3),
    T.TimeMasking(40, p=0.01),
    T.TimeMasking(200),  # wider than some rows
    T.TimeMasking(40, iid_masks=True),
    T.TimeMasking(40, iid_masks=True, p=0.2),
    T.SpecAugment(2, 30, 2, 20),
    T.SpecAugment(2, 30, 2, 20, zero_masking=True),
    T.SpecAugment(2, 30, 2, 20, iid_masks=False),
    T.SpecAugment(1, 30, 1, 20, iid_masks=False, p=0.2, zero_masking=True),
    T.SpecAugment(0, 30, 3, 20, p=0.5),
]


@pytest.mark.parametrize("channels", [None, 1, 2])
@pytest.mark.parametrize("module", MASKS, ids=ident)
def test_masks_are_torchaudio_s_own(module, channels, device):
    if channels is None and getattr(module, "iid_masks", False) and not isinstance(module, T.SpecAugment):
        pytest.skip("torchaudio's iid masks need a channel dimension")
    plain = T.MelSpectrogram(**MEL)
    rows = make_rows(channels)
    for _ in range(3):
        rows = rows[1:] + rows[:1]  # so that every row meets other seeds
        alone, batch = both(nn.Sequential(plain, module), rows, device)
        bare_alone, bare_batch = both(plain, rows, device)
        for one, other, bare_one, bare_other in zip(alone, batch.unpad(), bare_alone, bare_batch.unpad(), strict=True):
            assert torch.equal(one != bare_one, other != bare_other)
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_a_pipeline_of_many(device):
    alone, batch = both(pipeline(), make_rows(1), device)
    assert worst(alone, batch) < 1e-3


def test_every_step_is_tested():
    seen = {type(part).__name__ for module in (*POWER, *MASKS) for part in module.modules()}
    seen |= {type(part).__name__ for module, _ in (*WAVES, *FEATURES) for part in module.modules()}
    idioms = {"Channel", "Squeeze", "Unsqueeze", "Window", "Pointwise"}  # tests/speech/test_idioms.py
    assert STEPS.keys() - seen - idioms == {"AddNoise", "MFCC", "Downmix"}  # by other names, or in tests of their own
    assert torchaudio.__version__ >= "2.11"


@pytest.mark.gpu
def test_the_host_never_waits_for_the_gpu():
    modules = [pipeline(), *(module for module, _ in WAVES if not isinstance(module, own.TrimSilence)), T.MFCC(RATE)]
    modules += [_after_mel(module) for module, _ in FEATURES] + [_after_mel(module) for module in MASKS]
    rows = make_rows(1)
    batch = Padded(Padded.stack(rows).data.cuda(), Padded.stack(rows).lengths)
    for module in modules:
        calls = [record_audio(module, num_samples=row.shape[-1], sample_rate=RATE) for row in rows]
        apply_calls(batch, calls)  # makes its windows and kernels on the device
        torch.cuda.set_sync_debug_mode("error")
        try:
            apply_calls(batch, calls)
        finally:
            torch.cuda.set_sync_debug_mode("default")
