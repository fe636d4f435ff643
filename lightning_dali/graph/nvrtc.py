"""Kernels in CUDA C, compiled when they are first needed, by the NVRTC that torch brings.

Runs in the rank. `torch.cuda._compile_kernel` does the same for one kernel, but asks for an installed CUDA toolkit and for setuptools,
which a machine that only runs training need not have.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class Launch(Protocol):
    """A kernel."""

    def __call__(self, grid: tuple[int, int], block: tuple[int, int], args: Sequence[torch.Tensor | int]) -> None:
        """Starts it on torch's current stream; tensors are handed over as addresses, integers as `int`."""


class Kernel:
    """A compiled kernel.

    Args:
        driver: CUDA's driver library.
        function: The driver's handle.
    """

    def __init__(self, driver: ctypes.CDLL, function: ctypes.c_void_p) -> None:
        self._driver, self._function = driver, function

    def __call__(self, grid: tuple[int, int], block: tuple[int, int], args: Sequence[torch.Tensor | int]) -> None:
        """Starts the kernel; see `Launch`. torch must have done something on the device in this thread before.

        Raises:
            RuntimeError: The driver refuses.
        """
        values: list[Any] = [ctypes.c_int(a) if isinstance(a, int) else ctypes.c_void_p(a.data_ptr()) for a in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            self._driver, self._driver.cuLaunchKernel(self._function, *grid, 1, *block, 1, 0, stream, addresses, None)
        )


def compile_kernels(source: str, names: Sequence[str], *, device: int) -> Mapping[str, Kernel]:
    """Compiles the `extern "C"` kernels of a source for a device, in less than a second.

    Args:
        source: CUDA C++ without includes.
        names: The kernels.
        device: CUDA device number.

    Raises:
        OSError: There is no NVRTC, or no driver.
        RuntimeError: It does not compile, or the driver does not take it; with the compiler's words.
    """
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        binary = compile_binary(source, architecture=f"sm_{major}{minor}")
        torch.zeros(1, device=device)  # the device's context becomes this thread's
        driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()  # for good: there is one a process and device
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), binary))
        kernels = {}
        for name in names:
            function = ctypes.c_void_p()
            _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            kernels[name] = Kernel(driver, function)
        return kernels


def compile_binary(source: str, *, architecture: str) -> bytes:
    """Machine code for an architecture such as "sm_90"; needs no device.

    Raises:
        OSError: There is no NVRTC.
        RuntimeError: It does not compile.
    """
    library = ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}")  # found, as torch has it loaded
    program = ctypes.c_void_p()
    result = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    if result:
        raise RuntimeError(f"NVRTC error {result}")
    try:
        # products and sums round one by one unless the source says `fma`, as in the library's other arithmetic
        words = [f"--gpu-architecture={architecture}".encode(), b"--fmad=false"]
        result = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        if result:
            log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise RuntimeError(f"NVRTC error {result}: {log.rstrip(bytes(1)).decode(errors='replace').strip()}")
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(get_size: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def _check(driver: ctypes.CDLL, result: int) -> None:
    if result:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"CUDA driver: {(words.value or b'unknown error').decode()}")
