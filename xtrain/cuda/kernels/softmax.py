"""Softmax rows, causal for composed attention or plain for the op `softmax`; rows in registers.

    p = exp(z - max) / sum over the visible keys, 0 elsewhere;   dz = p (dp - sum(dp p))

Keys beyond a row's last are not read. Scores may be fp32 and probabilities bf16. exp is 2**x with
the factor log2(e) folded into one multiply-add. Arithmetic is fp32.
Bytes an element, scores of s and probabilities of r bytes, half of them visible: forward s / 2 + r,
backward s / 2 + r / 2 + r.
"""

import functools

import numpy as np
from numba import cuda
from numba.types import float32, int64

from xtrain.cuda.compile.launch import Kernel, device_function, i64, pointer
from xtrain.cuda.parts.block import row_max, row_sum
from xtrain.cuda.parts.formula import LOG2_E, exp2
from xtrain.cuda.parts.rows import Shape, flat_rows, shape_of
from xtrain.cuda.parts.vectors import vector_access
from xtrain.engine.ops.softmax import softmax

LOG2E = np.float32(LOG2_E)
LOWEST = np.float32(-np.inf)


@device_function
def first_key(starts, has_starts, sequence, query, queries):
    """The first key that a query sees."""
    return int64(starts[sequence * queries + query]) if has_starts else int64(0)


@device_function
def end_key(offsets, has_offsets, sequence, query):
    """One beyond the last key that a query sees."""
    return query + 1 + (int64(offsets[sequence]) if has_offsets else int64(0))


@functools.cache
def forward_kernel(dtype, out_dtype, shape: Shape, causal, has_starts, has_offsets) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load = vector_access(dtype, aligned).load
    store = vector_access(out_dtype, aligned, width).store
    largest, total = row_max(threads), row_sum(threads)
    values, block = shape.values, shape.block

    def softmax_forward(
        z, p, starts, offsets, rows, keys, batch_rows, group, first, queries, heads
    ):
        scratch = cuda.shared.array(block, float32)
        v = cuda.local.array(values, float32)
        row = cuda.blockIdx.x * rows_here + cuda.threadIdx.x // threads
        exists = row < rows
        here = row if exists else int64(0)
        lane = cuda.threadIdx.x % threads
        low, end = int64(0), keys
        if causal:
            query = first + here % batch_rows // group
            sequence = here // batch_rows // heads
            low = first_key(starts, has_starts, sequence, query, queries)
            end = min(end_key(offsets, has_offsets, sequence, query), keys)
        for w in range(vectors):
            at = (w * threads + lane) * width
            load(z, here * keys + at, end - at, v, w * width)
        peak = LOWEST
        for w in range(vectors):
            at = (w * threads + lane) * width
            for i in range(width):
                j = w * width + i
                v[j] = v[j] if low <= at + i and at + i < end else LOWEST
                peak = max(peak, v[j])
        peak = largest(peak, scratch) * LOG2E
        if causal and peak == LOWEST:  # no visible key: p = 0
            peak = float32(0)
        weight = float32(0)
        for i in range(values):
            v[i] = exp2(v[i] * LOG2E - peak)
            weight += v[i]
        weight = total(weight, scratch)
        scale = float32(0) if causal and weight == float32(0) else float32(1) / weight
        for i in range(values):
            v[i] *= scale
        for w in range(vectors):
            at = (w * threads + lane) * width
            store(p, here * keys + at, keys - at if exists else int64(0), v, w * width)

    arrays = (pointer(dtype), pointer(out_dtype), pointer("int32"), pointer("int32"))
    return Kernel(softmax_forward, block, *arrays, *[i64] * 7)


