"""Padded batches: rows that differ in rate, length and calls, noise, what is refused, and the device's manners."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torchaudio import transforms as T

from lightning_dali.graph import audio
from lightning_dali.graph.audio import apply_audio, apply_calls, opposite_phase
from lightning_dali.graph.audio_rows import Rows, exact_matmul
from lightning_dali.padded import Padded
from lightning_dali.proxies import audio_modules as own
from lightning_dali.proxies.audio_calls import config_of, record_audio
from lightning_dali.proxies.audio_noise import white_noise
from lightning_dali.proxies.audio_shapes import resampled_length
from tests.graph.audio_rows import MEL, RATE, both, make_rows, pipeline, worst

LIBRIVOX = Path(__file__).resolve().parents[3] / "shared" / "media" / "audio" / "librivox"


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
    loudest = max(float(row.max()) for row in alone)  # 1e-6 of it: float32 has seven digits, and no logarithm follows
    assert worst(alone, batch) < 1e-6 * loudest
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


def test_rows_in_parts_are_rows_together(monkeypatch):
    """On the CPU few rows are computed at a time: nothing of it shows."""
    module = nn.Sequential(T.MelSpectrogram(**MEL), own.Log(), own.CMVN())
    rows = make_rows(1, (9000, 30_000, 4000, 4000, 30_000, 12_000))
    _, together = both(module, rows)
    monkeypatch.setattr(audio, "CHUNK_SAMPLES", 35_000 // torch.get_num_threads())
    assert audio._parts(Rows.of(Padded.stack(rows))) == [[0], [1], [2, 3], [4], [5]]
    _, apart = both(module, rows)
    assert together.lengths.equal(apart.lengths)
    torch.testing.assert_close(together.data, apart.data, rtol=0, atol=1e-4)  # CMVN enlarges the last digits
