"""Every recorded call on a padded batch against torchaudio on each row alone, with the same draw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torchaudio
from torch import Tensor, nn
from torchaudio import transforms as T

from lightning_dali.graph.audio import STEPS, apply_audio, apply_calls, opposite_phase
from lightning_dali.graph.audio_rows import exact_matmul
from lightning_dali.padded import Padded
from lightning_dali.proxies import audio_modules as own
from lightning_dali.proxies.audio_calls import config_of, record_audio
from lightning_dali.proxies.audio_noise import white_noise
from lightning_dali.proxies.audio_shapes import resampled_length

RATE = 16000
LENGTHS = (8000, 3721, 6400, 1600, 7999)
LIBRIVOX = Path(__file__).resolve().parents[3] / "shared" / "media" / "audio" / "librivox"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many tiny operations: a second thread only waits for the first, on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the batch lies."""
    return str(request.param)


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
        torch.manual_seed(seed)
        alone.append(run_alone(module, row))
        torch.manual_seed(seed)
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


def test_a_pipeline_of_many(device):
    alone, batch = both(pipeline(), make_rows(1), device)
    assert worst(alone, batch) < 1e-3


def test_a_row_does_not_depend_on_its_batch_mates():
    module, rows = pipeline(), make_rows(1)
    calls = []
    for seed, row in enumerate(rows):
        torch.manual_seed(seed)
        calls.append(record_audio(module, num_samples=row.shape[-1], sample_rate=RATE))
    together = apply_calls(Padded.stack(rows), calls).unpad()
    loud = [rows[0], *(50 * row for row in rows[1:])]
    torch.testing.assert_close(apply_calls(Padded.stack(loud), calls).unpad()[0], together[0], rtol=0, atol=1e-6)
    for index, row in enumerate(rows):
        (single,) = apply_calls(Padded.stack([row]), [calls[index]]).unpad()
        torch.testing.assert_close(single, together[index], rtol=1e-5, atol=1e-4)  # CMVN enlarges the last digits


