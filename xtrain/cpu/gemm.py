"""The CPU's own matrix product: C = op(A) op(B), fp32, any sizes, either operand transposed.

DEPTH steps of k at a time, B is packed into panels of LANES columns, (panels, DEPTH, LANES) with
zeros beyond the last column, so a tile's loads are aligned and contiguous whichever way B lies.
Then each block of rows of C runs over the panels, tile by tile (`xtrain.cpu.tile`): all that it
reads stays in the caches. A is read in place, but a block whose k lie pages apart, or that is no
whole number of tiles, is copied first. Each element of C is a sum over k in order, in pieces of
DEPTH: the bits depend neither on the number of threads nor on the sizes around it.
"""

import numpy as np
from numba import get_num_threads, njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.cpu.tile import LANES, ROWS, add_multiply_tile, multiply_tile

BLOCK = 64  # rows of C that a thread takes at a time
DEPTH = 512  # steps of k at a time: 128 KB of a block of A, 64 KB of a panel at 32 lanes
FAR = 512  # floats between one k and the next from which copying pays: half a page
TASKS = 2  # for a thread, at least: the last to finish keeps the others waiting for half as long
SERIAL = 1 << 22  # multiply-adds up to which one core is as fast as waking the others


def multiply(a, b, *, transpose_a=False, transpose_b=False, into=None):
    """op(a) @ op(b), (M, N) fp32; a is (M, K) or stored (K, M), b is (K, N) or stored (N, K).

    into: (M, N) fp32, contiguous, to which the product is added and which is returned.
    """
    M, K = a.shape[::-1] if transpose_a else a.shape
    N = b.shape[0] if transpose_b else b.shape[1]
    if into is None:
        into, adds = np.empty((M, N), np.float32), False
    else:
        adds = True
        assert into.shape == (M, N) and into.flags.c_contiguous, (into.shape, into.strides)
    if K == 0 and not adds:
        into[...] = 0
    given = (np.ascontiguousarray(a), transpose_a, np.ascontiguousarray(b), transpose_b, K)
    if M * N * K <= SERIAL:
        _multiply(*given, into, adds)
    else:  # the number is an argument: asking for it would keep the kernel out of Numba's cache
        _multiply_parallel(*given, into, adds, get_num_threads())
    return into


@njit(cache=True)
def _multiply(a, transpose_a, b, transpose_b, K, c, adds):
    M, N = c.shape
    packed = np.empty(((N + LANES - 1) // LANES, min(K, DEPTH), LANES), np.float32)
    for k0 in range(0, K, DEPTH):
        count = min(DEPTH, K - k0)
        panels = packed.shape[0]
        for panel in range(panels):
            _pack(b, transpose_b, N, panel, k0, count, packed)
        for block in range((M + BLOCK - 1) // BLOCK):
            _block(a, transpose_a, packed, block, 0, panels, k0, count, K, c, adds or k0 > 0)


@njit(parallel=PRANGE_ONLY, cache=True)
def _multiply_parallel(a, transpose_a, b, transpose_b, K, c, adds, threads):
    M, N = c.shape
    packed = np.empty(((N + LANES - 1) // LANES, min(K, DEPTH), LANES), np.float32)
    panels, blocks = packed.shape[0], (M + BLOCK - 1) // BLOCK
    # Where blocks are fewer than threads, several threads share one: each takes some panels.
    shares = min(panels, (TASKS * threads + blocks - 1) // blocks)
    for k0 in range(0, K, DEPTH):
        count = min(DEPTH, K - k0)
        for panel in prange(panels):
            _pack(b, transpose_b, N, np.int64(panel), k0, count, packed)
        for task in prange(blocks * shares):
            block, share = np.int64(task) // shares, np.int64(task) % shares
            first, last = share * panels // shares, (share + 1) * panels // shares
            _block(a, transpose_a, packed, block, first, last, k0, count, K, c, adds or k0 > 0)


@njit(cache=True)
def _pack(b, transposed, N, panel, k0, count, packed):
    """Copy LANES columns of op(b), steps k0 .. k0 + count - 1, zeros beyond the last column."""
    first = panel * LANES
    width = min(LANES, N - first)
    if width < LANES:
        packed[panel].fill(0)
        for k in range(count):
            for j in range(width):
                packed[panel, k, j] = b[first + j, k0 + k] if transposed else b[k0 + k, first + j]
    elif transposed:
        for k in range(count):  # a gather of LANES rows; the other order is half as fast
            for j in range(LANES):
                packed[panel, k, j] = b[first + j, k0 + k]
    else:
        for k in range(count):
            for j in range(LANES):
                packed[panel, k, j] = b[k0 + k, first + j]


@njit(cache=True)
def _block(a, transposed, packed, block, first_panel, last_panel, k0, count, K, c, adds):
    """BLOCK rows of some panels of c, set to a sum over `count` steps of k, or that added."""
    N = c.shape[1]
    first = block * BLOCK
    stop = min(first + BLOCK, c.shape[0])
    start, row, step = first * K + k0, K, 1  # where A's part is, and its strides along i and k
    if transposed:
        start, row, step = k0 * c.shape[0] + first, 1, c.shape[0]
    if step >= FAR or (stop - first) % ROWS:
        a = _copy_block(a, transposed, first, stop, k0, count)
        start, row, step = 0, 1, BLOCK
    edge = np.empty((ROWS, LANES), np.float32)
    for panel in range(first_panel, last_panel):
        column, b = panel * LANES, panel * packed.shape[1] * LANES
        for i in range(0, stop - first, ROWS):
            at = start + i * row
            if first + i + ROWS <= stop and column + LANES <= N:
                at_c = (first + i) * N + column
                if adds:
                    add_multiply_tile(a, at, row, step, packed, b, LANES, count, c, at_c, N)
                else:
                    multiply_tile(a, at, row, step, packed, b, LANES, count, c, at_c, N)
            else:
                multiply_tile(a, at, row, step, packed, b, LANES, count, edge, 0, LANES)
                for r in range(min(ROWS, stop - first - i)):
                    for j in range(min(LANES, N - column)):
                        before = c[first + i + r, column + j] if adds else np.float32(0)
                        c[first + i + r, column + j] = before + edge[r, j]


@njit(cache=True)
def _copy_block(a, transposed, first, stop, k0, count):
    """Rows first .. stop - 1 of op(a), steps k0 .. k0 + count - 1, (count, BLOCK), zero beyond."""
    copied = np.zeros((count, BLOCK), np.float32)
    if transposed:
        for k in range(count):
            for i in range(stop - first):
                copied[k, i] = a[k0 + k, first + i]
    else:
        for i in range(stop - first):
            for k in range(count):
                copied[k, i] = a[first + i, k0 + k]
    return copied
