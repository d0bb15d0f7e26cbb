"""`global_norm`: squares summed in float64, by up to 1024 blocks and then by one.

4 bytes read an element, 4 loads of 16 bytes in flight a thread. The order of the sum depends on the
length only.
"""

import functools

from numba import cuda
from numba.types import float32, float64

from xtrain.cuda.compile.launch import Kernel, i64, pointer
from xtrain.cuda.parts.block import row_sum
from xtrain.cuda.parts.formula import sqrt
from xtrain.cuda.parts.vectors import are_aligned, vector_access
from xtrain.engine.ops.global_norm import global_norm

THREADS = 256
VECTORS = 4
MOST_BLOCKS = 1024
total_of_block = row_sum(THREADS)


@functools.cache
def squares_kernel(dtype, aligned: bool) -> Kernel:
    width, load, _ = vector_access(dtype, aligned)
    values = VECTORS * width
    piece = THREADS * VECTORS * width

    def sum_of_squares(x, partial, size, blocks):
        scratch = cuda.shared.array(THREADS, float64)
        v = cuda.local.array(values, float32)
        total = float64(0)
        for start in range(cuda.blockIdx.x * piece, size, blocks * piece):
            for w in range(VECTORS):
                at = start + (w * THREADS + cuda.threadIdx.x) * width
                load(x, at, size - at, v, w * width)
            for i in range(values):
                total += float64(v[i]) * float64(v[i])
        total = total_of_block(total, scratch)
        if cuda.threadIdx.x == 0:
            partial[cuda.blockIdx.x] = total

    return Kernel(sum_of_squares, THREADS, pointer(dtype), pointer("float64"), i64, i64)


def norm_of_partial_sums(partial, norm, blocks):
    scratch = cuda.shared.array(THREADS, float64)
    total = float64(0)
    for i in range(cuda.threadIdx.x, blocks, THREADS):
        total += partial[i]
    total = total_of_block(total, scratch)
    if cuda.threadIdx.x == 0:
        norm[0] = sqrt(total)


NORM = Kernel(norm_of_partial_sums, THREADS, pointer("float64"), pointer("float64"), i64)


def forward(xp, gradient):
    gradient = xp.ascontiguousarray(gradient)
    aligned = are_aligned(gradient.size, gradient)
    piece = THREADS * VECTORS * vector_access(gradient.dtype, aligned).width
    blocks = min(-(-gradient.size // piece), MOST_BLOCKS)
    partial, norm = xp.empty(max(blocks, 1), "float64"), xp.empty((), "float64")
    kernel = squares_kernel(gradient.dtype, aligned)
    kernel(blocks, gradient, partial, gradient.size, blocks)
    NORM(1, partial, norm, blocks)
    return norm, None


global_norm.fuse("cuda", forward)
