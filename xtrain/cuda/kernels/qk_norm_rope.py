"""`qk_norm_rope`: per-head norm, rotation and head layout in one pass forward and one back.

A block takes one token at a time: its first threads compute the cosines and sines of the token's
position into shared memory, then groups of `lanes` threads take the token's heads in turn. A thread
holds two pieces of a head, one of each half, so that the channels of a rotated pair meet in it.
Forward keeps 1 / rms of every q and k head, fp32. Backward leaves the gains' gradients as one
partial row a block. Arithmetic is fp32; the frequencies are the reference's, bit for bit.

Bytes an element of qkv, storage of s bytes: forward 2 s, backward 3 s (v: 2 s).
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int64

from xtrain.cuda.compile.launch import Kernel, f32, i64, pointer
from xtrain.cuda.parts.block import WARP, column_scratch, column_sums, row_sum
from xtrain.cuda.parts.formula import cosine, root, sine
from xtrain.cuda.parts.partials import PARTS, weight_gradient
from xtrain.cuda.parts.words import access, are_aligned, scalar_access, width_of
from xtrain.engine.ops.qk_norm_rope import qk_norm_rope

MOST_THREADS = 256


class HeadShape(NamedTuple):
    """How heads lie over a block: `lanes` threads a head with two pieces of `width` elements."""

    heads: int
    kv_heads: int
    half: int
    lanes: int
    width: int
    block: int
    aligned: bool


def head_shape(heads: int, kv_heads: int, head_dim: int, *arrays) -> HeadShape:
    """The geometry for heads of `head_dim` (even) elements in all of the arrays."""
    half, word = head_dim // 2, width_of(arrays[0].dtype)
    aligned = are_aligned(half, *arrays)
    pieces = half // word if aligned else half
    lanes = min(math.gcd(pieces, WARP), WARP)
    wanted = (heads + 2 * kv_heads) * lanes
    block = min(-(-wanted // WARP) * WARP, MOST_THREADS)
    block = 1 << (block - 1).bit_length()  # reductions pair threads by powers of two
    return HeadShape(heads, kv_heads, half, lanes, half // lanes, block, aligned)


@functools.cache
def frequencies(number: int, head_dim: int, theta: float, xp):
    """theta**(-2i / Dh) on device `number`, fp32 (Dh / 2,), as the reference computes it."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    table = (1.0 / theta**exponent).astype(np.float32)
    if xp is np:
        return table
    from xtrain.cuda.memory import lasting

    with lasting():  # kept across steps, so it must not lie in the pool of one of them
        return xp.asarray(table)


@functools.cache
def forward_kernel(dtype, gain_dtype, shape: HeadShape, norms: bool) -> Kernel:
    heads, kv_heads, half, lanes, width, block, aligned = shape
    load, store = access(dtype, aligned, width)[1:]
    load_gain = scalar_access(gain_dtype)[0]
    total = row_sum(lanes)
    normed, every, groups = heads + kv_heads, heads + 2 * kv_heads, block // lanes
    both = 2 * width

    def qk_norm_rope_forward(qkv, qw, kw, frequency, positions, q, k, v, rstd, tokens, T, eps):
        scratch = cuda.shared.array(block, float32)
        cos = cuda.shared.array(half, float32)
        sin = cuda.shared.array(half, float32)
        x = cuda.local.array(both, float32)
        thread = cuda.threadIdx.x
        token = int64(cuda.blockIdx.x)
        position = float32(positions[token])
        b, t = token // T, token % T
        first = thread % lanes * width
        for base in range(0, every, groups):
            head = base + thread // lanes
            exists = half if head < every else 0
            at = (token * every + head) * 2 * half + first
            load(qkv, at, exists - first, x, 0)
            load(qkv, at + half, exists - first, x, width)
            if base == 0:  # after the loads, so that they travel in the meantime
                for i in range(thread, half, block):
                    cos[i] = cosine(position * frequency[i])
                    sin[i] = sine(position * frequency[i])
                cuda.syncthreads()
            scale = float32(1)
            if norms:
                square = float32(0)
                for i in range(both):
                    square += x[i] * x[i]
                scale = float32(1) / root(total(square, scratch) / float32(2 * half) + eps)
                if first == 0 and head < normed:
                    rstd[token * normed + head] = scale
            if head < normed:
                for i in range(width):
                    c, s = cos[first + i], sin[first + i]
                    left, right = x[i] * scale, x[width + i] * scale
                    if norms:
                        gain = qw if head < heads else kw
                        left *= load_gain(gain, first + i)
                        right *= load_gain(gain, half + first + i)
                    x[i] = left * c - right * s
                    x[width + i] = right * c + left * s
            if head < heads:
                at = ((b * heads + head) * T + t) * 2 * half + first
                store(q, at, exists - first, x, 0)
                store(q, at + half, exists - first, x, width)
            elif head < normed:
                at = ((b * kv_heads + head - heads) * T + t) * 2 * half + first
                store(k, at, exists - first, x, 0)
                store(k, at + half, exists - first, x, width)
            elif head < every:
                at = ((b * kv_heads + head - normed) * T + t) * 2 * half + first
                store(v, at, exists - first, x, 0)
                store(v, at + half, exists - first, x, width)

    array, gain, fp32 = pointer(dtype), pointer(gain_dtype), pointer("float32")
    signature = (array, gain, gain, fp32, pointer("int32"), array, array, array, fp32)
    return Kernel(qk_norm_rope_forward, block, *signature, i64, i64, f32)