@functools.cache
def backward_kernel(dtype, p_dtype, out_dtype, shape: Shape, causal, has_offsets) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load = vector_access(dtype, aligned).load
    load_p = vector_access(p_dtype, aligned, width).load
    store = vector_access(out_dtype, aligned, width).store
    total = row_sum(threads)
    values, block = shape.values, shape.block

    def softmax_backward(p, dp, dz, offsets, rows, keys, batch_rows, group, first, heads):
        scratch = cuda.shared.array(block, float32)
        weight = cuda.local.array(values, float32)
        gradient = cuda.local.array(values, float32)
        row = cuda.blockIdx.x * rows_here + cuda.threadIdx.x // threads
        exists = row < rows
        here = row if exists else int64(0)
        lane = cuda.threadIdx.x % threads
        end = keys
        if causal:
            query = first + here % batch_rows // group
            sequence = here // batch_rows // heads
            end = min(end_key(offsets, has_offsets, sequence, query), keys)
        for w in range(vectors):
            at = (w * threads + lane) * width
            load_p(p, here * keys + at, end - at, weight, w * width)
            load(dp, here * keys + at, end - at, gradient, w * width)
        dot = float32(0)
        for i in range(values):
            dot += weight[i] * gradient[i]
        dot = total(dot, scratch)
        for i in range(values):
            gradient[i] = weight[i] * (gradient[i] - dot)
        for w in range(vectors):
            at = (w * threads + lane) * width
            store(dz, here * keys + at, keys - at if exists else int64(0), gradient, w * width)

    arrays = (pointer(p_dtype), pointer(dtype), pointer(out_dtype), pointer("int32"))
    return Kernel(softmax_backward, block, *arrays, *[i64] * 6)


def causal_softmax(xp, scores, out, starts, offsets, *, group, first, queries, kv_heads) -> None:
    """Causal softmax of scores (B * kv_heads, R, S), already scaled, into out, same shape.

    Row r of a batch is query first + r // group. Query t of sequence b sees key j iff
    starts[b, t] <= j <= offsets[b] + t. starts: (B, queries) int32, None = 0.  offsets: (B,) int32,
    None = 0.  out may be scores; invisible keys get 0, so a row that sees none is 0.
    """
    rows, keys = flat_rows(scores), scores.shape[-1]
    starts, offsets = _contiguous(xp, starts), _contiguous(xp, offsets)
    shape = shape_of(keys, scores, out)
    has_starts, has_offsets = starts is not None, offsets is not None
    kernel = forward_kernel(scores.dtype, out.dtype, shape, True, has_starts, has_offsets)
    places = (scores.shape[1], group, first, queries, kv_heads)
    grid = shape.grid(rows)
    kernel(grid, scores, out, starts, offsets, rows, keys, *places)


def causal_softmax_backward(
    xp, p, dp, ds, starts, offsets, *, group, first, queries, kv_heads
) -> None:
    """ds = p (dp - sum(dp p)) for the rows of `causal_softmax`; 0 where invisible.

    ds may be p or dp.
    """
    rows, keys = flat_rows(p), p.shape[-1]
    offsets = _contiguous(xp, offsets)
    shape = shape_of(keys, dp, p, ds)
    kernel = backward_kernel(dp.dtype, p.dtype, ds.dtype, shape, True, offsets is not None)
    places = (p.shape[1], group, first, kv_heads)
    kernel(shape.grid(rows), p, dp, ds, offsets, rows, keys, *places)


def _contiguous(xp, array):
    return None if array is None else xp.ascontiguousarray(array)


def forward(xp, x):
    x = xp.ascontiguousarray(x)
    y, rows, columns = xp.empty(x.shape, x.dtype), flat_rows(x), x.shape[-1]
    shape = shape_of(columns, x, y)
    kernel = forward_kernel(x.dtype, y.dtype, shape, False, False, False)
    grid = shape.grid(rows)
    kernel(grid, x, y, None, None, rows, columns, rows, 1, 0, 0, 1)
    return y, y


def backward(xp, dy, saved):
    dy = xp.ascontiguousarray(dy)
    dx, rows, columns = xp.empty(dy.shape, dy.dtype), flat_rows(dy), dy.shape[-1]
    shape = shape_of(columns, dy, saved, dx)
    kernel = backward_kernel(dy.dtype, saved.dtype, dx.dtype, shape, False, False)
    kernel(shape.grid(rows), saved, dy, dx, None, rows, columns, rows, 1, 0, 1)
    return (dx,)


softmax.fuse("cuda", forward, backward)
