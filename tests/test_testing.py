"""The makers' media can be read back, the leak check finds leaks, and the fixtures of conftest.py keep their word."""

import io
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_dali.testing import (
    IndexedImages,
    make_images,
    make_photos,
    make_wavs,
    no_leaks,
    recover_ids,
    recover_wav_ids,
)

TO_TENSOR = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])

# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["png", "jpeg"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_ids_come_back(tmp_path: Path, format: str, dtype: torch.dtype) -> None:
    paths = make_images(tmp_path, 131, format=format)
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(dtype, scale=True)])
    data = IndexedImages(paths, transform)
    batch = torch.stack([image for image, _ in (data[i] for i in range(len(data)))])
    assert batch.shape == (131, 3, 48, 48)
    assert recover_ids(batch) == list(range(131))
    assert recover_ids(list(batch)) == list(range(131))


def test_ids_come_back_from_normalised_batches(tmp_path: Path) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = IndexedImages(make_images(tmp_path, 70), v2.Compose([TO_TENSOR, v2.Normalize(mean, std)]))
    batch = torch.stack([data[i][0] for i in range(70)])
    assert recover_ids(batch, mean=mean, std=std) == list(range(70))
    assert recover_ids(batch.numpy(), mean=mean, std=std) == list(range(70))


def test_the_last_colour_comes_back() -> None:
    pixels = np.broadcast_to(np.array([252, 252, 0], np.uint8)[:, None, None], (1, 3, 8, 8))
    assert recover_ids(pixels) == [4095]
    assert recover_ids(pixels.astype(np.float32), scale=255) == [4095]


def test_image_folder_labels_are_the_ids(tmp_path: Path) -> None:
    paths = make_images(tmp_path, 70, classes=70)
    folder = ImageFolder(str(tmp_path), TO_TENSOR)
    assert [Path(path) for path, _ in folder.samples] == paths
    assert [label for _, label in folder.samples] == list(range(70))
    assert recover_ids([image for image, _ in folder]) == list(range(70))


def test_image_folder_of_few_classes(tmp_path: Path) -> None:
    make_images(tmp_path, 10, classes=3)
    folder = ImageFolder(str(tmp_path), TO_TENSOR)
    assert [recover_ids([image])[0] % 3 for image, _ in folder] == [label for _, label in folder]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 4097}, "n: got 4097; allowed: 0 to 4096"),
        ({"n": -1}, "n: got -1; allowed: 0 to 4096"),
        ({"n": 1, "format": "jpg"}, "format: got 'jpg'; allowed: 'png', 'jpeg'; do: .*format='jpeg'"),
        ({"n": 1, "classes": 0}, "classes: got 0; allowed: None or at least 1"),
    ],
)
def test_make_images_refuses(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_images(tmp_path, **arguments)  # type: ignore[arg-type]


def test_photos_are_smooth_odd_and_repeatable(tmp_path: Path) -> None:
    paths = make_photos(tmp_path / "a", 6)
    again = make_photos(tmp_path / "b", 6)
    other = make_photos(tmp_path / "c", 6, seed=1)
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    assert all(one.read_bytes() != two.read_bytes() for one, two in zip(paths, other, strict=True))
    images = [np.asarray(Image.open(path), np.float32) for path in paths]
    assert [image.shape for image in images][:3] == [(301, 453, 3), (453, 301, 3), (97, 129, 3)]
    for image in images:
        assert np.abs(np.diff(image, axis=1)).mean() < 8  # of 255, between neighbours
        assert image.std() > 15


# -- audio -----------------------------------------------------------------------------------------------------------


def test_tones_come_back_padded_or_not(tmp_path: Path) -> None:
    paths = make_wavs(tmp_path, 21)
    tones = []
    for i, path in enumerate(paths):
        with wave.open(str(path)) as file:
            assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
            assert file.getnframes() == round((0.5 + 0.1 * (i % 7)) * 16_000)
            tones.append(np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768)
    assert recover_wav_ids(tones) == list(range(21))
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(tone) for tone in tones], batch_first=True)
    assert recover_wav_ids(padded) == list(range(21))
    assert recover_wav_ids(padded[:, None]) == list(range(21))
    with pytest.raises(ValueError, match="n: got 500; allowed: pitches below 8000 Hz"):
        make_wavs(tmp_path, 500)


# -- leaks -----------------------------------------------------------------------------------------------------------


@contextmanager
def a_thread() -> Iterator[str]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    yield r"threads: forgotten \(daemon\)"
    end.set()
    thread.join()


@contextmanager
def a_child() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield rf"children: {process.pid} .*sleep\(60\)"
        process.kill()


