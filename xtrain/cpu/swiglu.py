"""silu(gate) * up on the CPU, with its gradient. See `xtrain.engine.ops.swiglu`. fp32."""

import numpy as np
from numba import njit, prange

from xtrain.cpu.exp import exp
from xtrain.cpu.parallel import PRANGE_ONLY, SERIAL
from xtrain.engine.ops.swiglu import swiglu

BLOCK = 16  # rows a thread takes at a time


def forward(xp, gate_up):
    """y, and what backward needs."""
    rows = np.ascontiguousarray(gate_up).reshape(-1, gate_up.shape[-1])
    y = np.empty((rows.shape[0], rows.shape[1] // 2), np.float32)
    run = _forward if rows.size <= SERIAL else _forward_parallel
    run(rows, y)
    return y.reshape(*gate_up.shape[:-1], y.shape[1]), rows


def backward(xp, dy, saved):
    """The gradient of [gate | up]."""
    dgate_up = np.empty_like(saved)
    run = _backward if saved.size <= SERIAL else _backward_parallel
    run(np.ascontiguousarray(dy).reshape(-1, dy.shape[-1]), saved, dgate_up)
    return (dgate_up.reshape(*dy.shape[:-1], saved.shape[1]),)


@njit(error_model="numpy")
def _sigmoid(g):
    """1 / (1 + exp(-g)); exp is only taken of -|g|."""
    e = exp(-abs(g))
    return (np.float32(1) if g >= 0 else e) / (np.float32(1) + e)


@njit(error_model="numpy", cache=True)
def _forward(gate_up, y):
    for block in range((y.shape[0] + BLOCK - 1) // BLOCK):
        _forward_block(block, gate_up, y)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _forward_parallel(gate_up, y):
    for block in prange((y.shape[0] + BLOCK - 1) // BLOCK):
        _forward_block(np.int64(block), gate_up, y)


@njit(error_model="numpy", cache=True)
def _forward_block(block, gate_up, y):
    F = y.shape[1]
    for n in range(block * BLOCK, min((block + 1) * BLOCK, y.shape[0])):
        for f in range(F):
            gate = gate_up[n, f]
            y[n, f] = gate * _sigmoid(gate) * gate_up[n, F + f]


@njit(error_model="numpy", cache=True)
def _backward(dy, gate_up, dgate_up):
    for block in range((dy.shape[0] + BLOCK - 1) // BLOCK):
        _backward_block(block, dy, gate_up, dgate_up)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _backward_parallel(dy, gate_up, dgate_up):
    for block in prange((dy.shape[0] + BLOCK - 1) // BLOCK):
        _backward_block(np.int64(block), dy, gate_up, dgate_up)


@njit(error_model="numpy", cache=True)
def _backward_block(block, dy, gate_up, dgate_up):
    F = dy.shape[1]
    for n in range(block * BLOCK, min((block + 1) * BLOCK, dy.shape[0])):
        for f in range(F):
            gate, up = gate_up[n, f], gate_up[n, F + f]
            s = _sigmoid(gate)
            slope = s * (np.float32(1) + gate * (np.float32(1) - s))
            dgate_up[n, f] = dy[n, f] * up * slope
            dgate_up[n, F + f] = dy[n, f] * gate * s


swiglu.fuse("cpu", forward, backward)
