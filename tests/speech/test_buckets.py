"""`DurationPlan` is pure arithmetic: all ranks are built in one process."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dali import SpeechDataModule, SpeechManifest
from lightning_dali.audio import load_audio
from lightning_dali.media import durations as durations_module
from lightning_dali.media.durations import audio_lengths
from lightning_dali.modalities.durations import dataset_durations
from lightning_dali.sampling import DurationPlan, Shard
from tests.speech.audio_files import Files, torchaudio_datasets, write


def plans(durations, batch_size, world_size=1, **options):
    options = {"seed": 5, **options}
    return [DurationPlan(durations, batch_size, shard=Shard(r, world_size), **options) for r in range(world_size)]


@settings(max_examples=150, deadline=None)
@given(
    durations=st.lists(st.floats(0, 40), min_size=1, max_size=120),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    max_seconds=st.none() | st.floats(1, 200),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_whatever_the_lengths(durations, batch_size, world_size, max_seconds, shuffle, drop_last, epoch, data):
    ranks = plans(durations, batch_size, world_size, max_seconds=max_seconds, shuffle=shuffle, drop_last=drop_last)
    epochs = [list(plan.batches(epoch)) for plan in ranks]
    assert {len(tasks) for tasks in epochs} == {len(ranks[0])}, "equal steps on all ranks"
    fresh = [index for tasks in epochs for task in tasks if not any(task.repeated) for index in task.indices]
    assert len(fresh) == len(set(fresh)), "no sample twice"
    dropped = len(durations) - len(fresh)
    assert dropped == 0 or (drop_last and dropped <= (world_size - 1) * batch_size)
    for tasks in epochs:
        for task in tasks:
            longest = max(durations[index] for index in task.indices)
            assert 1 <= len(task.indices) <= batch_size
            assert (
                max_seconds is None or len(task.indices) == 1 or longest * len(task.indices) <= max_seconds * (1 + 1e-9)
            )
    done = data.draw(st.integers(0, len(ranks[0])))
    for plan, tasks in zip(ranks, epochs, strict=True):
        start = plan.position(done)
        assert [task.indices for task in plan.batches(epoch, start=start)] == [task.indices for task in tasks[done:]]
        assert plan.num_steps(start=start) == len(tasks) - done


def librispeech(n: int) -> np.ndarray:
    """A flat tail from 1.5 s, and the hump at 12 - 16.5 s that cutting at 16.5 s makes."""
    random = np.random.default_rng(0)
    return np.where(random.random(n) < 0.5, 1.5 + 15 * random.beta(5, 1.3, n), random.uniform(1.5, 16.5, n))


@pytest.mark.parametrize(("batch_size", "max_seconds"), [(32, None), (64, 300.0)])
def test_padding_is_under_a_tenth_where_random_batches_waste_almost_a_third(batch_size, max_seconds):
    seconds = librispeech(4000)
    random = np.random.default_rng(1).permutation(seconds)[: 4000 // 32 * 32].reshape(-1, 32)
    assert 1 - random.sum() / (random.max(1).sum() * 32) > 0.3
    (plan,) = plans(seconds, batch_size, max_seconds=max_seconds)
    assert 0 < plan.padding_waste < 0.1


def test_batches_are_shuffled_within_and_across_and_differ_between_epochs():
    seconds = librispeech(2000)
    (plan,) = plans(seconds, 16)
    first, again, second = (list(plan.batches(epoch)) for epoch in (0, 0, 1))
    assert first == again
    assert {frozenset(task.indices) for task in first}.isdisjoint({frozenset(task.indices) for task in second})
    longest = [max(seconds[list(task.indices)]) for task in first]
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.3, "lengths come in no order"
    (evaluation,) = plans(seconds, 16, shuffle=False, drop_last=False)
    longest = [max(seconds[list(task.indices)]) for task in evaluation.batches(0)]
    assert longest == sorted(longest, reverse=True)


def test_the_order_does_not_depend_on_the_number_of_ranks():
    seconds = librispeech(600)
    (alone,) = plans(seconds, 8)
    together = plans(seconds, 8, world_size=3)
    joined = [task.indices for step in zip(*(plan.batches(2) for plan in together), strict=True) for task in step]
    assert joined == [task.indices for task in alone.batches(2)][: len(joined)]


def test_a_sample_longer_than_max_seconds_is_a_batch_of_its_own_and_is_told(caplog):
    (plan,) = plans([30.0, 1.0, 1.0, 2.0], 4, max_seconds=10, drop_last=False)
    assert (0,) in [task.indices for task in plan.batches(0)]
    assert "1 sample(s) are longer than max_seconds=10, up to 30.0 s" in caplog.text


@pytest.mark.parametrize(
    ("change", "text"), [({"max_seconds": 0}, "max_seconds is 0"), ({"durations": [-1.0]}, "durations must be")]
)
def test_what_is_refused(change, text):
    with pytest.raises(ValueError, match=text):
        DurationPlan(**{"durations": [1.0], "batch_size": 2, "shard": Shard(), "seed": 0, **change})


def test_durations_come_from_headers_and_nothing_is_read_twice(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "lengths.sqlite3"
    for name, (dataset, paths) in torchaudio_datasets(tmp_path).items():
        expected = [0.4 + n / 10 if name == "LIBRISPEECH" else 0.5 for n in range(len(paths))]
        assert dataset_durations(dataset, cache=cache).tolist() == pytest.approx(expected), name
    files = [str(path) for path in paths] + [str(tmp_path / "missing.wav")]
    probed = []
    original = durations_module.probe_audio
    monkeypatch.setattr(durations_module, "probe_audio", lambda path: probed.append(path) or original(path))
    assert [length.seconds for length in audio_lengths(files, cache=cache).values()] == [0.5, 0.5, 0.0]
    assert probed == [files[-1]]
    write(paths[0], seconds=1.0, rate=48_000)
    os.utime(paths[0], ns=(1, 1))
    assert audio_lengths(files, cache=cache)[files[0]].seconds == 1.0, "a file that changed is looked at again"
    cache.write_bytes(b"no database" * 1000)
    assert audio_lengths(files[:1], cache=cache)[files[0]].seconds == 1.0, "a damaged cache fails nothing"


def test_durations_of_segments_bytes_and_waveforms(tmp_path):
    path = write(tmp_path / "a.flac", seconds=2.0)
    cache = tmp_path / "lengths.sqlite3"
    forms = {
        "segment": (Files([path], lambda file: load_audio(file, offset_seconds=0.5, duration_seconds=1.0)), 1.0),
        "past the end": (Files([path], lambda file: load_audio(file, offset_seconds=1.5, duration_seconds=9.0)), 0.5),
        "manifest": (SpeechManifest([{"path": str(path), "duration": 1.25}]), 1.25),
        "manifest that does not say": (SpeechManifest([{"path": str(path)}]), 2.0),
        "bytes": ([(path.read_bytes(), 1)], 2.0),
        "waveform": ([(load_audio(path)[0], 16_000)], 2.0),
        "dict": ([{"audio": {"bytes": path.read_bytes(), "path": None}}], 2.0),
        "broken": (Files([path], lambda file: 1 / 0), 0.0),
    }
    for name, (dataset, seconds) in forms.items():
        assert dataset_durations(dataset, cache=cache).tolist() == pytest.approx([seconds]), name


def test_a_datamodule_makes_batches_by_duration_and_resumes(tmp_path):
    paths = [write(tmp_path / f"{n:02d}.wav", n, seconds=0.1 + 0.05 * (n * 7 % 20)) for n in range(40)]
    shutil.copy(paths[0], tmp_path / "x.wav")

    def made():
        return SpeechDataModule(
            train_dataset=Files(paths, load_audio), val_dataset=Files(paths, load_audio), max_seconds=3.0, batch_size=16,
            num_workers=0, num_threads=1, seed=1, device="cpu", length_cache=str(tmp_path / "lengths.sqlite3"),
        )  # fmt: skip

    dm = made()
    loader = dm.train_dataloader()
    whole = list(loader)
    assert len(whole) == len(loader)
    assert sorted(index for batch in whole for index in batch[2].tolist()) == list(range(40))
    for batch in [*whole, *dm.val_dataloader()]:
        assert batch[0].data.shape[0] * batch[0].data.shape[-1] <= 3.0 * 16_000
    loader.set_epoch(0)
    running = iter(loader)
    for _ in range(3):
        next(running)
    state = loader.state_dict()
    running.close()
    dm.close()
    other = made()
    resumed = other.train_dataloader()
    resumed.load_state_dict(state)
    assert [batch[2].tolist() for batch in resumed] == [batch[2].tolist() for batch in whole[3:]]
    other.close()
