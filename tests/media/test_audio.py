"""Headers, decoding and segments, against libsndfile, FFmpeg and DALI."""

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
    cut_wav,
    decode_audio,
    downmix,
    encode_wav,
    probe_audio,
    read_audio_header,
)
from lightning_dali.media.audio import DALI_CODECS
from tests.media.audio_files import RATE, SAMPLES, encode, encode_av, make_wave

REAL = Path(__file__).resolve().parents[3] / "shared" / "media" / "audio"
REAL_FILES = sorted(p for p in REAL.rglob("*") if p.suffix in (".wav", ".mp3", ".ogg", ".opus"))


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
