"""The GPU's FLAC decoder: its kernels on the CPU, against DALI and libsndfile, bit for bit, and on damaged files; the same on a GPU."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_dali import BadSampleError, SpeechDataModule
from lightning_dali.graph import flac, nvrtc, speech_decode
from lightning_dali.graph.dali import collect
from lightning_dali.graph.flac import FlacDecoder, is_decodable
from lightning_dali.graph.spec import Device
from lightning_dali.graph.speech import RowPlan, SpeechExecutor, SpeechSpec
from lightning_dali.media import AudioError, FlacInfo, read_audio_header
from lightning_dali.wire import Blobs, Lane
from tests.graph.flac_files import write_flac
from tests.graph.kernels_on_cpu import build
from tests.speech.audio_files import Files, rows, tone, write

CPU = Device(None, num_threads=1)


# -- files


def encode(wave: np.ndarray, *, rate: int = 16_000, codec: str = "PCM_16", level: float | None = None) -> bytes:
    """`(S, C)` by libFLAC."""
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="FLAC", subtype=codec, compression_level=level)
    return file.getvalue()


def encode_av(wave: np.ndarray, *, rate: int = 16_000, bits: int = 16, block: int = 0, **options: str) -> bytes:
    """`(S, C)` by FFmpeg, which has longer predictors."""
    file = io.BytesIO()
    layout, format = ("mono", "stereo")[wave.shape[1] - 1], {16: "s16", 24: "s32"}[bits]
    with av.open(file, "w", format="flac") as output:
        stream = output.add_stream("flac", rate=rate, layout=layout, options=options)
        stream.format = format
        if block:
            stream.codec_context.options = {**options, "frame_size": str(block)}
        values = np.round(wave * (2**15 - 1)).astype(np.int16) if bits == 16 else (wave * (2**31 - 1)).astype(np.int32)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values.reshape(1, -1)), format=format, layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def wave_of(kind: str, samples: int, channels: int) -> np.ndarray:
    """`(S, C)`."""
    random = np.random.default_rng(samples + channels)
    time = np.arange(samples)[:, None] * (1 + np.arange(channels)) / 100
    return {
        "silence": lambda: np.zeros((samples, channels)),
        "constant": lambda: np.full((samples, channels), 0.25),
        "noise": lambda: random.uniform(-1, 1, (samples, channels)),
        "tone": lambda: 0.5 * np.sin(time) + 0.001 * random.standard_normal((samples, channels)),
        "loud": lambda: np.clip(
            1.2 * np.sin(time[:, :1]) + 0.0001 * random.standard_normal((samples, channels)), -1, 1
        ),
        "coarse": lambda: np.round(np.sin(time) * 60) / 128,
        "clicks": lambda: (random.random((samples, channels)) < 0.002) * 0.9,
    }[kind]()


KINDS = ("silence", "constant", "noise", "tone", "loud", "coarse", "clicks")


def libsndfile(data: bytes) -> np.ndarray:
    """`(S, C)`."""
    wave: np.ndarray = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)[0]
    return wave


def dali(files: Sequence[bytes]) -> list[np.ndarray]:
    """`(S, C)` each, padded."""
    pipeline = speech_decode._pipeline(CPU, len(files))
    speech_decode._run(pipeline, arrays(files))
    waves, _ = collect(pipeline, CPU)
    return [wave.numpy().copy() for wave in waves]


def arrays(files: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(data, np.uint8) for data in files]


def info_of(data: bytes) -> FlacInfo:
    info = read_audio_header(data).flac
    assert info is not None and is_decodable(info)
    return info


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> FlacDecoder:
    return FlacDecoder(torch.device("cpu"), build(tmp_path_factory.mktemp("flac"), flac.source(), flac.KERNELS))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def decoder(request: pytest.FixtureRequest) -> FlacDecoder:
    if request.param == "cpu":
        found: FlacDecoder = request.getfixturevalue("on_cpu")
        return found
    kernels = flac.load_kernels(0)
    assert kernels is not None, "the kernels do not compile here"
    return FlacDecoder(torch.device("cuda", 0), kernels)


def decode(decoder: FlacDecoder, files: Sequence[bytes]) -> tuple[list[np.ndarray], list[int]]:
    batch = decoder.submit(arrays(files), [info_of(data) for data in files])
    assert batch is not None
    failed = batch.failed()
    return [wave.cpu().numpy() for wave in batch.samples()], failed


def assert_same(decoder: FlacDecoder, files: Sequence[bytes]) -> None:
    """As libsndfile, zero beyond, and as DALI altogether."""
    waves, failed = decode(decoder, files)
    assert not failed
    for data, wave, other in zip(files, waves, dali(files), strict=True):
        expected = libsndfile(data)
        assert wave[: len(expected)].tobytes() == expected.tobytes()
        assert not wave[len(expected) :].any()
        assert wave.shape == other.shape and wave.tobytes() == other.tobytes()


# -- what encoders write


@pytest.mark.parametrize("codec", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("channels", [1, 2, 6, 8])
def test_libflacs_files(decoder, codec, channels):
    waves = [wave_of(kind, samples, channels) for kind in KINDS for samples in (4095, 9001)]
    assert_same(decoder, [encode(wave, codec=codec) for wave in waves])


@pytest.mark.parametrize("level", [0.0, 0.4, 1.0])
def test_libflacs_levels(decoder, level):
    assert_same(decoder, [encode(wave_of(kind, 20_000, 2), level=level) for kind in KINDS])


def test_lengths(decoder):
    lengths = (1, 2, 15, 16, 17, 4095, 4096, 4097, 100_000)
    assert_same(decoder, [encode(wave_of("tone", length, 1)) for length in lengths])


def test_more_frames_than_a_byte_counts(decoder):
    assert_same(decoder, [encode(wave_of("tone", 700_000, 1))])


@pytest.mark.parametrize("rate", [8000, 11_025, 12_345, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000, 384_000])
def test_rates(decoder, rate):
    assert_same(decoder, [encode(wave_of("tone", 5000, 1), rate=rate)])


def test_rows_that_differ_in_everything(decoder):
    files = [
        encode(wave_of("tone", 5000, 1)),
        encode(wave_of("noise", 40_000, 2), codec="PCM_24", rate=48_000),
        encode(wave_of("silence", 300, 1), codec="PCM_S8", rate=8000),
        encode_av(wave_of("tone", 30_000, 2), compression_level="12"),
    ]
    batch = decoder.submit(arrays(files), [info_of(data) for data in files])
    assert batch is not None and not batch.failed()
    assert [tuple(wave.shape) for wave in batch.samples()] == [(40_000, 1), (40_000, 2), (40_000, 1), (40_000, 2)]
    for data, wave in zip(files, batch.samples(), strict=True):
        expected = libsndfile(data)
        assert np.array_equal(wave[: len(expected)].cpu().numpy(), expected) and not wave[len(expected) :].any()


@pytest.mark.parametrize("bits", [16, 24])
@pytest.mark.parametrize(
    "options",
    [
        *({"compression_level": level} for level in ("0", "5", "8", "12")),
        {"lpc_type": "cholesky", "min_prediction_order": "32", "max_prediction_order": "32"},
        {"lpc_type": "levinson", "min_prediction_order": "13", "max_prediction_order": "20"},
        *({"ch_mode": mode} for mode in ("indep", "left_side", "right_side", "mid_side")),
        {"min_partition_order": "8", "max_partition_order": "8"},
    ],
    ids=lambda options: ",".join(options.values()),
)
def test_ffmpegs_files(decoder, bits, options):
    assert_same(decoder, [encode_av(wave_of(kind, 20_000, 2), bits=bits, **options) for kind in KINDS])


# -- what the format allows


@pytest.mark.parametrize("order", [-1, 0, 1, 2, 3, 4])
@pytest.mark.parametrize("method", [0, 1])
@pytest.mark.parametrize("escape", [None, 0, 21])
def test_subframes(decoder, order, method, escape):
    values = [round(3000 * np.sin(n / 20)) for n in range(300)]
    if escape == 0:  # residuals of no bits: a polynomial
        values = [sum(n**power for power in range(1, order)) % 30_000 if order > 0 else 0 for n in range(20)]
        values = [value if order > 0 else 0 for value in values]
        values = [5] * 20 if order == 1 else values
    if escape == 0 and order < 0:
        pytest.skip("verbatim has no residual")
    files = [write_flac([values], order=order, method=method, escape=escape, partitions=parts) for parts in (0, 2, 3)]
    assert_same(decoder, files)


@pytest.mark.parametrize("assignment", [None, 8, 9, 10])
@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("wasted", [0, 3])
def test_channels_that_are_coded_together(decoder, assignment, bits, wasted):
    most = (1 << (bits - 1)) - 1 >> wasted << wasted
    random = np.random.default_rng(bits)
    left = random.integers(-most, most, 500)
    right = -left
    left[:2], right[:2] = most, -most  # the side channel at its widest
    if wasted:
        left, right = left >> wasted << wasted, right >> wasted << wasted
    coded = {
        None: (left, right),
        8: (left, left - right),
        9: (left - right, right),
        10: (left + right >> 1, left - right),
    }
    if wasted and assignment == 10:
        coded[10] = (left + right >> 1 + wasted << wasted, left - right)
    channels = [channel.tolist() for channel in coded[assignment]]
    assert_same(decoder, [write_flac(channels, bits=bits, assignment=assignment, method=1, order=1, wasted=wasted)])


@pytest.mark.parametrize(("rate", "code"), [(16_000, 0), (48_000, 12), (11_025, 13), (96_010, 14), (8000, 4)])
def test_ways_to_say_the_rate(decoder, rate, code):
    assert_same(decoder, [write_flac([list(range(100))], rate=rate, rate_code=code)])


def misleading() -> bytes:
    """Sound, but its first frame contains the header of its last one."""
    plain = write_flac([[0] * 640], order=-1)
    header = plain[-139:-131]  # before a byte of the subframe's header, 64 samples of 16 bits and a CRC-16
    assert header[:2] == b"\xff\xf8"
    values = np.frombuffer(header + bytes(2 * 636), ">i2").tolist()
    return write_flac([values], order=-1)


def test_frames_that_look_like_headers(decoder):
    data = misleading()
    assert data.count(data[-139:-131]) == 2
    files = [data, encode(wave_of("tone", 5000, 1))]
    waves, failed = decode(decoder, files)
    assert failed == [0] and np.array_equal(waves[1], libsndfile(files[1]))


def test_streams_that_are_left_to_dali():
    data = write_flac([[1, 2, 3] * 100])
    info = info_of(data)
    variable = data[:8] + (16).to_bytes(2, "big") + data[10:]
    assert not is_decodable(read_audio_header(variable).flac)
    numbered = data[:43] + b"\xf9" + data[44:]
    assert info.audio_offset == 42 and not is_decodable(read_audio_header(numbered).flac)
    assert read_audio_header(encode(wave_of("tone", 100, 1))).flac.fixed_blocks


def test_a_batch_that_needs_too_much_memory_is_left_to_dali(on_cpu):
    data = encode(wave_of("tone", 100, 1))
    long = FlacInfo(16_000, 8, 16, 1 << 30, 4096, 42, True)
    assert is_decodable(long) and on_cpu.submit(arrays([data, data]), [info_of(data), long]) is None


# -- damage


SOUND = [
    encode(wave_of("tone", 9000, 1)),
    encode(wave_of("loud", 5000, 2), codec="PCM_24"),
    encode(wave_of("noise", 2000, 1)),
    encode_av(wave_of("tone", 9000, 2), compression_level="12"),
    write_flac([[round(3000 * np.sin(n / 20)) for n in range(300)]], escape=21),
]


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_decoded_as_libsndfile_does_or_not_at_all(on_cpu, data):
    sound = SOUND[data.draw(st.integers(0, len(SOUND) - 1))]
    file = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(file) - 1) | st.integers(4, min(100, len(file) - 1)))
        match data.draw(st.integers(0, 4)):
            case 0 | 1:
                file[at] ^= 1 << data.draw(st.integers(0, 7))
            case 2:
                file[at : at + 9] = data.draw(st.sampled_from([bytes(9), b"\xff" * 9]))
            case 3:
                del file[at : at + data.draw(st.integers(1, 5))]
            case _:
                del file[max(at, 50) :]
    file = bytes(file)
    try:
        info = read_audio_header(file).flac
    except AudioError:
        return
    if info is None or not is_decodable(info):
        return
    found = []
    for filling in (0, 255):  # what lies around the row has no influence
        around = np.full(len(file) + 64, filling, np.uint8)
        around[: len(file)] = np.frombuffer(file, np.uint8)
        other = np.full(100, filling, np.uint8)
        batch = on_cpu.submit([other, around[: len(file)], other], [info_of(SOUND[0]), info, info_of(SOUND[0])])
        if batch is None:
            return
        assert {0, 2} <= set(batch.failed())
        found.append((1 in batch.failed(), batch.samples()[1][: info.num_samples]))
    assert found[0][0] == found[1][0]
    if not found[0][0]:
        try:
            expected = torch.from_numpy(libsndfile(file))
        except soundfile.LibsndfileError:  # a damaged tag
            expected = torch.from_numpy(libsndfile(sound))
        assert all(torch.equal(samples[:, : expected.shape[1]], expected) for _, samples in found)


def test_bytes_between_frames_are_noticed(decoder):
    data = write_flac([list(range(200))])
    second = data.index(b"\xff\xf8", 44)
    gap = data[:second] + bytes(5) + data[second:]
    twice = data[:42] + data[42:second] * 2 + data[second:]
    assert decode(decoder, [data, gap, twice])[1] == [1, 2]


def test_what_is_missing_is_noticed(decoder):
    data = SOUND[0]
    cut = data[: len(data) - 200]
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    longer = data + b"TAG" + bytes(125)  # ID3 of version 1
    infos = [info_of(data)] * 4
    batch = decoder.submit(arrays([data, cut, bytes(flipped), longer]), infos)
    assert batch is not None and batch.failed() == [1, 2]
    for row in (0, 3):
        assert np.array_equal(batch.samples()[row].cpu().numpy(), libsndfile(data))


# -- batches through the executor


def lane_of(files: Sequence[bytes]) -> Lane:
    headers = [read_audio_header(data) for data in files]
    plans = [RowPlan("audio", (), header.num_channels, header.num_samples or 0, flac=header.flac) for header in headers]
    count = len(files)
    return Lane("audio", SpeechSpec(), Blobs(arrays(files)), {}, plans, [], list(range(count)), [None] * count)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device that decodes FLAC itself, and notes what it decodes."""
    if request.param == "cpu":
        kernels = request.getfixturevalue("on_cpu")
        monkeypatch.setattr(speech_decode, "_flac_decoder", lambda device: kernels)
        yield CPU
        return
    yield Device(0, num_threads=2)


