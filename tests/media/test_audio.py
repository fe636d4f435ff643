"""Headers, decoding, segments and bad files, against libsndfile, FFmpeg and DALI."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from lightning_dali.media import (
    AudioError,
    MediaError,
    check_samples,
    cut_wav,
    decode_audio,
    downmix,
    encode_wav,
    probe_audio,
    read_audio_header,
)
from lightning_dali.media.audio import DALI_CODECS

RATE, SAMPLES = 16000, 12345
REAL = Path(__file__).resolve().parents[3] / "shared" / "media" / "audio"
REAL_FILES = sorted(p for p in REAL.rglob("*") if p.suffix in (".wav", ".mp3", ".ogg", ".opus"))


def make_wave(channels: int = 1, samples: int = SAMPLES, rate: int = RATE) -> np.ndarray:
    """A tone in noise, other in each channel, `(C, S)`."""
    time = np.arange(samples) / rate
    noise = np.random.default_rng(channels).standard_normal((channels, samples))
    tones = np.stack([np.sin(2 * np.pi * (440 + 110 * c) * time) for c in range(channels)])
    return (0.5 * tones + 0.02 * noise).astype(np.float32)


def encode(wave: np.ndarray, container: str, codec: str | None = None, rate: int = RATE) -> bytes:
    """Encodes `(C, S)` with libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, wave.T, rate, format=container, subtype=codec)
    return file.getvalue()


def encode_av(wave: np.ndarray, container: str, codec: str, rate: int = 48000) -> bytes:
    """Encodes `(C, S)` with FFmpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono" if len(wave) == 1 else "stereo")
        frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout=stream.layout.name)
        frame.sample_rate, frame.pts = rate, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def reference_av(data: bytes, codec: str | None = None) -> np.ndarray:
    """FFmpeg's samples `(C, S)`, by frames and without a resampler."""
    pieces = []
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        decoder = stream.codec_context
        if codec is not None:
            decoder = av.CodecContext.create(codec, "r")
            decoder.extradata = stream.codec_context.extradata
        for packet in container.demux(stream):
            for frame in decoder.decode(packet):
                piece = frame.to_ndarray()
                if not frame.format.is_planar:
                    piece = piece.reshape(-1, frame.layout.nb_channels).T
                scale = {"u8": 128, "s16": 1 << 15, "s32": 1 << 31}.get(frame.format.name.rstrip("p"), 1)
                pieces.append((piece - 128.0 * (scale == 128)) / scale)
    return np.concatenate(pieces, axis=1).astype(np.float32)


