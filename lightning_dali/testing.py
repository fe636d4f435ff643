"""Small media that say which sample they are, and a check that nothing is left behind. For your tests and ours.

Runs anywhere; reads `/proc`, so the leak check is for Linux. Imports neither torch nor DALI.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import wave
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_dali.failures import check_choice

_FORMATS = {"png": ("png", {}), "jpeg": ("jpg", {"quality": 95})}
_SHADES = 64
"""Values that a channel can take: 0, 4, ..., 252, far enough apart to survive JPEG."""

# -- images ----------------------------------------------------------------------------------------------------------


def make_images(
    folder: str | os.PathLike[str], n: int, *, format: str = "png", size: int = 48, classes: int | None = None
) -> list[Path]:
    """Writes `n` solid pictures whose colour is their number, for `recover_ids`.

    Sample `i` has red `4 * (i % 64)`, green `4 * (i // 64)`, blue 0.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many, up to 4,096.
        format: "png" is exact, "jpeg" (quality 95) is within 2 levels.
        size: Height and width.
        classes: None writes into the folder itself. A number makes as many class folders, and sample `i` goes into
            `i % classes`: with `classes=n` torchvision's `ImageFolder` gives sample `i` at index `i` with label `i`.

    Returns:
        The files, sample 0 first.
    """
    check_choice("format", format, _FORMATS)
    if not 0 <= n <= _SHADES**2:
        raise ValueError(f"n: got {n}; allowed: 0 to {_SHADES**2} colours that can be told apart; do: make fewer")
    if classes is not None and classes < 1:
        raise ValueError(f"classes: got {classes}; allowed: None or at least 1; do: pass classes=n for one each")
    ending, options = _FORMATS[format]
    paths = []
    for i in range(n):
        parent = Path(folder) if classes is None else Path(folder) / f"{i % classes:05d}"
        parent.mkdir(parents=True, exist_ok=True)
        paths.append(parent / f"{i:05d}.{ending}")
        colour = (4 * (i % _SHADES), 4 * (i // _SHADES), 0)
        Image.new("RGB", (size, size), colour).save(paths[-1], format=format, **options)
    return paths


def make_photos(
    folder: str | os.PathLike[str],
    n: int,
    *,
    format: str = "jpeg",
    sizes: Sequence[tuple[int, int]] = ((301, 453), (453, 301), (97, 129), (375, 500), (223, 225), (333, 111)),
    seed: int = 0,
) -> list[Path]:
    """Writes `n` smooth random pictures, photo-like enough for comparing pixels: soft shapes, a ramp, a little grain.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many.
        format: "jpeg" (quality 95, chroma at half resolution as cameras do) or "png".
        sizes: (H, W), taken in turn; odd ones by default, since that is where rounding shows.
        seed: Of the shapes.

    Returns:
        The files, sample 0 first.
    """
    check_choice("format", format, _FORMATS)
    ending, options = _FORMATS[format]
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(n):
        paths.append(Path(folder) / f"{i:05d}.{ending}")
        _photo(*sizes[i % len(sizes)], np.random.default_rng((seed, i))).save(paths[-1], format=format, **options)
    return paths


def _photo(height: int, width: int, random: np.random.Generator) -> Image.Image:
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    shapes = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    ramp = np.linspace(-40, 40, width, dtype=np.float32)[None, :, None]
    grain = random.normal(0, 3, (height, width, 1)).astype(np.float32)
    return Image.fromarray(np.clip(shapes + ramp + grain, 0, 255).astype(np.uint8))


@dataclass
class IndexedImages:
    """A map-style dataset of image files whose label is the index: `(image, i)`.

    It opens files as most datasets do, with `PIL.Image.open(path).convert("RGB")`.
    """

    paths: Sequence[str | os.PathLike[str]]
    """The files, sample 0 first, as the makers return them."""
    transform: Callable[[Any], Any] | None = None
    """Applied to the image, as in torchvision's datasets."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = Image.open(self.paths[index]).convert("RGB")
        return image if self.transform is None else self.transform(image), index