@functools.cache
def backward_kernel(dtype, gain_dtype, shape: HeadShape, norms: bool) -> Kernel:
    heads, kv_heads, half, lanes, width, block, aligned = shape
    load, store = access(dtype, aligned, width)[1:]
    load_gain = scalar_access(gain_dtype)[0]
    total = row_sum(lanes)
    normed, every, groups = heads + kv_heads, heads + 2 * kv_heads, block // lanes
    both, two_tables = 2 * width, 2 * half
    leave = column_sums(block, lanes, both, width)
    scratch_size = max(column_scratch(block, lanes, both), block)

    def qk_norm_rope_backward(
        qkv, qw, kw, frequency, positions, rstd, dq, dk, dv, dqkv, partial, tokens, T, blocks
    ):
        scratch = cuda.shared.array(scratch_size, float32)
        cos = cuda.shared.array(two_tables, float32)
        sin = cuda.shared.array(two_tables, float32)
        x = cuda.local.array(both, float32)
        dy = cuda.local.array(both, float32)
        dq_gain = cuda.local.array(both, float32)
        dk_gain = cuda.local.array(both, float32)
        thread = cuda.threadIdx.x
        first = thread % lanes * width
        for i in range(both):
            dq_gain[i] = float32(0)
            dk_gain[i] = float32(0)
        side = 0  # of the tables, used in turn: a slow warp may still read the last token's
        next_position = positions[cuda.blockIdx.x]
        for token in range(cuda.blockIdx.x, tokens, blocks):
            position = float32(next_position)
            next_position = positions[min(token + blocks, tokens - 1)]
            side = half - side
            b, t = token // T, token % T
            for base in range(0, every, groups):
                head = base + thread // lanes
                exists = half if head < every else 0
                here = (token * every + head) * 2 * half + first
                if head < heads:
                    at = ((b * heads + head) * T + t) * 2 * half + first
                    load(dq, at, exists - first, dy, 0)
                    load(dq, at + half, exists - first, dy, width)
                elif head < normed:
                    at = ((b * kv_heads + head - heads) * T + t) * 2 * half + first
                    load(dk, at, exists - first, dy, 0)
                    load(dk, at + half, exists - first, dy, width)
                elif head < every:
                    at = ((b * kv_heads + head - normed) * T + t) * 2 * half + first
                    load(dv, at, exists - first, dy, 0)
                    load(dv, at + half, exists - first, dy, width)
                rotated = head < normed
                if norms:
                    load(qkv, here, exists - first if rotated else 0, x, 0)
                    load(qkv, here + half, exists - first if rotated else 0, x, width)
                if base == 0:  # after the loads, so that they travel in the meantime
                    for i in range(thread, half, block):
                        cos[side + i] = cosine(position * frequency[i])
                        sin[side + i] = sine(position * frequency[i])
                    cuda.syncthreads()
                if rotated:
                    for i in range(width):
                        c, s = cos[side + first + i], sin[side + first + i]
                        left, right = dy[i], dy[width + i]
                        dy[i] = left * c + right * s
                        dy[width + i] = right * c - left * s
                if norms:
                    scale = rstd[token * normed + head] if rotated else float32(0)
                    dot = float32(0)
                    for i in range(both):
                        x[i] *= scale
                        if rotated:
                            column = first + i if i < width else half + first + i - width
                            gain = qw if head < heads else kw
                            if head < heads:
                                dq_gain[i] += dy[i] * x[i]
                            else:
                                dk_gain[i] += dy[i] * x[i]
                            dy[i] *= load_gain(gain, column)
                        dot += dy[i] * x[i]
                    mean = total(dot, scratch) / float32(2 * half)
                    if rotated:
                        for i in range(both):
                            dy[i] = scale * (dy[i] - x[i] * mean)
                store(dqkv, here, exists - first, dy, 0)
                store(dqkv, here + half, exists - first, dy, width)
        if norms:
            cuda.syncthreads()
            leave(dq_gain, scratch, partial, cuda.blockIdx.x * 4 * half, 2 * half)
            leave(dk_gain, scratch, partial, (cuda.blockIdx.x * 2 + 1) * 2 * half, 2 * half)

    array, gain, fp32 = pointer(dtype), pointer(gain_dtype), pointer("float32")
    inputs = (array, gain, gain, fp32, pointer("int32"), fp32, array, array, array)
    return Kernel(qk_norm_rope_backward, block, *inputs, array, fp32, i64, i64, i64)