def dali_decode(files: list[bytes]) -> list[np.ndarray]:
    """DALI's samples `(C, S)`."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=len(files), num_threads=1, device_id=None)
    def pipeline():
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        return fn.decoders.audio(encoded, dtype=types.FLOAT)[0]

    built = pipeline()
    built.build()
    built.feed_input("encoded", [np.frombuffer(file, np.uint8) for file in files])
    (output,) = built.run()
    return [np.atleast_2d(np.array(output.at(i)).T) for i in range(len(files))]


def dali_cases() -> list[tuple[str, str, int]]:
    """Every (container, codec) that the table promises and libsndfile can write, mono and stereo."""
    cases = [(c, s) for c, subtypes in DALI_CODECS.items() for s in sorted(subtypes) if soundfile.check_format(c, s)]
    return [(c, s, channels) for c, s in cases for channels in (1, 2)]


def test_dali_decodes_what_the_header_says_it_does():
    cases = dali_cases()
    assert {"PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ULAW", "ALAW"} <= {s for c, s, _ in cases if c == "WAV"}
    assert {("FLAC", "PCM_16", 1), ("OGG", "VORBIS", 2), ("OGG", "OPUS", 1)} <= set(cases)
    files = [encode(make_wave(channels), container, codec) for container, codec, channels in cases]
    for case, file, decoded in zip(cases, files, dali_decode(files), strict=True):
        header = read_audio_header(file)
        assert header.dali_decodes, case
        ours, rate = decode_audio(file)
        assert (header.codec, header.num_channels, header.num_samples) == (case[1], *ours.shape), case
        assert rate == RATE and ours.dtype == np.float32
        theirs, _ = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
        np.testing.assert_allclose(ours, theirs.T, atol=1e-6, err_msg=str(case))
        np.testing.assert_allclose(decoded, ours, atol=1e-4, err_msg=str(case))


@pytest.mark.parametrize(
    ("container", "codec"), [("WAV", "IMA_ADPCM"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("AU", "PCM_16")]
)
def test_other_codecs_are_decoded_in_the_worker(container, codec):
    file = encode(make_wave(), container, codec)
    header = read_audio_header(file)
    assert header.codec == codec
    assert header.dali_decodes == (container in ("AIFF", "AU"))
    wave, _ = decode_audio(file)
    np.testing.assert_allclose(wave, reference_av(file), atol=1e-3)


@pytest.mark.parametrize(
    ("container", "codec", "channels"),
    [("ipod", "aac", 1), ("mp4", "aac", 2), ("webm", "libopus", 2), ("webm", "libopus", 1), ("adts", "aac", 1)],
)
def test_ffmpeg_only_containers(container, codec, channels):
    file = encode_av(make_wave(channels, 48000, 48000), container, codec)
    header = read_audio_header(file)
    assert not header.dali_decodes
    assert (header.sample_rate, header.num_channels, header.num_samples) == (48000, channels, None)
    if container != "adts":  # a bare stream has no length, FFmpeg guesses from the bit rate
        assert header.duration_seconds == pytest.approx(1.0, abs=0.05)
    wave, rate = decode_audio(file)
    reference = reference_av(file)
    assert rate == 48000 and wave.shape == reference.shape
    np.testing.assert_allclose(wave, reference, atol=1e-3)
    piece, _ = decode_audio(file, frame_offset=5000, num_frames=7000)
    np.testing.assert_array_equal(piece, wave[:, 5000:12000])


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda p: p.name)
def test_real_files(path):
    data = path.read_bytes()
    header = probe_audio(path)
    assert header == read_audio_header(data)
    wave, rate = decode_audio(data)
    assert rate == header.sample_rate
    assert header.num_samples in (None, wave.shape[1])
    # FFmpeg's own Opus decoder differs from libopus, the reference that libsndfile and DALI use, by up to 0.01
    reference = reference_av(data, "libopus" if path.suffix == ".opus" else None)
    np.testing.assert_allclose(wave, reference, atol=1e-3)
    assert header.duration_seconds == pytest.approx(wave.shape[1] / rate, rel=0.01)


@pytest.mark.parametrize(
    ("container", "codec", "atol"),
    [
        ("WAV", "PCM_16", 0),
        ("WAV", "ULAW", 0),
        ("WAV", "IMA_ADPCM", 0),
        ("FLAC", "PCM_24", 0),
        ("OGG", "VORBIS", 0),
        ("OGG", "OPUS", 0),
        ("MP3", None, 1e-6),
    ],
)
def test_a_segment_is_what_cutting_the_whole_gives(container, codec, atol):
    file = encode(make_wave(2 if codec != "OPUS" else 1), container, codec)
    whole, _ = decode_audio(file)
    for start, count in ((0, 100), (4000, 3000), (SAMPLES - 500, 500)):
        piece, _ = decode_audio(file, frame_offset=start, num_frames=count)
        np.testing.assert_allclose(piece, whole[:, start : start + count], atol=atol)
    piece, _ = decode_audio(file, offset_seconds=0.25, duration_seconds=0.125)
    np.testing.assert_allclose(piece, whole[:, 4000:6000], atol=atol)
    clipped, _ = decode_audio(file, frame_offset=SAMPLES - 500, num_frames=9000)
    assert clipped.shape[1] == whole.shape[1] - (SAMPLES - 500)


@pytest.mark.parametrize("codec", ["PCM_U8", "PCM_16", "PCM_24", "FLOAT", "ULAW"])
@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_cut_wav_needs_no_decoding(container, codec):
    wave = make_wave(1)
    file = encode(wave, container, codec)
    header = read_audio_header(file)
    assert header.format == "WAV"
    for start, stop in ((0, SAMPLES), (1001, 2002), (SAMPLES - 1, SAMPLES)):
        cut = cut_wav(file, header, start, stop)
        assert read_audio_header(cut).num_samples == stop - start
        np.testing.assert_array_equal(decode_audio(cut)[0], decode_audio(file)[0][:, start:stop])
    with pytest.raises(ValueError, match=r"\[5, 99999\) do not lie in \[0, 12345\)"):
        cut_wav(file, header, 5, 99999)


def test_cut_wav_refuses_codecs_without_fixed_frames():
    file = encode(make_wave(), "WAV", "IMA_ADPCM")
    with pytest.raises(ValueError, match="cut_wav cannot cut WAV/IMA_ADPCM"):
        cut_wav(file, read_audio_header(file), 0, 10)


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_streamed_wav_has_the_samples_that_follow(size):
    file = encode(make_wave(), "WAV")
    streamed = file[:4] + struct.pack("<I", size) + file[8:40] + struct.pack("<I", size) + file[44:]
    header = read_audio_header(streamed)
    assert header.num_samples == SAMPLES
    assert not header.dali_decodes
    np.testing.assert_array_equal(decode_audio(streamed)[0], decode_audio(file)[0])
    mended = cut_wav(streamed, header, 0, SAMPLES)
    assert read_audio_header(mended).dali_decodes
    np.testing.assert_array_equal(dali_decode([mended])[0], decode_audio(file)[0])


def test_chunks_before_and_after_the_samples():
    file = encode(make_wave(), "WAV")
    extra = b"LIST" + struct.pack("<I", 5) + b"abcde\0"  # an odd size is padded
    odd = file[:12] + extra + file[12:] + extra
    assert read_audio_header(odd).num_samples == SAMPLES
    np.testing.assert_array_equal(decode_audio(odd)[0], decode_audio(file)[0])


def test_a_wav_that_ends_early_keeps_what_is_there():
    file = encode(make_wave(2), "WAV")
    cut = file[: len(file) // 2 + 1]
    header = read_audio_header(cut)
    assert header.num_samples == (len(cut) - 44) // 4
    assert header.missing_bytes > 0
    assert decode_audio(cut)[0].shape == (2, header.num_samples) == dali_decode([cut])[0].shape


def test_a_memory_view_is_read_without_copies_of_the_kind():
    file = encode(make_wave(), "FLAC")
    assert read_audio_header(memoryview(file)) == read_audio_header(file)
    np.testing.assert_array_equal(decode_audio(memoryview(file))[0], decode_audio(file)[0])


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


def test_reasons_survive_a_pickle():
    import pickle

    error = pickle.loads(pickle.dumps(AudioError("zero samples", "a.wav")))
    assert isinstance(error, MediaError) and (str(error), error.path) == ("zero samples", "a.wav")


def test_downmix_reports_opposite_phase():
    wave = make_wave(1)
    stereo = np.concatenate([wave, -wave])
    mono, opposite = downmix(stereo)
    assert opposite and mono.shape == (1, SAMPLES)
    for sides in (np.concatenate([wave, wave]), np.concatenate([wave, 0 * wave]), wave, make_wave(2), 0 * stereo):
        assert not downmix(sides).opposite_phase
    np.testing.assert_allclose(downmix(make_wave(2)).wave[0], make_wave(2).mean(axis=0), atol=1e-7)


def test_encode_wav_round_trip():
    wave = 3 * make_wave(2)  # beyond full scale
    file = encode_wav(wave, 22050)
    header = read_audio_header(file)
    assert (header.codec, header.sample_rate, header.num_channels, header.num_samples) == ("FLOAT", 22050, 2, SAMPLES)
    np.testing.assert_array_equal(decode_audio(file)[0], wave)
    np.testing.assert_array_equal(dali_decode([file])[0], wave)