@contextmanager
def a_grandchild() -> Iterator[str]:
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, flush=True); input()"
    )
    sleep = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, sleep], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        yield rf"children: {grandchild} "
        os.kill(grandchild, 9)
        process.kill()


@contextmanager
def a_descriptor() -> Iterator[str]:
    with open(__file__) as file:
        yield f"descriptors: {re.escape(os.path.realpath(file.name))}"


@contextmanager
def a_shared_memory_file() -> Iterator[str]:
    path = Path(f"/dev/shm/lightning_dali_test_{os.getpid()}")
    path.touch()
    yield f"shared memory: {path.name}"
    path.unlink()


@contextmanager
def a_memfd() -> Iterator[str]:
    number = os.memfd_create("forgotten")
    os.ftruncate(number, 4096)
    mapped = mmap.mmap(number, 4096)
    os.close(number)
    yield "memfds: /memfd:forgotten"
    mapped.close()


@contextmanager
def a_variable() -> Iterator[str]:
    os.environ["LIGHTNING_DALI_FORGOTTEN"] = "1"
    yield "environment: LIGHTNING_DALI_FORGOTTEN was set"
    del os.environ["LIGHTNING_DALI_FORGOTTEN"]


LEAKS = [a_thread, a_child, a_grandchild, a_descriptor, a_shared_memory_file, a_memfd, a_variable]


@pytest.mark.parametrize("leak", LEAKS)
def test_each_kind_of_leak_is_found_and_named(leak: Callable[[], "contextmanager[str]"]) -> None:
    context = leak()
    with pytest.raises(AssertionError, match="left behind, 0.1 s later") as caught, no_leaks(grace_seconds=0.1):
        pattern = context.__enter__()
    found = str(caught.value)
    context.__exit__(None, None, None)
    assert re.search(pattern, found), found
    with no_leaks(), leak():  # and nothing is said about what ends in time
        pass


@pytest.mark.parametrize("leak", LEAKS)
def test_what_was_there_before_is_not_a_leak(leak: Callable[[], "contextmanager[str]"]) -> None:
    with leak(), no_leaks(grace_seconds=0):
        pass


def test_unset_and_changed_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DALI_A", "1")
    monkeypatch.setenv("LIGHTNING_DALI_B", "1")
    with pytest.raises(AssertionError) as caught, no_leaks(checks=["environment"], grace_seconds=0):  # noqa: PT012
        del os.environ["LIGHTNING_DALI_A"]
        os.environ["LIGHTNING_DALI_B"] = "2"
    assert "LIGHTNING_DALI_A was unset" in str(caught.value)
    assert "LIGHTNING_DALI_B was changed" in str(caught.value)
    with no_leaks(checks=["environment"], grace_seconds=0, allowed_environment=["LIGHTNING_DALI_B"]):
        os.environ["LIGHTNING_DALI_B"] = "3"


def test_what_ends_within_the_grace_is_not_a_leak() -> None:
    start = time.monotonic()
    with no_leaks(grace_seconds=5):
        threading.Thread(target=time.sleep, args=(0.3,)).start()
    assert time.monotonic() - start < 3


def test_another_process_own_shared_memory_is_not_ours() -> None:
    """Detached from us by an intermediate that ends, as a stranger on the same machine would be."""
    name, hold = f"lightning_dali_stranger_{os.getpid()}", "import time; f = open({!r}, 'w'); time.sleep(60)"
    path = Path("/dev/shm", name)
    hold = hold.format(str(path))
    code = f"import subprocess as s, sys; print(s.Popen([sys.executable, '-c', {hold!r}], stdout=-3).pid)"
    with no_leaks(checks=["shared_memory", "children"]):
        output = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, timeout=30, check=True).stdout
        while not path.exists():
            time.sleep(0.02)
    os.kill(int(output), 9)
    path.unlink()


def test_a_block_that_raises_is_not_judged() -> None:
    with pytest.raises(KeyError, match="mine"), no_leaks(grace_seconds=0):  # noqa: PT012
        os.environ["LIGHTNING_DALI_FORGOTTEN"] = "1"
        raise KeyError("mine")
    del os.environ["LIGHTNING_DALI_FORGOTTEN"]


def test_unknown_check_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="checks: got 'thread'; allowed: 'threads', .*do: .*'threads'"),
        no_leaks(checks=["thread"]),
    ):
        pass


