"""RMSNorm on the CPU, alone and fused with the residual sum. See `xtrain.engine.ops.rms_norm`.

fp32. Rows are taken in blocks of fixed size and the blocks' parts of dweight are summed in order,
so the bits do not depend on the number of threads.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY, SERIAL
from xtrain.engine.ops.rms_norm import add_rms_norm, rms_norm

BLOCK = 64  # rows a thread takes at a time
_ROW_SUMS = {"reassoc", "contract"}  # sums along a row may use vector lanes; NaN is kept


def forward(xp, x, weight, *, eps):
    """y, and what backward needs."""
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    y, rstd = np.empty_like(rows), np.empty(rows.shape[0], np.float32)
    run = _forward if rows.size <= SERIAL else _forward_parallel
    run(rows, rows, weight, np.float32(eps), False, rows, y, rstd)
    return y.reshape(x.shape), (rows, weight, rstd)


def backward(xp, dy, saved, *, eps):
    """dx and dweight."""
    rows, weight, rstd = saved
    dy_rows = np.ascontiguousarray(dy).reshape(rows.shape)
    dx, dweight = _gradients(dy_rows, dy_rows, rows, weight, rstd, False)
    return dx.reshape(dy.shape), dweight


def add_forward(xp, x, residual, weight, *, eps):
    """(y, x + residual), and what backward needs."""
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    others = np.ascontiguousarray(residual).reshape(rows.shape)
    s, y, rstd = np.empty_like(rows), np.empty_like(rows), np.empty(rows.shape[0], np.float32)
    run = _forward if rows.size <= SERIAL else _forward_parallel
    run(rows, others, weight, np.float32(eps), True, s, y, rstd)
    return (y.reshape(x.shape), s.reshape(x.shape)), (s, weight, rstd)


def add_backward(xp, dys, saved, *, eps):
    """The gradient of x, which is that of residual too, and dweight."""
    rows, weight, rstd = saved
    dy, ds = (np.ascontiguousarray(d).reshape(rows.shape) for d in dys)
    dx, dweight = _gradients(dy, ds, rows, weight, rstd, True)
    dx = dx.reshape(dys[0].shape)
    return dx, dx, dweight


def _gradients(dy, ds, x, weight, rstd, add):
    """dx, plus ds where `add`, and dweight as the sum over blocks in order."""
    dx = np.empty_like(x)
    partial = np.zeros((-(-x.shape[0] // BLOCK), x.shape[1]), np.float32)
    run = _backward if x.size <= SERIAL else _backward_parallel
    run(dy, ds, x, weight, rstd, add, dx, partial)
    return dx, partial.sum(0)


@njit(error_model="numpy", cache=True)
def _forward(x, residual, weight, eps, add, s, y, rstd):
    for block in range((x.shape[0] + BLOCK - 1) // BLOCK):
        _forward_block(block, x, residual, weight, eps, add, s, y, rstd)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _forward_parallel(x, residual, weight, eps, add, s, y, rstd):
    for block in prange((x.shape[0] + BLOCK - 1) // BLOCK):
        _forward_block(np.int64(block), x, residual, weight, eps, add, s, y, rstd)


@njit(error_model="numpy", fastmath=_ROW_SUMS, cache=True)
def _forward_block(block, x, residual, weight, eps, add, s, y, rstd):
    D = x.shape[1]
    for n in range(block * BLOCK, min((block + 1) * BLOCK, x.shape[0])):
        if add:
            for d in range(D):
                s[n, d] = x[n, d] + residual[n, d]
        squares = np.float32(0)
        for d in range(D):
            squares += s[n, d] * s[n, d]
        rstd[n] = np.float32(1) / np.sqrt(squares / np.float32(D) + eps)
        for d in range(D):
            y[n, d] = s[n, d] * rstd[n] * weight[d]


@njit(error_model="numpy", cache=True)
def _backward(dy, ds, x, weight, rstd, add, dx, partial):
    for block in range(partial.shape[0]):
        _backward_block(block, dy, ds, x, weight, rstd, add, dx, partial)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _backward_parallel(dy, ds, x, weight, rstd, add, dx, partial):
    for block in prange(partial.shape[0]):
        _backward_block(np.int64(block), dy, ds, x, weight, rstd, add, dx, partial)


@njit(error_model="numpy", fastmath=_ROW_SUMS, cache=True)
def _backward_block(block, dy, ds, x, weight, rstd, add, dx, partial):
    D = x.shape[1]
    for n in range(block * BLOCK, min((block + 1) * BLOCK, x.shape[0])):
        dot = np.float32(0)
        for d in range(D):
            dot += dy[n, d] * weight[d] * x[n, d]
        mean = dot * rstd[n] / np.float32(D)  # of dx_hat * x_hat
        for d in range(D):
            x_hat = x[n, d] * rstd[n]
            partial[block, d] += dy[n, d] * x_hat
            dx[n, d] = rstd[n] * (dy[n, d] * weight[d] - x_hat * mean)
        if add:
            for d in range(D):
                dx[n, d] += ds[n, d]


rms_norm.fuse("cpu", forward, backward)
add_rms_norm.fuse("cpu", add_forward, add_backward)
