"""Causal attention on the CPU. See `xtrain.engine.ops.attention`.

Threads share the (batch, key-value head) pairs, each with its group of query heads, so the gradient
of a key-value head is summed by one thread in head order. Query rows are taken in blocks; scores
beyond a block's last visible key are never computed. fp32; operands are copied to zero-padded
scratch, so tiles (`xtrain.cpu.tile`) need no edges. Probabilities are kept for backward.
"""

import math

import numpy as np
from numba import njit, prange

from xtrain.cpu.exp import exp
from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.cpu.tile import LANES, ROWS, add_multiply_tile, multiply_tile
from xtrain.engine.ops.attention import attention

BLOCK = 32  # query rows; a multiple of ROWS
SERIAL = 65536  # scores up to which one core is as fast as waking the others
_ROW_SUMS = {"reassoc", "contract"}  # sums along a row may use vector lanes; NaN is kept


def forward(xp, q, k, v, starts, offsets):
    """y (B, H, T, Dh), and what backward needs."""
    q = np.ascontiguousarray(q)  # k and v may be slices of a cache: they are packed once, below
    B, T = q.shape[0], q.shape[2]
    # The visible keys of each query: first <= key < end, none when first is beyond.
    first = np.zeros((B, T), np.int32)
    if starts is not None:
        first = np.ascontiguousarray(np.minimum(starts, k.shape[2]), np.int32)
    end = np.broadcast_to(np.arange(1, T + 1, dtype=np.int32), (B, T))
    if offsets is not None:
        end = end + offsets[:, None]
    end = np.ascontiguousarray(np.minimum(end, k.shape[2]), np.int32)
    p = np.empty((*q.shape[:3], k.shape[2]), np.float32)
    y = np.empty_like(q)
    run = _forward if p.size <= SERIAL else _forward_parallel
    run(q, k, v, first, end, np.float32(1 / math.sqrt(q.shape[3])), p, y)
    return y, (q, k, v, p, end)


def backward(xp, dy, saved):
    """dq, dk, dv."""
    q, k, v, p, end = saved
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    scale = np.float32(1 / math.sqrt(q.shape[3]))
    run = _backward if p.size <= SERIAL else _backward_parallel
    run(np.ascontiguousarray(dy), q, k, v, p, end, scale, dq, dk, dv)
    return dq, dk, dv, None, None


@njit(error_model="numpy", cache=True)
def _forward(q, k, v, first, end, scale, p, y):
    for pair in range(k.shape[0] * k.shape[1]):
        _forward_pair(pair, q, k, v, first, end, scale, p, y)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _forward_parallel(q, k, v, first, end, scale, p, y):
    for pair in prange(k.shape[0] * k.shape[1]):
        _forward_pair(np.int64(pair), q, k, v, first, end, scale, p, y)


@njit(error_model="numpy", cache=True)
def _forward_pair(pair, q, k, v, first, end, scale, p, y):
    Hk, S, Dh = k.shape[1:]
    b, kv, group = pair // Hk, pair % Hk, q.shape[1] // Hk
    S_pad, D_pad = _round_up(S, LANES), _round_up(Dh, LANES)
    k_columns = np.zeros((Dh, S_pad), np.float32)
    v_rows = np.zeros((S, D_pad), np.float32)
    for j in range(S):
        for d in range(Dh):
            k_columns[d, j] = k[b, kv, j, d]
            v_rows[j, d] = v[b, kv, j, d]
    queries = np.zeros((BLOCK, Dh), np.float32)
    scores = np.zeros((BLOCK, S_pad), np.float32)
    sums = np.empty((BLOCK, D_pad), np.float32)
    for h in range(kv * group, (kv + 1) * group):
        for start in range(0, q.shape[2], BLOCK):
            rows = min(BLOCK, q.shape[2] - start)
            keys = end[b, start + rows - 1]
            for i in range(rows):
                for d in range(Dh):
                    queries[i, d] = q[b, h, start + i, d] * scale
            for i in range(0, rows, ROWS):
                for j in range(0, keys, LANES):
                    multiply_tile(
                        queries,
                        i * Dh,
                        Dh,
                        1,
                        k_columns,
                        j,
                        S_pad,
                        Dh,
                        scores,
                        i * S_pad + j,
                        S_pad,
                    )
            for i in range(rows):
                at = start + i
                _softmax(scores[i], first[b, at], end[b, at], _round_up(keys, LANES))
                for j in range(keys):
                    p[b, h, at, j] = scores[i, j]
                for j in range(keys, S):
                    p[b, h, at, j] = 0
            for i in range(0, rows, ROWS):
                for d in range(0, D_pad, LANES):
                    multiply_tile(
                        scores,
                        i * S_pad,
                        S_pad,
                        1,
                        v_rows,
                        d,
                        D_pad,
                        keys,
                        sums,
                        i * D_pad + d,
                        D_pad,
                    )
            for i in range(rows):
                for d in range(Dh):
                    y[b, h, start + i, d] = sums[i, d]


