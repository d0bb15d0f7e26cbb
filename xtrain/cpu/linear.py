"""Matrix products on the CPU. See `xtrain.engine.ops.linear`.

By default small products use the engine's own GEMM: BLAS would wake a second pool of threads, which
then competes with Numba's for the cores (16 backward products of a 512-token step: 12.8 ms against
0.6 on two cores). Large ones use BLAS. The variant `tiled` uses the own GEMM for all.
"""

import numpy as np

from xtrain.cpu import gemm
from xtrain.engine.ops.linear import linear, matmul

LARGE = 1 << 27  # multiply-adds


def blas(a, b, *, transpose_a=False, transpose_b=False):
    """op(a) @ op(b) by NumPy's BLAS."""
    return np.matmul(a.T if transpose_a else a, b.T if transpose_b else b)


def by_size(a, b, **transposes):
    """op(a) @ op(b) by whichever is faster."""
    product = gemm.multiply if a.size * b.size // b.shape... 
