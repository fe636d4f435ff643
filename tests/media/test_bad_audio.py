"""Damaged, empty and odd audio files: an error that says why, or samples."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from lightning_dali.media import (
    AudioError,
    check_samples,
    decode_audio,
    probe_audio,
    read_audio_header,
)
from tests.media.audio_files import encode, make_wave


def bad_files() -> dict[str, tuple[bytes, str]]:
    wav, flac = encode(make_wave(), "WAV"), encode(make_wave(), "FLAC")
    return {
        "empty": (b"", "empty file"),
        "no samples": (encode(make_wave(1, 0), "WAV"), "zero samples"),
        "rate 0": (wav[:24] + b"\0\0\0\0" + wav[28:], "sample rate 0"),
        "flac rate 0": (flac[:18] + b"\0\0\x00" + flac[21:], "sample rate 0"),
        "wav header only": (wav[:20], "truncated WAV: no data chunk"),
        "flac half": (flac[: len(flac) // 2], "truncated FLAC: 12345 samples in the header"),
        "flac 95%": (flac[: len(flac) * 95 // 100], "truncated FLAC"),
        "flac head": (flac[:60], "truncated FLAC"),
        "png": (b"\x89PNG\r\n\x1a\n" + bytes(100), r"not audio: starts with .*\(PNG\)"),
        "text": (b"hello world, this is a transcript" * 9, "not audio: starts with b'hello wo'"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", r"\(Git LFS pointer\)"),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_bad_files_say_why(name, tmp_path):
    data, reason = bad_files()[name]
    with pytest.raises(AudioError, match=reason):
        read_audio_header(data)
    with pytest.raises(AudioError, match=reason):
        decode_audio(data)
    (tmp_path / "named.wav").write_bytes(data)
    with pytest.raises(AudioError, match=reason):
        probe_audio(tmp_path / "named.wav")


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
def test_damage_is_an_audio_error_or_nothing(container):
    file = encode(make_wave(1, 3000), container)
    random = np.random.default_rng(0)
    for trial in range(150):
        damaged = bytearray(file[: int(random.integers(1, len(file)))] if trial % 2 else file)
        for position in random.integers(0, min(len(damaged), 200), 3):
            damaged[position] = int(random.integers(256))
        try:
            wave, rate = decode_audio(bytes(damaged))
        except AudioError:
            continue
        assert wave.shape[1] > 0 and rate > 0


def test_video_without_sound():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))))
        output.mux(stream.encode(None))
    with pytest.raises(AudioError, match="no audio stream in mov,mp4"):
        read_audio_header(file.getvalue())


def test_a_wrong_extension_does_not_matter(tmp_path):
    (tmp_path / "speech.wav").write_bytes(encode(make_wave(), "FLAC"))
    assert probe_audio(tmp_path / "speech.wav").format == "FLAC"


def test_flac_cut_in_its_last_frame_or_damaged_fails_when_decoded():
    flac = encode(make_wave(), "FLAC")
    damaged = bytearray(flac)
    damaged[len(flac) // 2] ^= 0xFF
    for data in (flac[:-10], bytes(damaged)):
        with pytest.raises(AudioError, match="corrupt FLAC|truncated FLAC"):
            decode_audio(data)


def test_flac_of_unknown_length_is_decoded_by_ffmpeg():
    flac = bytearray(encode(make_wave(), "FLAC"))
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)
    header = read_audio_header(bytes(flac))
    assert header.num_samples is None and not header.dali_decodes
    np.testing.assert_allclose(decode_audio(bytes(flac))[0], make_wave(), atol=1e-4)


def test_every_flac_block_size_and_rate_code_is_understood():
    for rate in (8000, 11025, 12345, 16000, 44100, 96000):
        for samples in (1, 17, 191, 4096, 4097, 70001):
            assert read_audio_header(encode(make_wave(1, samples), "FLAC", rate=rate)).num_samples == samples


@pytest.mark.parametrize(("value", "reason"), [(np.nan, "NaN samples"), (np.inf, "infinite samples")])
@pytest.mark.parametrize("codec", ["FLOAT", "DOUBLE"])
def test_samples_that_are_no_numbers(codec, value, reason):
    wave = make_wave(2)
    clean = encode(wave, "WAV", codec)
    check_samples(clean, read_audio_header(clean))
    wave[1, 777] = value
    file = encode(wave, "WAV", codec)
    with pytest.raises(AudioError, match=reason):
        check_samples(file, read_audio_header(file))
    with pytest.raises(AudioError, match=reason):
        decode_audio(file)


def test_a_segment_past_the_end():
    for container in ("WAV", "FLAC"):
        with pytest.raises(AudioError, match="zero samples: the segment starts at 20000, the file has 12345"):
            decode_audio(encode(make_wave(), container), frame_offset=20000)


def test_a_segment_of_nothing_is_a_mistake_of_the_caller():
    file = encode(make_wave(), "WAV")
    with pytest.raises(ValueError, match="0 samples; num_frames=-1 means all"):
        decode_audio(file, num_frames=0)
    with pytest.raises(ValueError, match="a sample of 0 or later, got -5"):
        decode_audio(file, frame_offset=-5)
