"""`linear` and `matmul` by cuBLAS; the product itself adds a weight's gradient to its buffer.

Operands are fp32 or bf16, alike; sums run in fp32. No copy of a weight or of its gradient is made.
"""

from xtrain.cuda.gemm import as_operand, gemm
from xtrain.engine.ops.linear import linear, matmul


def linear_forward(xp, x, weight):
    """See `xtrain.engine.ops.linear`."""
    weight = as_operand(xp, weight)
    x = xp.ascontiguousarray(x)
    y = xp.empty((*x.shape[:-1], weight.shape[0]), x.dtype)
    gemm(x, weight, y, transpose_b=True)
    return y, (x, weight)


def linear_backward(xp, dy, saved, *, into):
    """See `xtrain.engine.ops.linear`; into[0] is fp32 whatever the operands are."""
    x, weight = saved
    dy = xp.ascontiguousarray(dy)
    dx = xp.empty(x.shape, x.dtype)
    gemm(dy, weight, dx)
    if into[0] is not None:
        gemm(dy, x, into[0], transpose_a=True, beta=1.0)
        return dx, None
    dweight = xp.empty(weight.shape, weight.dtype)
    gemm(dy, x, dweight, transpose_a=True)
    return dx, dweight


def matmul_forward(xp, a, b, *, transpose_a=False, transpose_b=False):
    """See `xtrain.engine.ops.linear`."""
    a, b = as_operand(xp, a), as_operand(xp, b)
    rows = a.shape[1] if transpose_a else a.shape[0]
    columns = b.shape[0] if transpose_b else b.shape[1]
    y = xp.empty((rows, columns), a.dtype)
    gemm(a, b, y, transpose_a=transpose_a, transpose_b=transpose_b)
    return y, (a, b)


def matmul_backward(xp, dy, saved, *, transpose_a=False, transpose_b=False):
    """See `xtrain.engine.ops.linear`."""
    (a, b), dy = saved, as_operand(xp, dy)
    da, db = xp.empty(a.shape, a.dtype), xp.empty(b.shape, b.dtype)
    if transpose_a:
        gemm(b, dy, da, transpose_a=transpose_b, transpose_b=True)
    else:
        gemm(dy, b, da, transpose_b=not transpose_b)
    if transpose_b:
        gemm(dy, a, db, transpose_a=True, transpose_b=transpose_a)
    else:
        gemm(a, dy, db, transpose_a=not transpose_a)
    return da, db


def as_rows(xp, x):
    """x (..., K) as (N, K); a copy only where the leading axes cannot be merged."""
    return xp.ascontiguousarray(x).reshape(-1, x.shape[-1])


linear.fuse("cuda", linear_forward, linear_backward, accumulates=(1,))
matmul.fuse("cuda", matmul_forward, matmul_backward)
