"""Files that are no use: found, named with their path and reason, and handled by the policy all media share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torchaudio
from torchaudio import transforms as T

from lightning_dali import BadSampleError, SpeechDataModule
from tests.speech.audio_files import Files, tone, write

pytestmark = pytest.mark.faults


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero_samples(path: Path) -> None:
    soundfile.write(path, np.zeros((0, 1)), 16_000, format="WAV")


def wrong_extension(path: Path) -> None:
    path.write_text("this is text, whatever its name says\n" * 20)


def truncated_flac(path: Path) -> None:
    soundfile.write(path, tone(1, seconds=2.0), 16_000, format="FLAC")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def holed_flac(path: Path) -> None:
    """Its beginning and end are fine: no look at the header finds it."""
    soundfile.write(path, tone(1, seconds=2.0), 16_000, format="FLAC")
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    path.write_bytes(data)


def nan(path: Path) -> None:
    wave = tone(1)
    wave[100] = np.nan
    soundfile.write(path, wave, 16_000, format="WAV", subtype="FLOAT")


def rate_zero(path: Path) -> None:
    soundfile.write(path, tone(1), 16_000, format="WAV")
    data = bytearray(path.read_bytes())
    data[24:28] = bytes(4)
    path.write_bytes(data)


def missing(path: Path) -> None:
    pass


FAULTS = {
    empty: "empty file",
    zero_samples: "zero samples",
    wrong_extension: "not audio: starts with",
    truncated_flac: "truncated FLAC",
    holed_flac: "(truncated|corrupt|Error decoding) ",
    nan: "NaN samples",
    rate_zero: "sample rate 0",
    missing: "No such file",
}


@pytest.fixture
def files(tmp_path):
    def make(fault):
        paths = [write(tmp_path / f"{n}.wav", n) for n in range(8)]
        paths[5].unlink()
        fault(paths[5])
        return paths

    return make


def datamodule(paths, **options):
    dataset = Files(paths, torchaudio.load, T.Vol(0.5))
    return SpeechDataModule(val_dataset=dataset, batch_size=4, num_workers=0, num_threads=1, device="cpu", **options)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_file_is_named_and_replaced_or_dropped(files, fault):
    paths = files(fault)
    dm = datamodule(paths)
    with pytest.raises(BadSampleError, match=FAULTS[fault]) as caught:
        list(dm.val_dataloader())
    dm.close()
    assert (caught.value.sample.dataset_index, caught.value.sample.path) == (5, str(paths[5]))
    dm = datamodule(paths, on_bad_sample="drop")
    seen = [batch[2].tolist() for batch in dm.val_dataloader()]
    bad = dm.bad_samples
    dm.close()
    assert seen == [[0, 1, 2, 3], [4, 6, 7]]
    assert [(one.dataset_index, one.path) for one in bad] == [(5, str(paths[5]))]


def test_replacing_keeps_the_size(files):
    dm = datamodule(files(truncated_flac), on_bad_sample="replace")
    second = list(dm.val_dataloader())[1]
    dm.close()
    indices = second[2].tolist()
    assert len(indices) == 4 and set(indices) == {4, 6, 7}
    for row, index in zip(second[0].unpad(), indices, strict=True):
        np.testing.assert_allclose(row[0], tone(index)[:, 0] / 2, atol=1e-4)


def test_a_segment_outside_the_file_is_a_bad_sample(tmp_path):
    path = write(tmp_path / "a.flac")
    dm = SpeechDataModule(
        val_dataset=Files([path], lambda file: torchaudio.load(file, frame_offset=99_999)), num_workers=0, device="cpu"
    )
    with pytest.raises(BadSampleError, match=r"zero samples: the segment is .* the file has 8000"):
        list(dm.val_dataloader())
    dm.close()