def decoded(executor: SpeechExecutor, lane: Lane) -> list[np.ndarray]:
    found = executor.collect(lane)
    return [found[row].cpu().numpy().T for row in range(len(lane))]


def test_batches_of_either_kind_keep_their_order(device):
    flacs = [encode(wave_of("tone", 3000 + 1000 * n, 1)) for n in range(4)]
    file = io.BytesIO()
    soundfile.write(file, wave_of("tone", 2500, 1), 16_000, format="WAV")
    given_back = [flacs[0], misleading()]  # by the GPU, when the next batches are in hand
    batches = [flacs[:2], [flacs[2], file.getvalue()], given_back, flacs[:1], [file.getvalue()], flacs[3:]]
    executor = SpeechExecutor(device, max_batch_size=4)
    lanes = [lane_of(files) for files in batches]
    for lane in lanes[:3]:
        executor.feed(lane)
    for number, lane in enumerate(lanes):
        for data, wave in zip(batches[number], decoded(executor, lane), strict=True):
            assert np.array_equal(wave, libsndfile(data))
        if number + 3 < len(lanes):
            executor.feed(lanes[number + 3])
    assert executor._decoder._spare is not None
    executor.close()


def test_a_batch_of_flac_needs_no_dali(device, monkeypatch):
    monkeypatch.setattr(speech_decode, "_pipeline", lambda *_: pytest.fail("a pipeline was built"))
    executor = SpeechExecutor(device, max_batch_size=4)
    files = [encode(wave_of("tone", 3000 + 1000 * n, 2)) for n in range(4)]
    lane = lane_of(files)
    executor.feed(lane)
    for data, wave in zip(files, decoded(executor, lane), strict=True):
        assert np.array_equal(wave, libsndfile(data))
    executor.close()