def recover_ids(
    batch: Any, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None, scale: float | None = None
) -> list[int]:
    """Which samples of `make_images` a batch holds.

    Args:
        batch: `(B, 3, H, W)`, or a list of `(3, H, W)`, on any device.
        mean: What was subtracted a channel, if it was normalised.
        std: What it was divided by.
        scale: What white is in the batch's own numbers before `mean` and `std`: by default 1 for floats, 255 else.
    """
    ids = []
    for image in batch:
        pixels = _array(image)
        white = scale or (1 if pixels.dtype.kind == "f" else 255)
        channels = pixels.reshape(3, -1).mean(axis=1, dtype=np.float64)
        channels = channels * np.asarray(1 if std is None else std) + np.asarray(0 if mean is None else mean)
        red, green, _ = np.rint(channels * (255 / white) / 4)
        ids.append(int(red) + _SHADES * int(green))
    return ids


def _array(value: Any) -> np.ndarray[Any, Any]:
    """An array or a tensor on any device as an array; bfloat16, which NumPy lacks, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    return np.asarray(value)


# -- audio -----------------------------------------------------------------------------------------------------------


def make_wavs(folder: str | os.PathLike[str], n: int, *, sample_rate: int = 16_000) -> list[Path]:
    """Writes `n` mono 16-bit tones whose pitch is their number, for `recover_wav_ids`.

    Sample `i` is a sine of `200 + 20 * i` Hz and lasts `0.5 + 0.1 * (i % 7)` seconds.

    Args:
        folder: Where to; it is made if it is missing.
        n: How many; the highest pitch must stay below half of `sample_rate`.
        sample_rate: In Hz.

    Returns:
        The files, sample 0 first.
    """
    if n and 2 * (200 + 20 * (n - 1)) >= sample_rate:
        raise ValueError(
            f"n: got {n}; allowed: pitches below {sample_rate / 2:g} Hz; do: make fewer or raise sample_rate"
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(n):
        length = round((0.5 + 0.1 * (i % 7)) * sample_rate)
        tone = 0.5 * np.sin(2 * np.pi * (200 + 20 * i) * np.arange(length) / sample_rate)
        paths.append(Path(folder) / f"{i:05d}.wav")
        with wave.open(str(paths[-1]), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate)
            file.writeframes(np.rint(tone * 32767).astype("<i2").tobytes())
    return paths


def recover_wav_ids(waves: Any, *, sample_rate: int = 16_000) -> list[int]:
    """Which samples of `make_wavs` these are.

    Args:
        waves: Several of `(S,)` or `(1, S)`, with or without padding by zeros.
        sample_rate: Theirs, in Hz.
    """
    ids = []
    for samples in map(_array, waves):
        size = 8 * samples.size  # padding by zeros finds the peak between two bins
        peak = float(np.argmax(np.abs(np.fft.rfft(samples.reshape(-1), size)))) * sample_rate / size
        ids.append(round((peak - 200) / 20))
    return ids


# -- leaks -----------------------------------------------------------------------------------------------------------


@contextmanager
def no_leaks(
    *,
    checks: Collection[str] = ("threads", "children", "descriptors", "shared_memory", "memfds", "environment"),
    grace_seconds: float = 5.0,
    allowed_environment: Collection[str] = (),
) -> Iterator[None]:
    """Raises if the block leaves something behind that was not there before it; a block that raises is not judged.

    Args:
        checks: "threads" (Python's), "children" (with their children), "descriptors" (open files, sockets, pipes),
            "shared_memory" (files in /dev/shm), "memfds" (mapped ones), "environment" (variables set, changed, unset).
        grace_seconds: How long the rest may take to go away by itself; ends early when it has.
        allowed_environment: Variables that may change.

    Raises:
        AssertionError: It lists all that is left.
    """
    makers: dict[str, Callable[[], Callable[[], list[str]]]] = {
        "threads": lambda: _growth(_threads),
        "children": lambda: _growth(_children),
        "descriptors": lambda: _growth(_descriptors),
        "shared_memory": _shared_memory,
        "memfds": lambda: _growth(_memfds),
        "environment": lambda: _environment({"PYTEST_CURRENT_TEST", *allowed_environment}),
    }
    lookers = {name: makers[check_choice("checks", name, makers)]() for name in checks}
    yield
    deadline = time.monotonic() + grace_seconds
    while True:
        gc.collect()
        multiprocessing.active_children()  # waits for those that have ended
        left = {name: found for name, look in lookers.items() if (found := look())}
        if not left:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    lines = [f"  {name.replace('_', ' ')}: {item}" for name, found in left.items() for item in found]
    raise AssertionError("\n".join([f"left behind, {grace_seconds:g} s later:", *lines]))


def _growth(look: Callable[[], Counter[str]]) -> Callable[[], list[str]]:
    before = look()
    return lambda: sorted((look() - before).elements())


def _threads() -> Counter[str]:
    # tqdm's monitor, which Lightning's progress bar starts, lives as long as the process.
    threads = [one for one in threading.enumerate() if type(one).__name__ != "TMonitor"]
    return Counter(f"{one.name} ({'daemon, ' * one.daemon}{one.native_id})" for one in threads)


def _keepers(*names: str) -> set[int]:
    """Attributes of the two processes that multiprocessing starts once and keeps until the interpreter ends."""
    from multiprocessing import forkserver, resource_tracker

    owners = (getattr(forkserver, "_forkserver", None), getattr(resource_tracker, "_resource_tracker", None))
    return {value for owner in owners for name in names if isinstance(value := getattr(owner, name, None), int)}


def _family() -> dict[int, str]:
    """Process ids and commands of this process and all that descend from it."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                pid, command = int(entry.name), (entry / "cmdline").read_bytes()
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended meanwhile
                continue
            commands[pid] = command.replace(b"\0", b" ").decode(errors="replace")[:120].strip() or "(zombie)"
    family, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return {pid: commands.get(pid, "") for pid in family}


def _children() -> Counter[str]:
    ignored = {os.getpid(), *_keepers("_forkserver_pid", "_pid")}
    return Counter(f"{pid} {command}" for pid, command in _family().items() if pid not in ignored)


def _descriptors() -> Counter[str]:
    ignored = _keepers("_forkserver_alive_fd", "_fd")
    return Counter(
        target
        for number, target in _links("/proc/self/fd").items()
        # What drivers and random generators open once stays open.
        if number not in ignored
        and not target.startswith(("/dev/nvidia", "/dev/null", "/dev/urandom", "/proc/", "/sys/"))
    )


def _links(folder: str) -> dict[int, str]:
    links = {}
    for name in os.listdir(folder):
        try:
            links[int(name)] = os.readlink(f"{folder}/{name}")
        except OSError:  # closed meanwhile, such as the listing's own
            continue
    return links


def _memfds() -> Counter[str]:
    with open("/proc/self/maps") as maps:
        return Counter(" inode ".join(line.split(maxsplit=5)[:3:-1]).strip() for line in maps if "/memfd:" in line)


def _shared_memory() -> Callable[[], list[str]]:
    before = set(os.listdir("/dev/shm"))

    def look() -> list[str]:
        new = set(os.listdir("/dev/shm")) - before
        return sorted(new - _held_by_others() if new else new)

    return look


def _held_by_others() -> set[str]:
    """Names in /dev/shm that a process outside the family has mapped or open: the machine is not ours alone."""
    family, held = _family(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in family:
            try:
                text = (entry / "maps").read_text() + "\n".join(_links(f"{entry}/fd").values())
            except OSError:  # gone, or another user's
                continue
            held |= {line.partition("/dev/shm/")[2].split(" ")[0] for line in text.splitlines() if "/dev/shm/" in line}
    return held


def _environment(allowed: Collection[str]) -> Callable[[], list[str]]:
    before = dict(os.environ)

    def look() -> list[str]:
        now, verbs = dict(os.environ), {(False, True): "set", (True, False): "unset", (True, True): "changed"}
        changed = [name for name in {*before, *now} if before.get(name) != now.get(name) and name not in allowed]
        return sorted(f"{name} was {verbs[name in before, name in now]}" for name in changed)

    return look
