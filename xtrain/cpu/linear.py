"""Matrix products on the CPU. See `xtrain.engine.ops.linear`.

The engine's own GEMM, but for few rows (decoding), where packing B does not pay: those go to BLAS.
BLAS wakes a pool of threads of its own, which goes on spinning and takes the cores from Numba's: a
step of v1 (512 tokens, two cores) took 918 ms with BLAS and 292 without. The variant `tiled` uses
the own GEMM for all.
"""

import numpy as np

from xtrain.cpu import gemm
from xtrain.engine.ops.linear import linear, matmul

FEW_ROWS = 32  # tokens, below which BLAS pays
SMALL_B = 1 << 14  # elements of b up to which packing costs next to nothing


def by_size(a, b, *, transpose_a=False, transpose_b=False, into=None):
    """op(a) @ op(b), or into plus that, by the own GEMM, or by BLAS where that pays."""
    # A transposed a is the gradient of a weight: its rows are features, however many the tokens.
    if transpose_a or a.shape[0] >= FEW_ROWS or b.size <= SMALL_B:
        return gemm.multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b, into=into)
    product = np.matmul(a, b.T if transpose_b else b)
    return product if into is None else np.add(into, product, out=into)


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
        dweight = multiply(dy_rows, rows, transpose_a=True, into=into[0])
        return dx, dweight if into[0] is None else None

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