def test_a_damaged_file_has_dalis_error_while_others_are_in_hand(device):
    sound = [encode(wave_of("tone", 20_000, 1)) for _ in range(2)]
    holed = bytearray(sound[0])
    third = len(holed) // 3
    holed[third : 2 * third] = bytes(third)
    lanes = [lane_of([sound[0], bytes(holed)]), lane_of(sound)]
    executor = SpeechExecutor(device, max_batch_size=2)
    for lane in lanes:
        executor.feed(lane)
    with pytest.raises((RuntimeError, ValueError), match="(truncated|corrupt|Error decoding) "):
        executor.collect(lanes[0])
    executor.close()


def test_files_that_the_gpu_never_takes_are_left_to_dali(device, monkeypatch, caplog):
    monkeypatch.setattr(flac.FlacBatch, "failed", lambda self: [0])
    executor = SpeechExecutor(device, max_batch_size=2)
    files = [encode(wave_of("tone", 5000, 1))] * 2
    with caplog.at_level(logging.INFO, logger="lightning_dali.graph.speech_decode"):
        for number in range(5):
            lane = lane_of(files)
            executor.feed(lane)
            assert isinstance(executor._decoder._busy[0], flac.FlacBatch) == (number < 3)
            for wave in decoded(executor, lane):
                assert np.array_equal(wave, libsndfile(files[0]))
    assert [record.message for record in caplog.records] == [
        "These FLAC files are decoded by DALI on the CPU: the decoder for the GPU does not take them."
    ]
    executor.close()