def test_case_29_mel_parity():
    time = torch.arange(RATE) / RATE
    wave = 0.3 * torch.sin(2 * math.pi * 440 * time) + 0.01 * torch.randn(
        RATE, generator=torch.Generator().manual_seed(1)
    )
    rows = [wave, wave[:9000], wave[:12345]]
    for preset, reference in {
        "torchaudio": T.MelSpectrogram(**MEL),
        "librosa": T.MelSpectrogram(**MEL, norm="slaney", mel_scale="slaney"),
    }.items():
        settings = config_of(own.mel_spectrogram(preset, **MEL))
        batch = apply_audio("MelSpectrogram", Padded.stack(rows), [settings] * 3)
        assert batch.lengths.tolist() == [1 + len(row) // 160 for row in rows]
        for row, features in zip(rows, batch.unpad(), strict=True):
            assert float((features.log() - reference(row).log()).abs().max()) < 1e-3
            torch.testing.assert_close(features, reference(row), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"presets \['librosa', 'torchaudio'\], got 'kaldi'"):
        own.mel_spectrogram("kaldi")


@pytest.mark.skipif(not LIBRIVOX.is_dir(), reason="the shared recordings are not here")
def test_real_speech():
    from lightning_dali.media.audio_decode import decode_audio

    rows = [torch.from_numpy(decode_audio(path.read_bytes())[0]) for path in sorted(LIBRIVOX.glob("*.wav"))]
    module = nn.Sequential(T.MelSpectrogram(**MEL), own.Log())
    alone, batch = both(module, rows)
    assert worst(alone, batch) < 1e-3


def test_resampling_rows_of_several_rates_in_one_batch():
    rates = (8000, 16000, 44100, 8000)
    rows = make_rows(1, (4000, 8000, 22050, 3999))
    kwargs = [None if rate == RATE else config_of(T.Resample(rate, RATE)) for rate in rates]
    batch = apply_audio("Resample", Padded.stack(rows), kwargs)
    assert batch.lengths.tolist() == [8000, 8000, 8000, 7998]
    for row, rate, out in zip(rows, rates, batch.unpad(), strict=True):
        reference = T.Resample(rate, RATE)(row)
        noise = (out - reference).square().sum()
        assert out.shape == reference.shape and float(noise) <= 1e-12 * float(reference.square().sum())


@pytest.mark.parametrize(("before", "after"), [(16000, 8000), (44100, 16000), (48000, 44100), (14400, 16000)])
def test_lengths_after_resampling_are_torchaudio_s_to_the_last_digit(before, after):
    gcd = math.gcd(before, after)
    for length in (1, 2, 441, 159999, 1 << 20, (1 << 20) + 1, 4200001, 16777213, 30000001):
        expected = torch.ceil(torch.as_tensor(after // gcd * length / (before // gcd))).long()
        assert resampled_length(length, before, after) == expected
    assert resampled_length(None, before, after) is None


def test_calls_that_only_some_rows_have():
    rows = make_rows(1)
    vol = config_of(T.Vol(0.5))
    batch = apply_audio("Vol", Padded.stack(rows), [vol, None, vol, None, None])
    for row, out, factor in zip(rows, batch.unpad(), (0.5, 1, 0.5, 1, 1), strict=True):
        assert torch.equal(out, (factor * row).clamp(-1, 1) if factor != 1 else row)


def test_silence_trimmed_at_both_ends():
    hop = 512
    quiet, sound = torch.zeros(3200), 0.3 * torch.randn(16000, generator=torch.Generator().manual_seed(0))
    rows = [torch.cat([quiet, sound, quiet]), sound, torch.zeros(5000), torch.cat([sound[:8000], quiet])]
    batch = apply_audio("TrimSilence", Padded.stack(rows), [config_of(own.TrimSilence())] * 4)
    for row, out, expected in zip(rows, batch.unpad(), (16000, 16000, 5000, 8000), strict=True):
        assert abs(out.shape[-1] - expected) <= 2 * (1024 + hop)
        assert torch.equal(out, own.TrimSilence()(row))
    assert batch.lengths[2] == 5000  # silence throughout is kept


def test_trimming_then_masking_by_the_length_that_came_out():
    module = nn.Sequential(own.TrimSilence(top_db=30), T.MelSpectrogram(**MEL), T.TimeMasking(30))
    silences = (torch.zeros(1, n) for n in (0, 3200, 999, 20, 5000))
    rows = [torch.cat([silence, row, silence], -1) for silence, row in zip(silences, make_rows(1), strict=True)]
    alone, batch = both(module, rows)
    assert worst(alone, batch) < 1e-4
    assert [torch.equal(a == 0, b == 0) for a, b in zip(alone, batch.unpad(), strict=True)] == [True] * 5


def test_noise_that_cannot_be_scaled_adds_nothing():
    rows = [torch.zeros(1, 1000), *make_rows(1, (1000, 900))]
    silent = {"snr": 10.0, "noise": torch.zeros(1000)}
    batch = apply_audio("AddNoise", Padded.stack(rows), [silent] * 3)
    assert torch.equal(batch.data, Padded.stack(rows).data)
    white = [{"snr": 10.0, "seed": 1}, {"snr": math.inf, "seed": 1}, {"snr": 10.0, "seed": 1}]
    batch = apply_audio("AddNoise", Padded.stack(rows), white)
    assert torch.equal(batch.data[:2], Padded.stack(rows).data[:2]) and not torch.equal(batch.unpad()[2], rows[2])


def test_white_noise_is_white_and_depends_on_seed_and_position_only():
    noise = white_noise(torch.tensor([1, 2, 3]), 2, 50000)
    assert noise.shape == (3, 2, 50000) and noise.isfinite().all()
    assert float(noise.mean((1, 2)).abs().max()) < 0.02 and float((noise.std((1, 2)) - 1).abs().max()) < 0.01
    flat = noise.flatten(0, 1)
    assert float((torch.corrcoef(flat) - torch.eye(6)).abs().max()) < 0.02
    assert float((flat[:, 1:] * flat[:, :-1]).mean(1).abs().max()) < 0.02
    assert torch.equal(white_noise(torch.tensor([2]), 1, 100)[0], noise[1, :1, :100])


def test_opposite_phase_is_found():
    one, other = make_rows(1, (8000, 8000))
    data = torch.stack([torch.cat([one, one]), torch.cat([one, -one]), torch.cat([one, other]), torch.zeros(2, 8000)])
    assert opposite_phase(data).tolist() == [False, True, False, False]
    assert opposite_phase(data[:, :1]).tolist() == [False] * 4
    alone, batch = both(own.Downmix(), [torch.cat([one, other]), torch.cat([one, one])[:, :5000]])
    assert worst(alone, batch) == 0


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("Reverb", [{}], r"unknown audio calls \['Reverb'\]; known are Resample, Speed"),
        ("Vol", [{}, {}], "2 lists of arguments for a batch of 1 rows"),
        ("Spectrogram", [config_of(T.Spectrogram(n_fft=512))], "a row of 200 samples is too short to reflect 256"),
        (
            "Spectrogram",
            [config_of(T.Spectrogram(center=False))],
            "a row of 200 samples is less than one window of 400",
        ),
        ("Fade", [config_of(T.Fade(300, 0))], "Fade of 300 samples on a row of 200"),
    ],
)
def test_what_cannot_be_done_says_why(name, kwargs, text):
    with pytest.raises(ValueError, match=text):
        apply_audio(name, Padded.stack([torch.ones(1, 200)]), kwargs)


def test_rows_must_end_up_alike():
    kwargs = [config_of(T.MelSpectrogram(n_mels=40)), config_of(T.MelSpectrogram(n_mels=20))]
    with pytest.raises(ValueError, match=r"agree in channels and features, got \[\(1, 20\), \(1, 40\)\]"):
        apply_audio("MelSpectrogram", Padded.stack(make_rows(1)[:2]), kwargs)


def test_nothing_of_the_input_is_written_to():
    rows = make_rows(1)
    before = Padded.stack(rows)
    for module in (pipeline(), T.Fade(10, 10), T.Vol(0.5), T.Deemphasis(), own.Dither(1.0), own.RandomNoise()):
        calls = [record_audio(module, num_samples=row.shape[-1], sample_rate=RATE) for row in rows]
        batch = Padded.stack(rows)
        apply_calls(batch, calls)
        assert torch.equal(batch.data, before.data)


def test_gradients_and_autocast_stay_out():
    rows = make_rows(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = apply_audio("MelSpectrogram", Padded.stack(rows), [config_of(T.MelSpectrogram())] * len(rows))
        assert exact_matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype in (torch.bfloat16, torch.float32)
    assert batch.data.dtype == torch.float32 and not batch.data.requires_grad and not batch.data.is_inference()


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


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_a_script_that_allows_tf32_changes_nothing(precision):
    module = nn.Sequential(T.Resample(RATE, 8000), T.MelSpectrogram(**MEL), own.Log())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        _, batch = both(module, make_rows(1), "cuda")
    finally:
        torch.set_float32_matmul_precision(before)
    assert worst([module(row) for row in make_rows(1)], batch) < 1e-3


def test_every_step_is_tested():
    seen = {type(part).__name__ for module in (*POWER, *MASKS) for part in module.modules()}
    seen |= {type(part).__name__ for module, _ in (*WAVES, *FEATURES) for part in module.modules()}
    idioms = {"Channel", "Squeeze", "Unsqueeze", "Window", "Pointwise"}  # tests/speech/test_datamodule.py
    assert STEPS.keys() - seen - idioms == {"AddNoise", "MFCC", "Downmix"}  # by other names, or in tests of their own
    assert torchaudio.__version__ >= "2.11"
