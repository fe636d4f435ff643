"""CUDA kernels as a library for the CPU, their threads one after the other."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

SHIM = """
#include <cmath>
#include <utility>
using std::size_t;
using namespace std;
#define __global__
#define __device__
#define __forceinline__ inline
struct Index { unsigned x, y; };
static Index gridDim, blockDim, blockIdx, threadIdx;
static unsigned __byte_perm(unsigned value, unsigned, unsigned) { return __builtin_bswap32(value); }
static int __clzll(unsigned long long value) { return value ? __builtin_clzll(value) : 64; }
static int __popc(unsigned value) { return __builtin_popcount(value); }
#define __shared__ static
#define __launch_bounds__(threads)
static void __syncthreads() {}
template <class T> void atomicAdd(T* place, T value) { *place += value; }
static void atomicMin(int* place, int value) { if (value < *place) *place = value; }
static void atomicXor(unsigned* place, unsigned value) { *place ^= value; }
"""
RUN = """
template <class... T, size_t... N>
void run(void (*kernel)(T...), std::index_sequence<N...>, const int* size, const long long* given) {
    gridDim = {(unsigned)size[0], (unsigned)size[1]};
    blockDim = {(unsigned)size[2], (unsigned)size[3]};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
            for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)
                for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) kernel((T)given[N]...);
}
template <class... T> void run(void (*kernel)(T...), const int* size, const long long* given) {
    run(kernel, std::index_sequence_for<T...>(), size, given);
}
"""


class Kernel:
    """A kernel on the CPU; `alone`: with one thread a block, as those need whose threads wait for each other."""

    def __init__(self, function: Any, *, alone: bool) -> None:
        self._function, self._alone = function, alone

    def __call__(self, grid: tuple[int, int], block: tuple[int, int], args: Sequence[torch.Tensor | int]) -> None:
        """As `nvrtc.Launch`."""
        assert max(*block, block[0] * block[1]) <= 1024 and grid[1] <= 65_535
        assert min(*grid, *block) > 0, "CUDA refuses a launch of nothing"
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
        block = (1, 1) if self._alone else block
        self._function((ctypes.c_int * 4)(*grid, *block), (ctypes.c_longlong * len(values))(*values))


def build(folder: Path, source: str, names: Sequence[str], *options: str, alone: bool = False) -> dict[str, Kernel]:
    """Compiles kernels; skips the test without a compiler.

    Args:
        folder: Where to.
        source: Of the kernels, CUDA C++.
        names: Theirs.
        options: Of the compiler.
        alone: See `Kernel`.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile kernels for the CPU")
    text = SHIM + source + RUN
    for name in names:
        text += f'extern "C" void run_{name}(const int* size, const long long* given) {{ run({name}, size, given); }}\n'
    file, library = folder / "kernels.cpp", folder / "kernels.so"
    file.write_text(text)
    words = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    unused = ["-Wno-unused-function", "-ffp-contract=off"]
    subprocess.run([*words, *unused, *options, "-o", library, file], check=True)
    loaded = ctypes.CDLL(str(library))
    return {name: Kernel(getattr(loaded, f"run_{name}"), alone=alone) for name in names}