def test_kernels_that_do_not_compile_are_said_once(monkeypatch, caplog):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no NVRTC here")

    monkeypatch.setattr(flac, "compile_kernels", refuse)
    flac.load_kernels.cache_clear()
    with caplog.at_level(logging.INFO, logger="lightning_dali.graph.flac"):
        assert flac.load_kernels(0) is None and flac.load_kernels(0) is None
    flac.load_kernels.cache_clear()
    assert len(caplog.records) == 1 and "did not compile: no NVRTC here" in caplog.text


def test_nvrtc_compiles_the_kernels():
    try:
        binary = nvrtc.compile_binary(flac.source(), architecture="sm_90")
    except OSError as error:
        pytest.skip(f"torch came without NVRTC: {error}")
    assert all(name.encode() in binary for name in flac.KERNELS)
    with pytest.raises(RuntimeError, match=r"NVRTC error 6: kernels.cu\(1\): error"):
        nvrtc.compile_binary("int f( {", architecture="sm_90")


# -- the whole path


def files_of(folder: Path) -> list[Path]:
    return [write(folder / f"{n}.flac", n, seconds=0.4 + 0.3 * n) for n in range(8)]


def datamodule(paths: Sequence[Path], device: Device, **options: Any) -> SpeechDataModule:
    where = "cpu" if device.index is None else "cuda:0"
    dataset = Files(list(paths), torchaudio.load)
    return SpeechDataModule(val_dataset=dataset, batch_size=3, num_workers=0, num_threads=2, device=where, **options)


