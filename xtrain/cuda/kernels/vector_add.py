"""c = a + b for fp32 vectors as a Numba kernel and as CUDA C++: proof that both toolchains work.

a, b, c: (n,) fp32. One addition an element, so every backend gives the same bits. 12 bytes an
element. Not an op: the engine adds arrays with CuPy.
"""

from numba import cuda

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.compile.launch import Kernel, i64, pointer

THREADS = 256


def vector_add(a, b, c, n):
    i = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    if i < n:
        c[i] = a[i] + b[i]


KERNEL = Kernel(vector_add, THREADS, *[pointer("float32")] * 3, i64)


def add(xp, a, b):
    """a + b with the Numba kernel; xp is CuPy, or NumPy in the simulator."""
    c = xp.empty(a.shape, a.dtype)
    KERNEL(-(-a.size // THREADS), a, b, c, a.size)
    return c


def add_nvrtc(cupy, a, b):
    """a + b with the CUDA C++ kernel, compiled by NVRTC; needs a GPU."""
    c = cupy.empty_like(a)
    function = nvrtc.function("vector_add.cu", "vector_add")
    function((-(-a.size // THREADS),), (THREADS,), (a, b, c, cupy.int64(a.size)))
    return c
