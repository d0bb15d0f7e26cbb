"""Numba's CUDA simulator, with its allocation of shared memory made safe.

The simulator lets each thread of a block look whether a shared array exists and then make it: two
threads may both find none and get different arrays. Here one lock covers both. Fresh shared memory
holds NaN, so that a value read before it is written shows.
"""

import sys
import threading

import numpy as np
from numba import cuda
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np import numpy_support

_allocating = threading.Lock()


def run(fn, grid: int, block: int, args: list) -> None:
    """Run a kernel function on NumPy arrays, one block after the other."""
    FakeCUDAShared.array = _shared_array
    cuda.jit(fn)[grid, block](*args)


def _shared_array(self, shape, dtype):
    """The array of the source line that asks; one line, one array."""
    caller = sys._getframe(1)
    line = caller.f_code.co_filename, caller.f_lineno
    with _allocating:
        if line not in self._allocations:
            dtype = numpy_support.as_dtype(dtype)
            fresh = np.zeros(shape, dtype)
            self._allocations[line] = fresh + np.nan if dtype.kind == "f" else fresh
        return self._allocations[line]
