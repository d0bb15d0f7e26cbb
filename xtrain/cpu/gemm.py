"""The CPU's own matrix product: C = op(A) op(B), fp32, any sizes, either operand transposed.

B is packed once into panels of LANES columns, (panels, K, LANES) with zeros beyond the last column,
so a tile's loads are aligned and contiguous whichever way B lies. Then each block of rows of C runs
over the panels, tile by tile (`xtrain.cpu.tile`). A is read in place, but a block whose k lie pages
apart, or that is no whole number of tiles, is copied first. Each element of C is one sum over k in
order: the bits depend neither on the number of threads nor on the sizes around it.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.cpu.tile import LANES, ROWS, multiply_tile

BLOCK = 64  # rows of C that a thread takes at a time
FAR = 512  # floats between one k and the next from which copying pays: half a page
SERIAL = 1 << 22  # multiply-adds up to which one core is as fast as waking the others


def multiply(a, b, *, transpose_a=False, transpose_b=False):
    """op(a) @ op(b), (M, N) fp32; a is (M, K) or stored (K, M), b is (K, N) or stored (N, K)."""
    M, K = a.shape[::-1] if transpose_a else a.shape
    N = b.shape[0] if transpose_b else b.shape[1]
    c = np.empty((M, N), np.float32)
    run = _multiply if M * N * K <= SERIAL else _multiply_parallel
    run(np.ascontiguousarray(a), transpose_a, np.ascontiguousarray(b), transpose_b, K, c)
    return c


@njit(cache=True)
def _multiply(a, transpose_a, b, transpose_b, K, c):
    M, N = c.shape
    packed = np.empty(((N + LANES - 1) // LANES, K, LANES), np.float32)
    for panel in range(packed.shape[0]):
        _pack(b, transpose_b, N, panel, packed)
    for block in range((M + BLOCK - 1) // BLOCK):
        _block(a, transpose_a, packed, block, c)


@njit(parallel=PRANGE_ONLY, cache=True)
def _multiply_parallel(a, transpose_a, b, transpose_b, K, c):
    M, N = c.shape
    packed = np.empty(((N + LANES - 1) // LANES, K, LANES), np.float32)
    for panel in prange(packed.shape[0]):
        _pack(b, transpose_b, N, np.int64(panel), packed)
    for block in prange((M + BLOCK - 1) // BLOCK):
        _block(a, transpose_a, packed, np.int64(block), c)


@njit(cache=True)
def _pack(b, transposed, N, panel, packed):
    """Copy LANES columns of op(b), zeros beyond the last."""
    K, first = packed.shape[1], panel * LANES
    width = min(LANES, N - first)
    if width < LANES:
        packed[panel].fill(0)
    if transposed:
        for j in range(width):
            for k in range(K):
                packed[panel, k, j] = b[first + j, k]
    else:
        for k in range(K):
            for j in range(width):
                packed[panel, k, j] = b[k, first + j]


@njit(cache=True)
def _block(a, transposed, packed, block, c):
    """BLOCK rows of c."""
    N, K = c.shape[1], packed.shape[1]
    first = block * BLOCK
    stop = min(first + BLOCK, c.shape[0])
    start, row, step = first * K, K, 1  # where A's block is, and its strides along i and k
    if transposed:
        start, row, step = first, 1, c.shape[0]
    if step >= FAR or (stop - first) % ROWS:
        a = _copy_block(a, transposed, first, stop, K)
        start, row, step = 0, 1, BLOCK
    edge = np.empty((ROWS, LANES), np.float32)
    for panel in range(packed.shape[0]):
        column, b = panel * LANES, panel * K * LANES
        for i in range(0, stop - first, ROWS):
            at = start + i * row
            if first + i + ROWS <= stop and column + LANES <= N:
                at_c = (first + i) * N + column
                multiply_tile(a, at, row, step, packed, b, LANES, K, c, at_c, N)
            else:
                multiply_tile(a, at, row, step, packed, b, LANES, K, edge, 0, LANES)
                for r in range(min(ROWS, stop - first - i)):
                    for j in range(min(LANES, N - column)):
                        c[first + i + r, column + j] = edge[r, j]


@njit(cache=True)
def _copy_block(a, transposed, first, stop, K):
    """Rows first .. stop of op(a) as (K, BLOCK), zero beyond."""
    copied = np.zeros((K, BLOCK), np.float32)
    if transposed:
        for k in range(K):
            for i in range(stop - first):
                copied[k, i] = a[k, first + i]
    else:
        for i in range(stop - first):
            for k in range(K):
                copied[k, i] = a[first + i, k]
    return copied