def forward(xp, qkv, q_weight, k_weight, positions, *, heads, kv_heads, eps, theta):
    qkv, positions = xp.ascontiguousarray(qkv), xp.ascontiguousarray(positions)
    B, T, width = qkv.shape
    Dh, norms = width // (heads + 2 * kv_heads), q_weight is not None
    if norms:
        q_weight, k_weight = xp.ascontiguousarray(q_weight), xp.ascontiguousarray(k_weight)
    q = xp.empty((B, heads, T, Dh), qkv.dtype)
    k, v = xp.empty((B, kv_heads, T, Dh), qkv.dtype), xp.empty((B, kv_heads, T, Dh), qkv.dtype)
    rstd = xp.empty((B * T, heads + kv_heads), "float32") if norms else None
    shape = head_shape(heads, kv_heads, Dh, qkv, q, k, v)
    kernel = forward_kernel(qkv.dtype, q_weight.dtype if norms else qkv.dtype, shape, norms)
    frequency = frequencies_for(xp, Dh, theta)
    inputs = (qkv, q_weight, k_weight, frequency, positions)
    kernel(B * T, *inputs, q, k, v, rstd, B * T, T, eps)
    return (q, k, v), (qkv, q_weight, k_weight, positions, rstd)


def backward(xp, dys, saved, *, heads, kv_heads, eps, theta, into):
    qkv, q_weight, k_weight, positions, rstd = saved
    B, T, width = qkv.shape
    Dh, norms = width // (heads + 2 * kv_heads), q_weight is not None
    dys, dqkv = tuple(xp.ascontiguousarray(d) for d in dys), xp.empty(qkv.shape, qkv.dtype)
    shape = head_shape(heads, kv_heads, Dh, qkv, *dys, dqkv)
    blocks = min(B * T, PARTS)
    partial = xp.empty((blocks, 2 * Dh), "float32") if norms else None
    kernel = backward_kernel(qkv.dtype, q_weight.dtype if norms else qkv.dtype, shape, norms)
    frequency = frequencies_for(xp, Dh, theta)
    inputs = (qkv, q_weight, k_weight, frequency, positions, rstd)
    kernel(blocks, *inputs, *dys, dqkv, partial, B * T, T, blocks)
    if not norms:
        return dqkv, None, None, None
    dq_weight = weight_gradient(xp, partial, q_weight, into[0])
    dk_weight = weight_gradient(xp, partial, k_weight, into[1], first=Dh)
    return dqkv, dq_weight, dk_weight, None


def frequencies_for(xp, head_dim, theta):
    """The frequencies on the current device."""
    number = 0 if xp is np else xp.cuda.runtime.getDevice()
    return frequencies(number, head_dim, theta, xp)


qk_norm_rope.fuse("cuda", forward, backward, accumulates=(1, 2))
