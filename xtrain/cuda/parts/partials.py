"""Second stage of a reduction: the column sums of rows that blocks left, in a fixed order.

    out[c] = sum over r of partial[r, c],  or  out[c] += that

partial: (R, C) fp32.  out: (C,) fp32 or bf16.  Sums in fp32: a thread takes every 16th row, and the
16 sums of a column are added in the order of the rows they start from. 4 bytes read an element.
"""

import functools

from numba import cuda
from numba.types import float32

from xtrain.cuda.compile.launch import Kernel, i64, pointer
from xtrain.cuda.parts.vectors import scalar_access

COLUMNS = 32  # of a block; neighbouring threads read neighbouring columns
LANES = 16  # threads that share a column
BLOCK = COLUMNS * LANES
# Rows that first stages leave at most: three blocks a multiprocessor of an H200 run at once. Fixed,
# so that bits do not depend on the GPU.
PARTS = 384


@functools.cache
def sum_kernel(dtype, accumulate: bool) -> Kernel:
    load, store = scalar_access(dtype)

    def column_sum(partial, out, rows, first, pitch, columns):
        scratch = cuda.shared.array(BLOCK, float32)
        thread = cuda.threadIdx.x
        column = cuda.blockIdx.x * COLUMNS + thread % COLUMNS
        total = float32(0)
        if column < columns:
            for row in range(thread // COLUMNS, rows, LANES):
                total += partial[row * pitch + first + column]
        scratch[thread] = total
        cuda.syncthreads()
        if thread < COLUMNS and column < columns:
            for lane in range(1, LANES):
                total += scratch[lane * COLUMNS + thread]
            if accumulate:
                total += load(out, column)
            store(out, column, total)

    return Kernel(column_sum, BLOCK, pointer("float32"), pointer(dtype), i64, i64, i64, i64)


def sum_rows(partial, out, *, accumulate: bool, first: int = 0) -> None:
    """Write (or add) the sums of out.size columns of partial (R, C), from `first` on, to out."""
    rows, pitch = partial.shape
    kernel = sum_kernel(out.dtype, accumulate)
    kernel(-(-out.size // COLUMNS), partial, out, rows, first, pitch, out.size)


def weight_gradient(xp, partial, like, into, first: int = 0):
    """The gradient of a small weight from its partial sums: added to `into`, or returned."""
    if into is not None:
        sum_rows(partial, into, accumulate=True, first=first)
        return None
    gradient = xp.empty(like.shape, like.dtype)
    sum_rows(partial, gradient, accumulate=False, first=first)
    return gradient
