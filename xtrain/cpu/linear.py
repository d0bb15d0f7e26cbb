"""Matrix products on the CPU. See `xtrain.engine.ops.linear`.

Small products use the engine's own GEMM, the others BLAS. BLAS wakes a pool of threads of its own,
which then competes with Numba's for the cores: the 16 backward products of a 512-token step took
12.8 ms beside Numba's kernels on two busy cores, and 1.6 with the own GEMM. The variant `tiled`
uses the own GEMM for all.
"""

import numpy as np

from xtrain.cpu import gemm
from xtrain.engine.ops.linear import linear, matmul

LARGE = 1 << 25  # multiply-adds from which BLAS pays
LARGE_B = 1 << 16  # elements of b from which packing it costs more than it saves


def by_size(a, b, *, transpose_a=False, transpose_b=False):
    """op(a) @ op(b) by the own GEMM, or by BLAS where that pays."""
    columns = b.shape[0] if transpose_b else b.shape[1]
    if b.size <= LARGE_B and a.size * columns < LARGE:
        return gemm.multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return np.matmul(a.T if transpose_a else a, b.T if transpose_b else b)


def linear_functions(multiply):
    """Forward and backward of `linear` on a product of two matrices."""

    def forward(xp, x, weight):
        rows = x.reshape(-1, x.shape[-1])
        y = multiply(rows, weight, transpose_b=True)
        return y.reshape(*x.shape[:-1], weight.shape[0]), (x, weight)

    def backward(xp, dy, saved, *, into):
        x, weight = saved
        dy_rows, rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = multiply(dy_rows, weight).reshape(x.shape)
        dweight = multiply(dy_rows, rows, transpose_a=True)
        if into[0] is None:
            return dx, dweight
        into[0][...] += dweight
        return dx, None

    return forward, backward


def matmul_functions(multiply):
    """Forward and backward of `matmul` on a product of two matrices."""

    def forward(xp, a, b, *, transpose_a=False, transpose_b=False):
        return multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b), (a, b)

    def backward(xp, dy, saved, *, transpose_a=False, transpose_b=False):
        a, b = saved
        # Of y = op(a) op(b): d op(a) = dy op(b).T, stored transposed where a is.
        if transpose_a:
            da = multiply(b, dy, transpose_a=transpose_b, transpose_b=True)
        else:
            da = multiply(dy, b, transpose_b=not transpose_b)
        if transpose_b:
            db = multiply(dy, a, transpose_a=True, transpose_b=transpose_a)
        else:
            db = multiply(a, dy, transpose_a=not transpose_a)
        return da, db

    return forward, backward


linear.fuse("cpu", *linear_functions(by_size), accumulates=(1,))
linear.fuse("cpu", *linear_functions(gemm.multiply), accumulates=(1,), variant="tiled")
matmul.fuse("cpu", *matmul_functions(by_size))
matmul.fuse("cpu", *matmul_functions(gemm.multiply), variant="tiled")
