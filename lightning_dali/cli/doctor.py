"""`lightning-dali doctor`: what this machine has, and what to do about what it lacks. Runs anywhere; changes nothing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dali.environment import cores

__all__ = ["Check", "examine"]

PACKAGES = [
    "lightning-dali",
    "torch",
    "torchvision",
    "torchaudio",
    "lightning",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "numpy",
    "pillow",
    "av",
    "soundfile",
    "omegaconf",
    "hydra-core",
    "pynvvideocodec",
]
TESTED_DALI = "2.4"
OPEN_FILES = 4096
"""Each worker takes some ten descriptors, each slab one for a moment."""
SHM_BYTES = 1 << 30
_CORES_EACH = 4


@dataclass(frozen=True)
class Check:
    """One line of the examination."""

    name: str
    found: str
    advice: str = ""
    """Empty: all is well."""


def examine() -> list[Check]:
    """All checks. One that fails says so; none raises."""
    checks: list[Check] = []
    for one in _CHECKS:
        try:
            checks += one()
        except Exception as error:
            checks.append(
                Check(one.__name__.strip("_"), f"could not be looked at: {type(error).__name__}: {error}", "-")
            )
    return checks


def _system() -> Iterator[Check]:
    yield Check(
        "system",
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "" if platform.system() == "Linux" else "DALI exists for Linux only (WSL counts).",
    )
    count, of = cores(), os.cpu_count() or 1
    few = "" if count >= _CORES_EACH else f"Decoding and fetching share {count} core(s): ask the scheduler for more."
    yield Check("cores", f"{count} of {of} granted to this process", few)


def _versions() -> Iterator[Check]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Check("versions", ", ".join(f"{name} {version}" for name, version in found.items()))
    dali = next((version for name, version in found.items() if name.startswith("nvidia-dali")), None)
    if dali is None:
        yield Check("DALI", "not installed", "pip install nvidia-dali-cuda120")
    elif not dali.startswith(TESTED_DALI):
        yield Check("DALI", dali, f"Arithmetic was measured with {TESTED_DALI}: run the parity tests with this one.")


def _device() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built without CUDA" if built is None else f"torch (CUDA {built}) finds none"
        yield Check("GPU", f"none: {why}", "Everything runs on the CPU: right for tests, slow for training.")
        return
    nvml = _Nvml()
    yield Check("driver", f"{nvml.driver()}, torch is built for CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Check(
            f"GPU {index}",
            f"{properties.name}, {total / 1e9:.0f} GB ({free / 1e9:.0f} free), compute {properties.major}.{properties.minor}",
            "" if free > total / 2 else "More than half of its memory is in use: by another process?",
        )
        jpeg = nvml.has_engine("nvmlDeviceGetJpgUtilization", index) and properties.major >= 8
        yield Check(
            f"GPU {index}: JPEG engines",
            "there" if jpeg else "none",
            "" if jpeg else "JPEGs are decoded by CUDA cores and CPU threads: hw_decoder_load has no effect.",
        )
        nvdec = nvml.has_engine("nvmlDeviceGetDecoderUtilization", index) and _loads("libnvcuvid.so.1")
        yield Check(
            f"GPU {index}: NVDEC",
            "there" if nvdec else "not usable",
            "" if nvdec else "In a container pass NVIDIA_DRIVER_CAPABILITIES=compute,utility,video.",
        )


def _video() -> Iterator[Check]:
    installed = importlib.util.find_spec("PyNvVideoCodec") is not None
    needed = torch.cuda.is_available() and not installed
    yield Check(
        "PyNvVideoCodec",
        "installed" if installed else "not installed",
        "pip install 'lightning-dali[video-gpu]': it decodes video faster than DALI's own decoder." if needed else "",
    )
    import av

    wanted = ("h264", "hevc", "av1", "vp9", "mpeg4", "mp3", "aac", "opus")
    missing = [name for name in wanted if name not in av.codecs_available]
    yield Check(
        "codecs on the CPU (PyAV)",
        ", ".join(name for name in wanted if name not in missing),
        f"Files of {', '.join(missing)} cannot be read: reinstall av from its wheel." if missing else "",
    )


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Check(
        "open files",
        f"{soft} (at most {hard})",
        "" if soft >= OPEN_FILES else f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}",
    )
    total, _, free = shutil.disk_usage("/dev/shm")
    small = total < SHM_BYTES
    yield Check(
        "/dev/shm",
        f"{total / 1e9:.1f} GB ({free / 1e9:.1f} free)",
        # our batches travel in memory files that do not count there; torch's DataLoader and NCCL do use it
        "Enough here, but torch's DataLoader and NCCL want more: docker run --shm-size=8g" if small else "",
    )
    if not hasattr(os, "memfd_create"):
        yield Check("memory files", "not there", "Workers need memfd_create: Linux 3.17 and glibc 2.27 or newer.")


def _start_method() -> Iterator[Check]:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    words = {
        "fork": "fork: datasets need not be picklable",
        "spawn": "spawn: datasets and transforms must be picklable, and each worker imports for seconds",
        "forkserver": "forkserver: datasets and transforms must be picklable",
    }
    yield Check("start method", words.get(method, method))


class _Nvml:
    """The driver's own library, asked directly: no package is needed for three questions."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.nvmlInit_v2()

    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        self._library.nvmlSystemGetDriverVersion(text, 96)
        return text.value.decode()

    def has_engine(self, question: str, index: int) -> bool:
        """Whether the driver can tell how busy an engine is, which it can if there is one."""
        handle, a, b = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"  # CUDA_VISIBLE_DEVICES renumbers
        if self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
            return False
        ask = getattr(self._library, question, None)
        return ask is not None and ask(handle, ctypes.byref(a), ctypes.byref(b)) == 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


_CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (_system, _versions, _device, _video, _limits, _start_method)