def test_a_datamodule_gives_libsndfiles_samples(device, tmp_path):
    paths = files_of(tmp_path)
    dm = datamodule(paths, device)
    batched = [[part.to("cpu") for part in batch[:1]] for batch in dm.val_dataloader()]
    dm.close()
    for path, row in zip(paths, rows(batched), strict=True):
        assert np.array_equal(row.numpy().T, libsndfile(path.read_bytes()))


def test_a_damaged_file_in_a_datamodule_is_named_and_dropped(device, tmp_path):
    paths = files_of(tmp_path)
    soundfile.write(paths[4], tone(1, seconds=2.0), 16_000, format="FLAC")
    data = bytearray(paths[4].read_bytes())
    data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
    paths[4].write_bytes(data)
    dm = datamodule(paths, device)
    with pytest.raises(BadSampleError, match="(truncated|corrupt|Error decoding) ") as caught:
        list(dm.val_dataloader())
    dm.close()
    assert (caught.value.sample.dataset_index, caught.value.sample.path) == (4, str(paths[4]))
    dm = datamodule(paths, device, on_bad_sample="drop")
    batched = [[part.to("cpu") for part in batch[:1]] for batch in dm.val_dataloader()]
    dm.close()
    kept = [path for path in paths if path != paths[4]]
    for path, row in zip(kept, rows(batched), strict=True):
        assert np.array_equal(row.numpy().T, libsndfile(path.read_bytes()))