# -- conftest.py -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_pytest(tmp_path: Path, run_script: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Runs a test file under our conftest.py and settings; returns pytest's output."""
    root = Path(__file__).parents[1]
    shutil.copy(root / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(root / "tests/conftest.py", tmp_path / "tests")

    def run(code: str, **env: str) -> str:
        (tmp_path / "tests/test_it.py").write_text(code)
        start = "import pytest, sys; sys.exit(pytest.main(['-p', 'no:cacheprovider']))"
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        return run_script(start, 60, env={"PYTHONPATH": path, **env})[1]

    return run


@pytest.mark.slow
def test_police_judges_every_test_but_those_that_failed_or_are_allowed(run_pytest: Callable[..., str]) -> None:
    output = run_pytest(
        """
import os, threading, time, pytest
def test_leaks(): os.environ["A"] = "1"
def test_fails(): os.environ["B"] = "1"; assert False
@pytest.mark.leaks_allowed("shows it")
def test_allowed(): os.environ["C"] = "1"
@pytest.mark.leaks_allowed
def test_no_reason(): pass
def test_clean(): pass
"""
    )
    assert "environment: A was set" in output
    assert "B was set" not in output
    assert "C was set" not in output
    assert "leaks_allowed needs a reason" in output
    assert "1 failed, 3 passed, 2 errors" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promised", "ends"), [("", "3 skipped"), ("1", "2 skipped, 1 error"), ("2", "1 skipped, 2 errors")]
)
def test_gpu_tests_are_skipped_unless_promised(run_pytest: Callable[..., str], promised: str, ends: str) -> None:
    code = """
import pytest
@pytest.mark.gpu
def test_one(): pass
@pytest.mark.multi_gpu
def test_two(): pass
@pytest.mark.multi_gpu(n=4)
def test_four(): pass
"""
    output = run_pytest(code, CUDA_VISIBLE_DEVICES="", LIGHTNING_DALI_REQUIRE_GPU=promised)
    assert ends in output
    assert f"LIGHTNING_DALI_REQUIRE_GPU={promised} promised" in output or not promised


@pytest.mark.slow
def test_soak_is_a_tenth_unless_asked(run_pytest: Callable[..., str]) -> None:
    code = "def test_it(soak): assert (soak(200), soak(3)) == {}"
    assert "1 passed" in run_pytest(code.format("(20, 1)"), LIGHTNING_DALI_SOAK="")
    assert "1 passed" in run_pytest(code.format("(200, 3)"), LIGHTNING_DALI_SOAK="1")


def test_run_script_returns_how_it_ended(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import sys, os; print(sys.argv[1], os.environ['A']); print('oh', file=sys.stderr); sys.exit(3)"
    assert run_script(code, args=("x",), env={"A": "y"}) == (3, "x y\n", "oh\n")
    assert run_script("import lightning_dali.testing")[0] == 0


def test_run_script_can_interrupt(run_script: Callable[..., tuple[int, str, str]]) -> None:
    def interrupt(process: "subprocess.Popen[bytes]", printed: Callable[[], str]) -> None:
        while "ready" not in printed():
            time.sleep(0.02)
        process.send_signal(2)

    rc, _, stderr = run_script("import time; print('ready', flush=True); time.sleep(60)", 10, meanwhile=interrupt)
    assert rc == -2 or rc == 130
    assert "KeyboardInterrupt" in stderr


def test_run_script_fails_a_hang_and_shows_where(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import threading\ndef stuck_here(): threading.Lock().acquire(); threading.Event().wait()\nstuck_here()"
    with pytest.raises(pytest.fail.Exception, match="still running after 1 s") as caught:
        run_script(code, 1)
    assert "stuck_here" in str(caught.value)


def test_run_script_fails_and_ends_orphans(run_script: Callable[..., tuple[int, str, str]]) -> None:
    sleep = "import time; time.sleep(60)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True)"
    with pytest.raises(pytest.fail.Exception, match=r"left processes behind: \['\d+ .*sleep\(60\)") as caught:
        run_script(code)
    pid = int(re.findall(r"behind: \['(\d+)", str(caught.value))[0])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_testing_needs_no_torch(run_script: Callable[..., tuple[int, str, str]]) -> None:
    code = "import lightning_dali.testing, sys; print({'torch', 'nvidia.dali', 'lightning'} & set(sys.modules))"
    assert run_script(code)[1] == "set()\n"


def test_indexed_images_open_as_datasets_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through `PIL.Image.open`, looked up when called: that is where capture sits."""
    data = IndexedImages(make_images(tmp_path, 3))
    assert [label for _, label in (data[i] for i in range(3))] == [0, 1, 2]
    seen = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda path: seen.append(path) or real(io.BytesIO(path.read_bytes())))
    image, label = data[2]
    assert (image.mode, image.size, label, seen) == ("RGB", (48, 48), 2, [data.paths[2]])