@njit(error_model="numpy", fastmath=_ROW_SUMS, cache=True)
def _softmax(scores, first, end, padded):
    """Turn scores[:padded] into probabilities in place; those outside first .. end become 0."""
    for j in range(first):
        scores[j] = -np.inf
    for j in range(end, padded):
        scores[j] = -np.inf
    peak = _largest(scores, padded)
    if peak == -np.inf:  # no visible key
        scores[:padded] = 0
        return
    total = np.float32(0)
    for j in range(padded):
        scores[j] = exp(scores[j] - peak)
        total += scores[j]
    inverse = np.float32(1) / total
    for j in range(padded):
        scores[j] *= inverse


@njit(error_model="numpy", cache=True)
def _largest(scores, padded):
    """The largest of scores[:padded]; anything if one is NaN, which the exponentials then show.

    Compared as integers in the same order, flipped below zero: a maximum of floats is no vector
    reduction without leave to ignore NaN.
    """
    magnitude = np.int32(0x7FFFFFFF)
    largest = np.int32(-0x7FFFFFFF)
    for j in range(padded):
        bits = np.float32(scores[j]).view(np.int32)
        largest = max(largest, bits ^ ((bits >> np.int32(31)) & magnitude))
    return np.int32(largest ^ ((largest >> np.int32(31)) & magnitude)).view(np.float32)


@njit(error_model="numpy", cache=True)
def _backward(dy, q, k, v, p, end, scale, dq, dk, dv):
    for pair in range(k.shape[0] * k.shape[1]):
        _backward_pair(pair, dy, q, k, v, p, end, scale, dq, dk, dv)


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _backward_parallel(dy, q, k, v, p, end, scale, dq, dk, dv):
    for pair in prange(k.shape[0] * k.shape[1]):
        _backward_pair(np.int64(pair), dy, q, k, v, p, end, scale, dq, dk, dv)


@njit(error_model="numpy", cache=True)
def _backward_pair(pair, dy, q, k, v, p, end, scale, dq, dk, dv):
    Hk, S, Dh = k.shape[1:]
    b, kv, group = pair // Hk, pair % Hk, q.shape[1] // Hk
    S_pad, D_pad = _round_up(S, LANES), _round_up(Dh, LANES)
    v_columns = np.zeros((Dh, S_pad), np.float32)
    k_rows = np.zeros((S, D_pad), np.float32)
    for j in range(S):
        for d in range(Dh):
            v_columns[d, j] = v[b, kv, j, d]
            k_rows[j, d] = k[b, kv, j, d]
    dk_rows, dv_rows = np.zeros((S_pad, D_pad), np.float32), np.zeros((S_pad, D_pad), np.float32)
    q_rows, dy_rows = np.zeros((BLOCK, D_pad), np.float32), np.zeros((BLOCK, D_pad), np.float32)
    probabilities, dscores = (
        np.zeros((BLOCK, S_pad), np.float32),
        np.zeros((BLOCK, S_pad), np.float32),
    )
    sums = np.empty((BLOCK, D_pad), np.float32)
    for h in range(kv * group, (kv + 1) * group):
        for start in range(0, q.shape[2], BLOCK):
            rows = min(BLOCK, q.shape[2] - start)
            keys = end[b, start + rows - 1]
            for i in range(rows):
                for d in range(Dh):
                    q_rows[i, d] = q[b, h, start + i, d]
                    dy_rows[i, d] = dy[b, h, start + i, d]
            for i in range(0, rows, ROWS):
                for j in range(0, keys, LANES):
                    multiply_tile(
                        dy_rows, i * D_pad, D_pad, 1, v_columns, j, S_pad, Dh,
                        dscores, i * S_pad + j, S_pad,
                    )  # fmt: skip
            for i in range(rows):
                _softmax_backward(p[b, h, start + i], keys, scale, probabilities[i], dscores[i])
            for i in range(0, rows, ROWS):
                for d in range(0, D_pad, LANES):
                    multiply_tile(
                        dscores, i * S_pad, S_pad, 1, k_rows, d, D_pad, keys,
                        sums, i * D_pad + d, D_pad,
                    )  # fmt: skip
            for i in range(rows):
                for d in range(Dh):
                    dq[b, h, start + i, d] = sums[i, d]
            for j in range(0, keys, ROWS):
                for d in range(0, D_pad, LANES):
                    at = j * D_pad + d
                    add_multiply_tile(
                        dscores, j, 1, S_pad, q_rows, d, D_pad, rows, dk_rows, at, D_pad
                    )
                    add_multiply_tile(
                        probabilities, j, 1, S_pad, dy_rows, d, D_pad, rows, dv_rows, at, D_pad
                    )
    for j in range(S):
        for d in range(Dh):
            dk[b, kv, j, d] = dk_rows[j, d]
            dv[b, kv, j, d] = dv_rows[j, d]


@njit(error_model="numpy", fastmath=_ROW_SUMS, cache=True)
def _softmax_backward(p, keys, scale, probabilities, dscores):
    """Copy a row of p and turn dscores, the gradient of p, into that of the unscaled scores."""
    dot = np.float32(0)
    for j in range(keys):
        probabilities[j] = p[j]
        dot += dscores[j] * p[j]
    for j in range(keys):
        dscores[j] = p[j] * (dscores[j] - dot) * scale
    for j in range(keys, dscores.size):
        probabilities[j] = 0
        dscores[j] = 0


@njit(cache=True)
def _round_up(size, multiple):
    return (size + multiple - 1) // multiple * multiple


attention.fuse("cpu", forward, backward)
