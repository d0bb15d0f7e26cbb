"""The engine's own tiled GEMM, fp32, and the `tiled` variants of `matmul` and `linear` on it.

    c = op(a) @ op(b),  or  c += op(a) @ op(b)      a: (M, K) or stored (K, M);  b likewise

A block computes TILE x TILE elements of c from slabs of SLAB columns of a and rows of b in shared
memory; each of its 16 x 16 threads keeps CELLS x CELLS sums in registers. Edges are ragged: what
lies outside counts as zero. Products of a slab are summed by themselves before they join the total,
so that the rounding error grows with sqrt(SLAB) + sqrt(K / SLAB) instead of sqrt(K).

Arithmetic is fp32 (fused multiply-add); bf16 operands are converted first. FLOPs: 2 M N K.
The library's GEMM is several times faster: this one is for phases that use it, and to check it.
"""

from numba import cuda
from numba.types import float32

from xtrain.cuda.compile.launch import Kernel, i64, pointer
from xtrain.engine.dtype import upcast
from xtrain.engine.ops.linear import linear, matmul

SIDE = 16  # threads along each side of a tile
CELLS = 4  # elements of c along each side, of one thread
TILE = SIDE * CELLS
SLAB = 16
PITCH = TILE + 1  # one column of padding, so that a transposing store does not hit one bank
THREADS = SIDE * SIDE
LOADS = TILE * SLAB // THREADS  # elements of each operand that a thread brings in
CELL_COUNT = CELLS * CELLS


def make_kernel(transpose_a: bool, transpose_b: bool) -> Kernel:
    def tiled_matmul(a, b, c, M, N, K, tiles_across, accumulate):
        a_slab = cuda.shared.array((SLAB, PITCH), float32)
        b_slab = cuda.shared.array((SLAB, PITCH), float32)
        total = cuda.local.array(CELL_COUNT, float32)
        part = cuda.local.array(CELL_COUNT, float32)
        thread = cuda.threadIdx.x
        across, down = thread % SIDE, thread // SIDE
        first_row = cuda.blockIdx.x // tiles_across * TILE
        first_column = cuda.blockIdx.x % tiles_across * TILE
        for i in range(CELL_COUNT):
            total[i] = float32(0)
        for start in range(0, K, SLAB):
            for load in range(LOADS):
                at = load * THREADS + thread
                # Neighbouring threads read neighbouring addresses, however the operand is stored.
                if transpose_a:
                    i, k = at % TILE, at // TILE
                    inside = first_row + i < M and start + k < K
                    a_slab[k, i] = a[(start + k) * M + first_row + i] if inside else float32(0)
                else:
                    k, i = at % SLAB, at // SLAB
                    inside = first_row + i < M and start + k < K
                    a_slab[k, i] = a[(first_row + i) * K + start + k] if inside else float32(0)
                if transpose_b:
                    k, j = at % SLAB, at // SLAB
                    inside = first_column + j < N and start + k < K
                    b_slab[k, j] = b[(first_column + j) * K + start + k] if inside else float32(0)
                else:
                    j, k = at % TILE, at // TILE
                    inside = first_column + j < N and start + k < K
                    b_slab[k, j] = b[(start + k) * N + first_column + j] if inside else float32(0)
            cuda.syncthreads()
            for i in range(CELL_COUNT):
                part[i] = float32(0)
            for k in range(SLAB):
                for i in range(CELLS):
                    left = a_slab[k, down + i * SIDE]
                    for j in range(CELLS):
                        part[i * CELLS + j] += left * b_slab[k, across + j * SIDE]
            for i in range(CELL_COUNT):
                total[i] += part[i]
            cuda.syncthreads()
        for i in range(CELLS):
            row = first_row + down + i * SIDE
            for j in range(CELLS):
                column = first_column + across + j * SIDE
                if row < M and column < N:
                    value = total[i * CELLS + j]
                    if accumulate != 0:
                        value += c[row * N + column]
                    c[row * N + column] = value

    matrix = pointer("float32")
    return Kernel(tiled_matmul, THREADS, matrix, matrix, matrix, i64, i64, i64, i64, i64)


KERNELS = {(ta, tb): make_kernel(ta, tb) for ta in (False, True) for tb in (False, True)}


def multiply(xp, a, b, *, transpose_a=False, transpose_b=False, into=None):
    """op(a) @ op(b) in fp32 as a fresh array, or added to `into` (M, N) fp32, contiguous."""
    a, b = (xp.ascontiguousarray(upcast(matrix)) for matrix in (a, b))
    M, K = a.shape[::-1] if transpose_a else a.shape
    N = b.shape[0] if transpose_b else b.shape[1]
    c = xp.empty((M, N), "float32") if into is None else into
    down, across = -(-M // TILE), -(-N // TILE)
    kernel = KERNELS[transpose_a, transpose_b]
    kernel(down * across, a, b, c, M, N, K, across, 0 if into is None else 1)
    return c


def matmul_forward(xp, a, b, *, transpose_a=False, transpose_b=False):
    y = multiply(xp, a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return y.astype(a.dtype, copy=False), (a, b)


def matmul_backward(xp, dy, saved, *, transpose_a=False, transpose_b=False):
    a, b = saved
    if transpose_a:
        da = multiply(xp, b, dy, transpose_a=transpose_b, transpose_b=True)
    else:
        da = multiply(xp, dy, b, transpose_b=not transpose_b)
    if transpose_b:
        db = multiply(xp, dy, a, transpose_a=True, transpose_b=transpose_a)
    else:
        db = multiply(xp, a, dy, transpose_a=not transpose_a)
    return da.astype(a.dtype, copy=False), db.astype(b.dtype, copy=False)


def linear_forward(xp, x, weight):
    rows = x.reshape(-1, x.shape[-1])
    y = multiply(xp, rows, weight, transpose_b=True)
    return y.astype(x.dtype, copy=False).reshape(*x.shape[:-1], weight.shape[0]), (x, weight)


def linear_backward(xp, dy, saved, *, into):
    x, weight = saved
    rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, weight.shape[0])
    dx = multiply(xp, dy, weight).astype(x.dtype, copy=False).reshape(x.shape)
    if into[0] is not None and into[0].flags.c_contiguous:
        multiply(xp, dy, rows, transpose_a=True, into=into[0])
        return dx, None
    dweight = multiply(xp, dy, rows, transpose_a=True)
    return dx, dweight.astype(weight.dtype, copy=False)


matmul.fuse("cuda", matmul_forward, matmul_backward, variant="tiled")
linear.fuse("cuda", linear_forward, linear_backward, accumulates=(1,), variant="tiled")
