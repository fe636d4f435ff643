"""The kinds of problems that public reports name: ragged speech in odd formats, features that differ from torchaudio's."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from torch import nn
from torchaudio import functional as F
from torchaudio import transforms as T

from lightning_dali import SpeechDataModule
from lightning_dali.audio import Downmix, Log, TrimSilence, load_audio, mel_spectrogram
from lightning_dali.media import decode_audio
from lightning_dali.testing import make_wavs, recover_wav_ids
from tests.speech.audio_files import Files, samples, tone, write

MEDIA = Path(__file__).parents[3] / "shared" / "media" / "audio"


def run(dataset, transform=None, **options):
    options = {"batch_size": 32, "num_workers": 0, "num_threads": 1, "seed": 0, "device": "cpu", **options}
    dm = SpeechDataModule(val_dataset=dataset, eval_transform=transform, **options)
    try:
        return list(dm.val_dataloader())
    finally:
        dm.close()


def write_mp3(path: Path, number: int) -> None:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("mp3", rate=16_000, layout="mono")
        pcm = (tone(number) * 32767).astype(np.int16).T
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(pcm), format="s16p", layout="mono")
        frame.sample_rate = 16_000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())


def ragged(folder: Path) -> list[Path]:
    """21 tones as WAV, and the next numbers as odd formats."""
    paths = make_wavs(folder, 21)
    odd = [
        ("flac", {}),
        ("ogg", {}),
        ("opus", {"format": "OGG", "subtype": "OPUS"}),
        ("wav", {"subtype": "PCM_24"}),
        ("wav", {"subtype": "ULAW"}),
    ]
    paths += [write(folder / f"odd{n}.{kind}", 21 + n, **options) for n, (kind, options) in enumerate(odd)]
    write_mp3(folder / "odd.mp3", 26)
    return [*paths, folder / "odd.mp3"]


def test_ragged_speech_of_many_formats_is_paired_padded_and_as_long_as_it_is(tmp_path):
    paths = ragged(tmp_path)
    (batch,) = run(Files(paths, torchaudio.load))
    padded, _, index = batch
    assert recover_wav_ids(padded.unpad()) == index.tolist() == list(range(27))
    for row, path in zip(padded.unpad(), paths[:26], strict=False):
        assert row.shape[-1] == samples(path)[0].shape[-1]
    assert not padded.data.masked_fill(padded.mask()[:, None], 0).any()
    mel = T.MelSpectrogram(16_000, n_fft=512, win_length=400, hop_length=160)
    ((features, _, _),) = run(Files(paths, torchaudio.load, mel))
    assert features.lengths.tolist() == [1 + length // 160 for length in padded.lengths.tolist()]
    for factor in (0.9, 1.1):
        ((spoken, _, _),) = run(Files(paths, torchaudio.load, nn.Sequential(T.SpeedPerturbation(16_000, [factor]))))
        for length, whole in zip(spoken.lengths.tolist(), padded.lengths.tolist(), strict=True):
            assert abs(length - whole / factor) <= 1


def test_trimmed_speech_is_as_long_as_what_is_kept(tmp_path):
    wave = np.concatenate([np.zeros((3200, 1)), tone(4), np.zeros((3200, 1))])
    soundfile.write(tmp_path / "a.wav", wave, 16_000)
    soundfile.write(tmp_path / "silent.wav", wave * 0, 16_000)
    paths = [tmp_path / "a.wav", tmp_path / "silent.wav"]
    trim = TrimSilence(40, frame_length=512, hop_length=128)
    ((padded, _, _),) = run(Files(paths, torchaudio.load, trim))
    assert abs(int(padded.lengths[0]) - 8000) <= 2 * 512 and padded.lengths[1] == len(wave)
    ((features, _, _),) = run(
        Files(paths, torchaudio.load, nn.Sequential(trim, T.MelSpectrogram(16_000, n_mels=20, n_fft=256)))
    )
    assert features.lengths.tolist() == [1 + length // 128 for length in padded.lengths.tolist()]


def test_rates_are_mixed_in_one_dataset(tmp_path):
    paths = [write(tmp_path / f"{n}.wav", n, rate=rate) for n, rate in enumerate((8000, 16_000, 44_100))]
    ((padded, rates, _),) = run(Files(paths, torchaudio.load), sample_rate=16_000)
    assert rates.tolist() == [16_000] * 3
    assert recover_wav_ids(padded.unpad()) == [0, 1, 2]
    torch.testing.assert_close(padded.unpad()[0], F.resample(samples(paths[0])[0], 8000, 16_000), atol=1e-5, rtol=0)


def noisy_tones(folder: Path) -> list[Path]:
    """1 s of 440 Hz at 0.3 with noise at 0.01, and batch mates of other lengths."""
    random, paths = np.random.default_rng(0), []
    for n, seconds in enumerate((1.0, 0.4, 1.7)):
        time = np.arange(int(16_000 * seconds)) / 16_000
        wave = 0.3 * np.sin(2 * np.pi * 440 * time) + 0.01 * random.standard_normal(time.size)
        soundfile.write(folder / f"{n}.wav", wave, 16_000, subtype="FLOAT")
        paths.append(folder / f"{n}.wav")
    return paths


@pytest.mark.parametrize("preset", ["torchaudio", "librosa"])
def test_mels_are_torchaudios_and_a_row_does_not_depend_on_its_batch_mates(tmp_path, preset):
    paths = noisy_tones(tmp_path)
    settings = {"sample_rate": 16_000, "n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}
    scale = {"norm": "slaney", "mel_scale": "slaney"} if preset == "librosa" else {}
    reference = T.MelSpectrogram(**settings, **scale)
    features = nn.Sequential(mel_spectrogram(preset, **settings), Log(1e-9))
    ((together, _, _),) = run(Files(paths, torchaudio.load, features))
    alone = [run(Files([path], torchaudio.load, features))[0][0].data[0] for path in paths]
    for row, single, path in zip(together.unpad(), alone, paths, strict=True):
        expected = (reference(samples(path)[0]) + 1e-9).log()
        assert (row - expected).abs().max() < 1e-3
        torch.testing.assert_close(row, single, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not MEDIA.is_dir(), reason="the shared recordings are not here")
def test_every_shared_recording_decodes_to_what_pyav_gives():
    paths = sorted(path for path in MEDIA.rglob("*") if path.suffix in (".wav", ".mp3", ".ogg", ".opus", ".flac"))
    assert paths
    batched = run(Files(paths, load_audio, Downmix()), batch_size=4)
    rows = [row for batch in batched for row in batch[0].unpad()]
    for row, path in zip(rows, paths, strict=True):
        wave, _ = decode_audio(path.read_bytes())
        torch.testing.assert_close(row, torch.from_numpy(wave).mean(0, keepdim=True), atol=1e-3, rtol=0, msg=str(path))
        assert row.abs().max() > 0
        if path.suffix == ".wav":
            assert (row[0] - torch.from_numpy(pyav_mono(path, row.shape[-1]))).abs().max() < 1e-3


def pyav_mono(path: Path, count: int) -> np.ndarray:
    with av.open(str(path)) as container:
        resampler = av.AudioResampler(format="fltp")
        pieces = [piece.to_ndarray() for frame in container.decode(audio=0) for piece in resampler.resample(frame)]
    wave: np.ndarray = np.concatenate(pieces, axis=1).mean(0)
    assert len(wave) == count
    return wave
