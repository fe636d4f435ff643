"""From files to `Padded` batches: every way in, against soundfile and torchaudio on each file alone."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import soundfile
import torch
import torchaudio
from torch import nn
from torch.utils.data import Dataset
from torchaudio import functional as F
from torchaudio import transforms as T
from torchvision.datasets import DatasetFolder

from lightning_dali import SpeechDataModule, SpeechManifest
from lightning_dali.audio import Downmix, RandomNoise, load_audio
from lightning_dali.seeding import sample_seed, seeded
from tests.speech.audio_files import Files, normalised, rows, samples, tone, torchaudio_datasets, write


def batches(dataset: Any, *, transform: Any = None, num_workers: int = 0, **options: Any) -> list[Any]:
    """All validation batches, which are in the dataset's order."""
    options = {"batch_size": 4, "seed": 3, "num_threads": 1, "device": "cpu", **options}
    dm = SpeechDataModule(val_dataset=dataset, eval_transform=transform, num_workers=num_workers, **options)
    try:
        return list(dm.val_dataloader())
    finally:
        dm.close()


@pytest.fixture
def tones(tmp_path: Path) -> list[Path]:
    kinds = ["wav", "flac", "ogg", "wav", "flac", "wav"]
    return [write(tmp_path / f"{n}.{kind}", n, seconds=0.3 + 0.05 * n) for n, kind in enumerate(kinds)]


def test_torchaudios_datasets_run_unmodified(tmp_path):
    for name, (dataset, paths) in torchaudio_datasets(tmp_path).items():
        batched = batches(dataset)
        for got, path in zip(rows(batched), paths, strict=True):
            torch.testing.assert_close(got, samples(path)[0], atol=1e-6, rtol=0, msg=name)
        if name == "LIBRISPEECH":
            assert batched[0][1].tolist() == [16_000] * 3 and batched[0][2] == ["WORD 0", "WORD 1", "WORD 2"]


def test_sample_rate_resamples_when_loading_and_is_the_rate_that_is_told(tmp_path):
    made = torchaudio_datasets(tmp_path)
    for name in ("SPEECHCOMMANDS", "LJSPEECH"):
        dataset, paths = made[name]
        batched = batches(dataset, sample_rate=8000)
        for got, path in zip(rows(batched), paths, strict=True):
            wave, rate = samples(path)
            torch.testing.assert_close(got, F.resample(wave, rate, 8000), atol=1e-5, rtol=0)
        if name == "SPEECHCOMMANDS":
            assert batched[0][1].tolist() == [8000, 8000]


def test_resampling_twice_is_refused(tones):
    dataset = Files(tones, torchaudio.load, T.Resample(16_000, 8000))
    with pytest.raises(ValueError, match=r"has resampled from 16000 Hz already"):
        batches(dataset, sample_rate=8000)


