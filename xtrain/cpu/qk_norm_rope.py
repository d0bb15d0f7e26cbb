"""Per-head RMSNorm, rotation and head layout on the CPU. See `xtrain.engine.ops.qk_norm_rope`.

One pass over qkv each way. fp32; cosines and sines come from a table of the reference's fp32
angles. Rows of the batch are independent and their parts of the gains' gradients are summed in
order, so the bits do not depend on the number of threads.
"""

from functools import lru_cache

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY, SERIAL
from xtrain.engine.ops.qk_norm_rope import qk_norm_rope, rotation

_ROW_SUMS = {"reassoc", "contract"}  # sums along a head may use vector lanes; NaN is kept


def forward(xp, qkv, q_weight, k_weight, positions, *, heads, kv_heads, eps, theta):
    """(q, k, v) by head, and what backward needs."""
    B, T, width = qkv.shape
    Dh = width // (heads + 2 * kv_heads)
    x = np.ascontiguousarray(qkv).reshape(B, T, heads + 2 * kv_heads, Dh)
    positions = np.ascontiguousarray(positions, np.int32)
    table = _rotations(int(positions.max()), Dh, theta)
    q = np.empty((B, heads, T, Dh), np.float32)
    k, v = (np.empty((B, kv_heads, T, Dh), np.float32) for _ in range(2))
    norm = q_weight is not None
    gains = np.stack([q_weight, k_weight]) if norm else np.ones((2, Dh), np.float32)
    rstd = np.ones((B, T, heads + kv_heads), np.float32)
    run = _forward if x.size <= SERIAL else _forward_parallel
    run(x, gains, positions, table, norm, np.float32(eps), rstd, q, k, v)
    return (q, k, v), (x, gains, positions, table, norm, rstd)


def backward(xp, dys, saved, *, heads, kv_heads, eps, theta):
    """The gradients of qkv and of the two gains."""
    x, gains, positions, table, norm, rstd = saved
    B, T = x.shape[:2]
    dq, dk, dv = (np.ascontiguousarray(d) for d in dys)
    dx = np.empty_like(x)
    partial = np.zeros((B, *gains.shape), np.float32)
    run = _backward if x.size <= SERIAL else _backward_parallel
    run(dq, dk, dv, x, gains, positions, table, norm, rstd, dx, partial)
    dqkv = dx.reshape(B, T, -1)
    if not norm:
        return dqkv, None, None, None
    return dqkv, *partial.sum(0), None


def _rotations(last_position, head_dim, theta):
    """cos and sin (2, positions, Dh / 2) of at least the positions 0 .. last_position."""
    return _table(1 << last_position.bit_length(), head_dim, theta)


@lru_cache(maxsize=8)
def _table(length, head_dim, theta):
    positions = np.arange(length, dtype=np.int32)[None]
    cos, sin = rotation(np, positions, head_dim, theta, np.dtype(np.float32))
    return np.stack([cos[0, 0], sin[0, 0]])


@njit(error_model="numpy", cache=True)
def _forward(x, gains, positions, table, norm, eps, rstd, q, k, v):
    for b in range(x.shape[0]):
        _forward_row(b, x, gains, positions, table, norm, eps, rstd, q, k, v)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _forward_parallel(x, gains, positions, table, norm, eps, rstd, q, k, v):
    for b in prange(x.shape[0]):
        _forward_row(np.int64(b), x, gains, positions, table, norm, eps, rstd, q, k, v)


@njit(error_model="numpy", fastmath=_ROW_SUMS, cache=True)
def _forward_row(b, x, gains, positions, table, norm, eps, rstd, q, k, v):
    T, Dh, H, Hk = x.shape[1], x.shape[3], q.shape[1], k.shape[1]
    half = Dh // 2
    for t in range(T):
        at = positions[b, t]
        for h in range(H + Hk):
            r = np.float32(1)
            if norm:
                squares = np.float32(0)
                for d in range(Dh):
                    squares += x[b, t, h, d] * x[b, t, h, d]
                r = np.float32(1) / np.sqrt(squares / np.float32(Dh) + eps)
                rstd[b, t, h] = r
            kind, out = (0, q[b, h, t]) if h < H else (1, k[b, h - H, t])
            for d in range(half):
                cos, sin = table[0, at, d], table[1, at, d]
                first = x[b, t, h, d] * r * gains[kind, d]
                second = x[b, t, h, half + d] * r * gains[kind, half + d]
                out[d] = first * cos - second * sin
                out[half + d] = second * cos + first * sin
        for h in range(Hk):
            for d in range(Dh):
                v[b, h, t, d] = x[b, t, H + Hk + h, d]


@njit(error_model="numpy", cache=True)
def _backward(dq, dk, dv, x, gains, positions, table, norm, rstd, dx, partial):
    for b in range(x.shape[0]):
        _backward_row(b, dq, dk, dv, x, gains, positions, table, norm, rstd, dx, partial)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _backward_parallel(dq, dk, dv, x, gains, positions, table, norm, rstd, dx, partial):
    for b in prange(x.shape[0]):
        row = np.int64(b)
        _backward_row(row, dq, dk, dv, x, gains, positions, table, norm, rstd, dx, partial)


@njit(error_model="numpy", fastmath=_ROW_SUMS, cache=True)
def _backward_row(b, dq, dk, dv, x, gains, positions, table, norm, rstd, dx, partial):
    T, Dh, H, Hk = x.shape[1], x.shape[3], dq.shape[1], dk.shape[1]
    half = Dh // 2
    for t in range(T):
        at = positions[b, t]
        for h in range(H + Hk):
            kind, dout = (0, dq[b, h, t]) if h < H else (1, dk[b, h - H, t])
            into = dx[b, t, h]
            for d in range(half):  # rotate back
                cos, sin = table[0, at, d], table[1, at, d]
                into[d] = dout[d] * cos + dout[half + d] * sin
                into[half + d] = dout[half + d] * cos - dout[d] * sin
            if norm:
                r, dot = rstd[b, t, h], np.float32(0)
                for d in range(Dh):
                    dot += into[d] * gains[kind, d] * x[b, t, h, d]
                mean = dot * r / np.float32(Dh)
                for d in range(Dh):
                    x_hat = x[b, t, h, d] * r
                    partial[b, kind, d] += into[d] * x_hat
                    into[d] = r * (into[d] * gains[kind, d] - x_hat * mean)
        for h in range(Hk):
            for d in range(Dh):
                dx[b, t, H + Hk + h, d] = dv[b, h, t, d]


qk_norm_rope.fuse("cpu", forward, backward)
