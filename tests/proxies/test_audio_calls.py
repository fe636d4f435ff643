"""What is recorded of torchaudio's modules: settings, draws, lengths, refusals; tests/graph/test_audio_steps.py computes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchaudio import functional as F
from torchaudio import transforms as T

from lightning_dali.proxies import audio_modules as own
from lightning_dali.proxies.audio_calls import VOCABULARY, AudioState, NotRecordable, record_audio, record_module
from lightning_dali.proxies.audio_masks import draw_mask, mask_bounds, mask_limit
from lightning_dali.proxies.audio_settings import config_of, make_window, settings_of

RATE = 16000


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many tiny operations: a second thread only waits for the first, on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record(module, num_samples=16000, num_channels=1):
    return record_audio(module, num_samples=num_samples, sample_rate=RATE, num_channels=num_channels)


def bounds(mask, size):
    width, start = torch.tensor(mask.width), torch.tensor(mask.start)
    limit = torch.tensor(mask_limit(mask.mask_param, mask.p, size))
    first, stop = mask_bounds(width, start, limit, torch.tensor(size))
    return [(a, b) for a, b in zip(first.tolist(), stop.tolist(), strict=True)]


def test_a_pipeline_is_a_list_of_calls_with_shapes():
    module = nn.Sequential(
        T.Resample(RATE, 8000),
        nn.Sequential(T.Preemphasis(), nn.Identity()),
        T.MelSpectrogram(8000, n_fft=256, hop_length=80, n_mels=40),
        own.Log(),
        T.TimeMasking(10),
    )
    calls = record(module, num_samples=16001, num_channels=2)
    assert [call.name for call in calls] == ["Resample", "Preemphasis", "MelSpectrogram", "Log", "TimeMasking"]
    assert [call.shape for call in calls] == [(2, 8001), (2, 8001), (2, 40, 101), (2, 40, 101), (2, 40, 101)]
    assert [call.sample_rate for call in calls] == [8000] * 5
    assert calls[0].kwargs == {
        "orig_freq": 16000,
        "new_freq": 8000,
        "resampling_method": "sinc_interp_hann",
        "lowpass_filter_width": 6,
        "rolloff": 0.99,
        "beta": None,
    }
    assert calls[3].config == (("offset", 1e-6),) and calls[3].drawn == {}
    assert calls[2].kwargs["window"] == "hann_window" and calls[2].kwargs["f_max"] == 4000.0
    assert record(None) == record(nn.Sequential()) == []


def test_a_compose_is_walked_and_other_lists_of_transforms_are_not():
    class Compose:
        def __init__(self, transforms):
            self.transforms = transforms

    class RandomApply(Compose):
        pass

    assert [call.name for call in record(Compose([T.Vol(2.0), Compose([T.Preemphasis()])]))] == ["Vol", "Preemphasis"]
    with pytest.raises(NotRecordable, match="RandomApply is not in the vocabulary"):
        record(RandomApply([T.Vol(2.0)]))


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("frames", [5, 100])
@pytest.mark.parametrize(
    "module",
    [
        T.FrequencyMasking(30),
        T.FrequencyMasking(30, iid_masks=True),
        T.TimeMasking(40, p=0.3),
        T.TimeMasking(40, iid_masks=True),
        T.TimeMasking(40, iid_masks=True, p=0.15),
        T.SpecAugment(2, 30, 2, 20),
        T.SpecAugment(2, 30, 3, 20, iid_masks=False, p=0.15),
    ],
    ids=lambda module: type(module).__name__,
)
def test_the_generator_ends_up_where_torchaudio_leaves_it(module, frames, channels):
    """Same draws, same number of draws, same order: what follows in the pipeline draws the same as well."""
    spectrogram = torch.rand((40, frames) if channels is None else (channels, 40, frames))
    if getattr(module, "iid_masks", False) and channels is None and not isinstance(module, T.SpecAugment):
        with pytest.raises(NotRecordable, match=r"\(iid_masks=True\) takes \(C, F, T\)"):
            record_module(module, AudioState(tuple(spectrogram.shape), RATE, features=True))
        return
    for seed in range(5):
        torch.random.default_generator.manual_seed(seed)
        masked = module(spectrogram)
        after = torch.random.get_rng_state()
        torch.random.default_generator.manual_seed(seed)
        (call,), state = record_module(module, AudioState(tuple(spectrogram.shape), RATE, features=True))
        assert torch.equal(torch.random.get_rng_state(), after)
        assert state == AudioState(tuple(masked.shape), RATE, features=True)
        changed = masked != spectrogram
        expected = torch.zeros_like(changed)
        for mask in call.drawn["masks"]:
            size = frames if mask.axis == "time" else 40
            for channel, (start, stop) in enumerate(bounds(mask, size)):
                where = expected if len(mask.width) == 1 else expected[channel]
                (where if mask.axis == "time" else where.mT)[..., max(start, 0) : max(stop, 0)] = True
        assert torch.equal(changed, expected)


@given(param=st.integers(0, 300), size=st.integers(1, 250), p=st.sampled_from([1.0, 0.5, 0.1]), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_mask_ranges_are_torchaudio_s(param, size, p, seed):
    torch.random.default_generator.manual_seed(seed)
    masked = F.mask_along_axis(torch.ones(1, 1, size), param, 0.0, 2, p=p)
    torch.random.default_generator.manual_seed(seed)
    mask = draw_mask("time", param, p, size=size, count=1)
    expected = torch.ones(size)
    for start, stop in bounds(mask, size):
        expected[max(start, 0) : max(stop, 0)] = 0
    assert torch.equal(masked[0, 0], expected)


def test_speeds_are_drawn_as_torchaudio_draws_them():
    module = T.SpeedPerturbation(RATE, [0.9, 1.1, 1.0])
    wave = torch.randn(1, 5000)
    lengths = set()
    for seed in range(12):
        torch.random.default_generator.manual_seed(seed)
        expected, _ = module(wave)
        torch.random.default_generator.manual_seed(seed)
        (call,) = record(module, num_samples=5000)
        assert call.name == "Speed" and call.shape == tuple(expected.shape) and call.sample_rate == RATE
        lengths.add(call.shape[-1])
    assert lengths == {5556, 4546, 5000}


def test_own_modules_draw_the_same_recorded_or_run():
    for module in (own.RandomNoise((0, 20)), own.RandomNoise(3.0, noises=[torch.rand(99)], p=0.5), own.Dither(0.1)):
        torch.random.default_generator.manual_seed(1)
        module(torch.randn(1, 500, generator=torch.Generator().manual_seed(0)))
        after = torch.random.get_rng_state()
        torch.random.default_generator.manual_seed(1)
        record(module, num_samples=500)
        assert torch.equal(torch.random.get_rng_state(), after)


def test_equal_settings_are_one_object_so_that_a_batch_pickles_them_once():
    module = T.MelSpectrogram(n_mels=40)
    one, two = record(module)[0], record(module)[0]
    assert one.config is two.config and one.config is settings_of(T.MelSpectrogram(n_mels=40))
    assert pickle.loads(pickle.dumps([one, two])) == [one, two]
    assert len(pickle.dumps([one] * 2)) - len(pickle.dumps([one])) < 60
    assert hash(one.config) is not None


def test_settings_are_read_when_recording():
    module = T.TimeMasking(10)
    record(nn.Sequential(T.Spectrogram(), module))
    module.mask_param = 33  # a curriculum
    call = record(nn.Sequential(T.Spectrogram(), module))[-1]
    assert call.kwargs["mask_param"] == 33 and call.drawn["masks"][0].mask_param == 33


def test_windows_travel_by_name_or_by_value():
    assert config_of(T.Spectrogram(window_fn=torch.hamming_window))["window"] == "hamming_window"
    kaiser = T.Spectrogram(window_fn=torch.kaiser_window, wkwargs={"periodic": True, "beta": 5.0})
    assert torch.equal(make_window(config_of(kaiser)["window"], 400), kaiser.window)
    kaiser.window = torch.ones(400)
    assert config_of(kaiser)["window"] == "ones"


def filters_of_its_own() -> nn.Module:
    module = T.MelSpectrogram(n_mels=40)
    module.mel_scale.fb.mul_(2)
    return module


def hooked() -> nn.Module:
    module = T.Vol(1.0)
    module.register_forward_hook(lambda *args: None)
    return module


class MyVol(T.Vol):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda wave: wave * 2, r"<lambda> is not in the vocabulary \(AmplitudeToDB, CMVN"),
        (MyVol(1.0), "MyVol is not in the vocabulary"),
        (T.Vad(RATE), "Vad is not in the vocabulary"),
        (nn.Sequential(T.Vol(1.0), nn.Dropout()), "Dropout is not in the vocabulary"),
        (hooked(), "Vol has forward hooks"),
        (T.Spectrogram(power=None), r"Spectrogram\(power=None\) is complex"),
        (T.Spectrogram(pad_mode="circular"), "pad_mode='circular'"),
        (filters_of_its_own(), "MelScale with filters of its own"),
        (T.TimeMasking(10), r"TimeMasking takes a spectrogram, here comes a waveform \(1, 300\)"),
        (nn.Sequential(T.Spectrogram(), T.Vol(1.0)), "Vol takes a waveform, here comes a spectrogram"),
        (nn.Sequential(T.Spectrogram(), T.MelScale(n_stft=99)), r"MelScale\(n_stft=99\) on 201 bins"),
        (nn.Sequential(T.Spectrogram(), own.GlobalCMVN([0.0] * 3, 1.0)), r"GlobalCMVN of \{3\} features on 201"),
        (T.Spectrogram(n_fft=1024), "300 samples are too few to reflect 512"),
        (T.Spectrogram(n_fft=400, center=False), "300 samples are less than one window of 400"),
        (T.Fade(500, 0), "Fade of 500 samples on 300"),
        (nn.Sequential(own.TrimSilence(), own.RandomNoise(1.0, noises=[torch.ones(9)])), "a length that is not known"),
    ],
)
def test_what_needs_samples_is_refused_and_the_generator_put_back(module, text):
    torch.random.default_generator.manual_seed(5)
    before = torch.random.get_rng_state()
    with pytest.raises(NotRecordable, match=text):
        record(nn.Sequential(T.SpeedPerturbation(RATE, [1.0, 1.0])) if module is None else module, num_samples=300)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_draws_before_a_refusal_are_taken_back():
    torch.random.default_generator.manual_seed(5)
    before = torch.random.get_rng_state()
    with pytest.raises(NotRecordable, match="Dropout"):
        record(nn.Sequential(own.RandomNoise(), T.SpeedPerturbation(RATE, [0.9, 1.1]), nn.Dropout()))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_lengths_that_only_the_samples_tell():
    module = nn.Sequential(
        own.TrimSilence(), T.Resample(RATE, 8000), T.MelSpectrogram(n_mels=40), T.TimeMasking(10, p=0.5)
    )
    calls = record(module)
    assert [call.shape for call in calls] == [(1, None), (1, None), (1, 40, None), (1, 40, None)]
    assert len(calls[-1].drawn["masks"][0].width) == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: own.CMVN("speaker"), 'per "feature" or "utterance", got \'speaker\''),
        (lambda: own.GlobalCMVN(0.0, [1.0, 0.0]), "above 0, got 0.0"),
        (lambda: own.RandomNoise(p=2), r"p in \[0, 1\], got 2"),
        (lambda: own.RandomNoise(noises=[]), "at least one"),
        (lambda: own.RandomNoise(noises=[torch.ones(1, 5)]), r"waveforms \(S',\)"),
    ],
)
def test_own_modules_check_their_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_the_vocabulary_is_what_the_issue_asks_for():
    wanted = {"Resample", "Spectrogram", "MelScale", "MelSpectrogram", "MFCC", "AmplitudeToDB", "FrequencyMasking"}
    wanted |= {"TimeMasking", "SpecAugment", "SpeedPerturbation", "Speed", "Vol", "Preemphasis", "Deemphasis", "Fade"}
    assert wanted <= set(VOCABULARY)


def test_recording_is_cheap():
    module = nn.Sequential(
        T.MelSpectrogram(n_mels=80, n_fft=512), own.Log(), T.SpecAugment(2, 20, 2, 15, zero_masking=True)
    )
    record(module)
    start = time.perf_counter()
    for _ in range(100):
        record(module)
    assert (time.perf_counter() - start) / 100 < 2e-3  # 0.1 ms on an idle core


def test_nothing_of_dali_or_cuda_is_imported():
    folder = Path(own.__file__).parent
    for path in [*folder.glob("audio_*.py"), *(folder.parent / "media").glob("audio*.py")]:
        text = path.read_text()
        assert "nvidia.dali" not in text and "torch.cuda" not in text and "import lightning\n" not in text