LOADERS = {
    "torchaudio.load": torchaudio.load,
    "torchaudio.load_with_torchcodec": lambda path: torchaudio.load_with_torchcodec(path),
    "soundfile.read": lambda path: soundfile.read(path),
    "soundfile.read, tensor": lambda path: (torch.from_numpy(soundfile.read(path, dtype="float32")[0]), 16_000),
    "an open file": lambda path: torchaudio.load(open(path, "rb")),  # noqa: SIM115
    "load_audio": load_audio,
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_way_to_load_is_captured(tones, name):
    batched = batches(Files(tones, LOADERS[name]))
    for got, path in zip(rows(batched), tones, strict=True):
        torch.testing.assert_close(got.reshape(1, -1), samples(path)[0], atol=1e-6, rtol=0)
    assert batched[0][1].tolist() == [16_000] * 4


class Values(Dataset[Any]):
    def __init__(self, *values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


class Sample(NamedTuple):
    sound: Any
    text: str


def test_paths_bytes_waveforms_and_hugging_faces_dicts_keep_their_structure(tones):
    data = [path.read_bytes() for path in tones]
    waves = [samples(path)[0] for path in tones]
    forms = {
        "paths": ([Sample(str(path), "a") for path in tones], 0),
        "bytes": ([(7, {"audio": item}) for item in data], None),
        "dicts": ([{"audio": {"bytes": item, "path": None}, "text": "a"} for item in data], "audio"),
        "dict of a path": ([{"audio": {"bytes": None, "path": str(path)}} for path in tones], "audio"),
        "waveforms": ([{"waveform": wave, "rate": 16_000} for wave in waves], "waveform"),
        "dict of an array": (
            [{"path": "no.wav", "array": w[0].numpy(), "sampling_rate": 16_000} for w in waves],
            "array",
        ),
        "arrays": ([(wave[0].numpy(), 16_000) for wave in waves], 0),
    }
    for name, (values, field) in forms.items():
        batched = batches(Values(*values))
        if name == "bytes":
            batched, field = [batch[1]["audio"] for batch in batched], None
        for got, wave in zip(rows(batched, field), waves, strict=True):
            torch.testing.assert_close(got.reshape(1, -1), wave, atol=1e-6, rtol=0, msg=name)
        if name == "paths":
            assert type(batched[0]) is Sample and batched[0].text == ["a"] * 4
    halved = batches(Values(*forms["arrays"][0]), sample_rate=8000)
    assert [len(row) for row in rows(halved)] == [-(-wave.shape[1] // 2) for wave in waves]


def test_a_sample_without_audio_is_an_error_that_says_what_is_expected():
    with pytest.raises(TypeError, match=r"no audio: expected a waveform tensor .* got str, int"):
        batches(Values(("text without audio", 3)))


def test_a_folder_dataset_and_a_field_transform(tmp_path):
    for n in range(4):
        write(tmp_path / f"{'ab'[n % 2]}/{n}.wav", n)
    folder = DatasetFolder(str(tmp_path), loader=torchaudio.load, extensions=(".wav",))
    mel = nn.Sequential(T.MelSpectrogram(16_000, n_mels=20, n_fft=256), T.AmplitudeToDB())
    batched = batches(folder, transform=mel)
    assert batched[0][1].tolist() == [0, 0, 1, 1]
    for got, (path, _) in zip(rows([batch[0] for batch in batched]), folder.samples, strict=True):
        torch.testing.assert_close(got, mel(samples(path)[0]), atol=1e-2, rtol=1e-4)


def test_draws_are_those_of_the_samples_seed_whatever_the_workers(tones):
    augment = nn.Sequential(
        T.SpeedPerturbation(16_000, [0.9, 1.1]),
        RandomNoise((5, 20)),
        T.MelSpectrogram(16_000, n_mels=20, n_fft=256),
        T.TimeMasking(10),
    )
    dataset = Files(tones, torchaudio.load, augment)
    here, there = (rows(batches(dataset, num_workers=workers, batch_size=size)) for workers, size in ((0, 4), (2, 3)))
    for index, (a, b) in enumerate(zip(here, there, strict=True)):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
        with seeded(sample_seed(3, 0, index), restore=True):
            wave = augment[0](samples(tones[index])[0])[0]
            torch.testing.assert_close(a, augment[3](augment[2](augment[1](wave))), atol=2e-3, rtol=1e-2)


def test_materialised_steps_keep_the_draws(tones):
    def transform(wave):
        louder = T.SpeedPerturbation(16_000, [0.9, 1.1])(wave)[0]
        return RandomNoise((5, 20))(louder).cumsum(-1)

    for index, got in enumerate(rows(batches(Files(tones, torchaudio.load, transform)))):
        with seeded(sample_seed(3, 0, index), restore=True):
            torch.testing.assert_close(got, transform(samples(tones[index])[0]), atol=1e-3, rtol=1e-3)


def test_some_rows_materialised_and_others_not_make_one_batch(tones):
    mel = T.MelSpectrogram(16_000, n_mels=20, n_fft=256)
    dataset = Files(tones, torchaudio.load, lambda wave: mel(wave if wave.shape[1] < 6000 else normalised(wave)))
    for got, path in zip(rows(batches(dataset)), tones, strict=True):
        torch.testing.assert_close(got, dataset.then(samples(path)[0]), atol=1e-4, rtol=1e-3)


def test_two_audio_fields_and_a_list_of_stand_ins(tones):
    class Pairs(Files):
        def __getitem__(self, index):
            wave, _ = torchaudio.load(self.paths[index])
            return {"clean": wave, "noisy": T.Vol(0.5)(wave), "n": index}

    batched = batches(Pairs(tones, None))
    for clean, noisy in zip(rows(batched, "clean"), rows(batched, "noisy"), strict=True):
        torch.testing.assert_close(noisy, clean * 0.5)
    listed = batches(Pairs(tones, None), collate_fn=lambda items: [item["clean"] for item in items])
    assert [tuple(row.shape) for batch in listed for row in batch] == [tuple(samples(path)[0].shape) for path in tones]


def test_channels_that_differ_are_an_error_that_says_what_to_do(tmp_path):
    paths = [write(tmp_path / f"{n}.wav", channels=n + 1) for n in range(2)]
    with pytest.raises(ValueError, match=r"different sizes in one batch: dataset index 0 .* Mix to one channel"):
        batches(Files(paths, torchaudio.load))
    mixed = rows(batches(Files(paths, torchaudio.load, lambda wave: wave.mean(0, keepdim=True))))
    torch.testing.assert_close(mixed[0], mixed[1])


def test_segments_of_every_format(tmp_path):
    for suffix, options in ((".wav", {}), (".flac", {}), (".ogg", {})):
        path = write(tmp_path / f"a{suffix}", 3, seconds=1.0, **options)
        whole, _ = samples(path)
        for start, count in ((2000, 4000), (1000, 14_000), (15_000, 9999), (0, 16_000)):
            dataset = Files([path], partial(torchaudio.load, frame_offset=start, num_frames=count))
            (got,) = rows(batches(dataset))
            torch.testing.assert_close(got, whole[:, start : start + count], atol=1e-4, rtol=0)


def test_manifests(tmp_path, tones):
    lines = [
        {"audio_filepath": tones[3].name, "text": "three", "duration": 0.1, "offset": 0.05, "speaker": "x"},
        {"path": str(tones[4]), "text": "four", "duration": 0.5, "speaker": "y"},
        {"path": str(tones[5]), "text": "too long", "duration": 99.0, "speaker": "y"},
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    manifest = SpeechManifest(file, fields=["speaker"], max_seconds=20)
    assert len(manifest) == 2 and manifest.durations == [0.1, 0.5]
    ((padded, rate, text, speaker),) = batches(manifest)
    assert (rate.tolist(), text, speaker) == ([16_000] * 2, ["three", "four"], ["x", "y"])
    expected = [samples(tones[3])[0][:, 800:2400], samples(tones[4])[0]]
    for got, want, alone in zip(padded.unpad(), expected, (manifest[0][0], manifest[1][0]), strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(alone, want)
    file.write_text('{"text": "nothing"}\n')
    with pytest.raises(ValueError, match="entry 1 of .*train.jsonl names no file"):
        SpeechManifest(file)
    file.write_text("{}\nno json\n")
    with pytest.raises(ValueError, match="line 2: .* one JSON object a line"):
        SpeechManifest(file)


def test_opposite_phase_is_reported(tmp_path, caplog):
    wave = tone(3, channels=2)
    wave[:, 1] *= -1
    soundfile.write(tmp_path / "phase.wav", wave, 16_000)
    with caplog.at_level(logging.WARNING):
        (got,) = rows(batches(Files([tmp_path / "phase.wav"], torchaudio.load, Downmix())))
    assert got.abs().max() < 1e-3
    assert any("opposite phase" in message and "phase.wav" in message for message in caplog.messages)


def test_options_are_checked():
    with pytest.raises(ValueError, match="max_seconds is -1: it must be more than 0"):
        SpeechDataModule(max_seconds=-1)
    with pytest.raises(TypeError, match="sample_rate is '16k'"):
        SpeechDataModule(sample_rate="16k")
    with pytest.raises(ValueError, match="no sampler or batch_sampler beside them"):
        SpeechDataModule(max_seconds=10, sampler=[0])
