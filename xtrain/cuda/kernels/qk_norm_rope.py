"""`qk_norm_rope`: per-head norm, rotation and head layout in one pass forward and one back.

A block takes a tile of tokens: it puts the cosines and sines of their positions into shared memory,
then each thread keeps one token and one pair of pieces of a head, one of each half, so that the
channels of a rotated pair meet in it and its cosines, sines and gains stay in registers while it
goes over the token's heads, queries first. `abreast` heads of a token lie side by side in a warp,
so that 256 bytes in a row are read, and as many in a row written, head by head.
Forward keeps 1 / rms of every q and k head, fp32. Backward leaves the gains' gradients as one
partial row a block. Arithmetic is fp32; the frequencies are the reference's, bit for bit.
The kernel is Numba's, and for bf16 heads of whole vectors CUDA C++ of the same plan: Numba's takes
115 registers where C++ takes 64, and the threads that fit hide less of memory's latency (H200, v9:
0.085 ms forward and 0.145 backward, a copy 0.060 and 0.092).

Bytes an element of qkv, storage of s bytes: forward 2 s, backward 3 s (v: 2 s).
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.types import float32, int64

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.compile.launch import SIMULATED, Kernel, device_function, f32, i64, pointer
from xtrain.cuda.parts.block import WARP, column_scratch, column_sums, row_sum, thread_index
from xtrain.cuda.parts.formula import cos, sin, sqrt
from xtrain.cuda.parts.partials import weight_gradient
from xtrain.cuda.parts.vectors import (
    VECTOR_BYTES,
    are_aligned,
    scalar_access,
    vector_access,
    width_of,
)
from xtrain.engine.dtype import bfloat16
from xtrain.engine.ops.qk_norm_rope import qk_norm_rope

MOST_THREADS = 32 if SIMULATED else 256  # of a block
SEGMENT_BYTES = 256  # of neighbouring heads of a token that a warp reads at once
IN_TURN = 2  # heads whose loads a thread of forward has under way at once
PARTS = 264  # blocks of backward at most: two a multiprocessor of an H200; fixed, as bits follow it


class HeadShape(NamedTuple):
    """How heads lie over a block: `lanes` threads a head with two pieces of `width` elements.

    abreast: heads of a token side by side.  tokens: of a tile.
    """

    heads: int
    kv_heads: int
    half: int
    lanes: int
    width: int
    abreast: int
    tokens: int
    aligned: bool

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.lanes * self.abreast * self.tokens


def head_shape(heads: int, kv_heads: int, head_dim: int, count: int, *arrays) -> HeadShape:
    """The geometry for `count` tokens with heads of `head_dim` (even) elements in all arrays."""
    half, vector = head_dim // 2, width_of(arrays[0].dtype)
    aligned = are_aligned(half, *arrays)
    return _head_shape(heads, kv_heads, half, count, vector, aligned)


@functools.cache  # asked at every launch
def _head_shape(heads, kv_heads, half, count, vector, aligned) -> HeadShape:
    lanes = math.gcd(half // vector if aligned else half, WARP)
    abreast = 1
    while 4 * half * abreast * VECTOR_BYTES // vector <= SEGMENT_BYTES and abreast < WARP // lanes:
        abreast *= 2
    tokens = max(MOST_THREADS // (lanes * abreast), 1)
    # Few tokens are spread over more blocks, down to a warp each.
    while tokens * lanes * abreast > WARP and -(-count // tokens) < PARTS:
        tokens //= 2
    return HeadShape(heads, kv_heads, half, lanes, half // lanes, abreast, tokens, aligned)


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
def angles(shape: HeadShape):
    """Device function (positions, frequency, first, tokens, cos_of, sin_of): tables of a tile."""
    half, block, size = shape.half, shape.block, shape.tokens * shape.half

    @device_function
    def fill(positions, frequency, first, tokens, cos_of, sin_of):
        for i in range(thread_index(), size, block):
            position = float32(positions[min(first + i // half, tokens - 1)])
            cos_of[i] = cos(position * frequency[i % half])
            sin_of[i] = sin(position * frequency[i % half])

    return fill


@functools.cache
def forward_kernel(dtype, gain_dtype, shape: HeadShape, norms: bool) -> Kernel:
    heads, kv_heads, half, lanes, width, abreast, tile, aligned = shape
    load, store = vector_access(dtype, aligned, width)[1:]
    load_gain = scalar_access(gain_dtype)[0]
    total, fill, block = row_sum(lanes), angles(shape), shape.block
    normed, every = heads + kv_heads, heads + 2 * kv_heads
    both, table, in_turn = 2 * width, tile * half, IN_TURN
    held, stride = in_turn * both, in_turn * abreast

    def qk_norm_rope_forward(qkv, qw, kw, frequency, positions, q, k, v, rstd, tokens, T, eps):
        scratch = cuda.shared.array(block, float32)
        cos_of = cuda.shared.array(table, float32)
        sin_of = cuda.shared.array(table, float32)
        x = cuda.local.array(held, float32)
        cos = cuda.local.array(width, float32)
        sin = cuda.local.array(width, float32)
        gain = cuda.local.array(both, float32)
        slot, first = cuda.threadIdx.x // lanes, cuda.threadIdx.x % lanes * width
        beside, mine = slot % abreast, slot // abreast
        start = int64(cuda.blockIdx.x) * tile
        fill(positions, frequency, start, tokens, cos_of, sin_of)
        cuda.syncthreads()
        for i in range(width):
            cos[i] = cos_of[mine * half + first + i]
            sin[i] = sin_of[mine * half + first + i]
        token = start + mine
        b, t = token // T, token % T
        for kind in range(3):  # queries, keys, values
            count = heads if kind == 0 else kv_heads
            before = 0 if kind == 0 else (heads if kind == 1 else normed)
            out = q if kind == 0 else (k if kind == 1 else v)
            if norms and kind < 2:
                gains = qw if kind == 0 else kw
                for i in range(width):
                    gain[i] = load_gain(gains, first + i)
                    gain[width + i] = load_gain(gains, half + first + i)
            for base in range(0, count, stride):
                for u in range(in_turn):
                    head = base + u * abreast + beside
                    exists = half if head < count and token < tokens else 0
                    at = (token * every + before + head) * 2 * half + first
                    load(qkv, at, exists - first, x, u * both)
                    load(qkv, at + half, exists - first, x, u * both + width)
                for u in range(in_turn):
                    head, j = base + u * abreast + beside, u * both
                    exists = half if head < count and token < tokens else 0
                    if kind < 2:
                        scale = float32(1)
                        if norms:
                            square = float32(0)
                            for i in range(both):
                                square += x[j + i] * x[j + i]
                            mean = total(square, scratch) / float32(2 * half)
                            scale = float32(1) / sqrt(mean + eps)
                            if first == 0 and exists > 0:
                                rstd[token * normed + before + head] = scale
                        for i in range(width):
                            left, right = x[j + i] * scale, x[j + width + i] * scale
                            if norms:
                                left *= gain[i]
                                right *= gain[width + i]
                            x[j + i] = left * cos[i] - right * sin[i]
                            x[j + width + i] = right * cos[i] + left * sin[i]
                    to = ((b * count + head) * T + t) * 2 * half + first
                    store(out, to, exists - first, x, j)
                    store(out, to + half, exists - first, x, j + width)

    array, gain, fp32 = pointer(dtype), pointer(gain_dtype), pointer("float32")
    signature = (array, gain, gain, fp32, pointer("int32"), array, array, array, fp32)
    return Kernel(qk_norm_rope_forward, block, *signature, i64, i64, f32)


@functools.cache
def backward_kernel(dtype, gain_dtype, shape: HeadShape, norms: bool) -> Kernel:
    heads, kv_heads, half, lanes, width, abreast, tile, aligned = shape
    load, store = vector_access(dtype, aligned, width)[1:]
    load_gain = scalar_access(gain_dtype)[0]
    total, fill, block = row_sum(lanes), angles(shape), shape.block
    normed, every = heads + kv_heads, heads + 2 * kv_heads
    both, table = 2 * width, tile * half
    leave = column_sums(block, lanes, both, width)
    scratch_size = max(column_scratch(block, lanes, both), block)

    def qk_norm_rope_backward(
        qkv, qw, kw, frequency, positions, rstd, dq, dk, dv, dqkv, partial, tokens, T, blocks
    ):
        scratch = cuda.shared.array(scratch_size, float32)
        cos_of = cuda.shared.array(table, float32)
        sin_of = cuda.shared.array(table, float32)
        x = cuda.local.array(both, float32)
        dy = cuda.local.array(both, float32)
        cos = cuda.local.array(width, float32)
        sin = cuda.local.array(width, float32)
        gain = cuda.local.array(both, float32)
        dgain = cuda.local.array(both, float32)
        slot, first = cuda.threadIdx.x // lanes, cuda.threadIdx.x % lanes * width
        beside, mine = slot % abreast, slot // abreast
        for kind in range(3):  # queries, keys, values
            count = heads if kind == 0 else kv_heads
            before = 0 if kind == 0 else (heads if kind == 1 else normed)
            given = dq if kind == 0 else (dk if kind == 1 else dv)
            if norms and kind < 2:
                gains = qw if kind == 0 else kw
                for i in range(width):
                    gain[i] = load_gain(gains, first + i)
                    gain[width + i] = load_gain(gains, half + first + i)
                for i in range(both):
                    dgain[i] = float32(0)
            for start in range(cuda.blockIdx.x * tile, tokens, blocks * tile):
                if kind < 2:
                    fill(positions, frequency, start, tokens, cos_of, sin_of)
                    cuda.syncthreads()
                    for i in range(width):
                        cos[i] = cos_of[mine * half + first + i]
                        sin[i] = sin_of[mine * half + first + i]
                    cuda.syncthreads()
                token = start + mine
                b, t = token // T, token % T
                for base in range(0, count, abreast):
                    head = base + beside
                    exists = half if head < count and token < tokens else 0
                    here = (token * every + before + head) * 2 * half + first
                    at = ((b * count + head) * T + t) * 2 * half + first
                    load(given, at, exists - first, dy, 0)
                    load(given, at + half, exists - first, dy, width)
                    if kind < 2:
                        scale = float32(1)
                        if norms:
                            load(qkv, here, exists - first, x, 0)
                            load(qkv, here + half, exists - first, x, width)
                            where = token * normed + before + head
                            scale = rstd[where] if exists > 0 else float32(0)
                        for i in range(width):
                            left, right = dy[i], dy[width + i]
                            dy[i] = left * cos[i] + right * sin[i]
                            dy[width + i] = right * cos[i] - left * sin[i]
                        if norms:
                            dot = float32(0)
                            for i in range(both):
                                x[i] *= scale
                                dgain[i] += dy[i] * x[i]
                                dy[i] *= gain[i]
                                dot += dy[i] * x[i]
                            mean = total(dot, scratch) / float32(2 * half)
                            for i in range(both):
                                dy[i] = scale * (dy[i] - x[i] * mean)
                    store(dqkv, here, exists - first, dy, 0)
                    store(dqkv, here + half, exists - first, dy, width)
            if norms and kind < 2:
                row = (cuda.blockIdx.x * 2 + kind) * 2 * half
                cuda.syncthreads()
                leave(dgain, scratch, partial, row, 2 * half)

    array, gain, fp32 = pointer(dtype), pointer(gain_dtype), pointer("float32")
    inputs = (array, gain, gain, fp32, pointer("int32"), fp32, array, array, array)
    resident = 2 if block == MOST_THREADS else 0
    signature = (*inputs, array, fp32, i64, i64, i64)
    return Kernel(qk_norm_rope_backward, block, *signature, resident=resident)


def forward(xp, qkv, q_weight, k_weight, positions, *, heads, kv_heads, eps, theta):
    qkv, positions = xp.ascontiguousarray(qkv), xp.ascontiguousarray(positions)
    B, T, width = qkv.shape
    Dh, norms = width // (heads + 2 * kv_heads), q_weight is not None
    if norms:
        q_weight, k_weight = xp.ascontiguousarray(q_weight), xp.ascontiguousarray(k_weight)
    q = xp.empty((B, heads, T, Dh), qkv.dtype)
    k, v = xp.empty((B, kv_heads, T, Dh), qkv.dtype), xp.empty((B, kv_heads, T, Dh), qkv.dtype)
    rstd = xp.empty((B * T, heads + kv_heads), "float32") if norms else None
    shape = head_shape(heads, kv_heads, Dh, B * T, qkv, q, k, v)
    grid = -(-B * T // shape.tokens)
    arrays = (qkv, q_weight, k_weight, frequencies_for(xp, Dh, theta), positions, q, k, v, rstd)
    if suits_cpp(shape, qkv, q_weight):
        kernel = cpp_kernel("qk_norm_rope_forward", shape, norms)
        _launch(kernel, grid, shape, arrays, B * T, T, np.float32(eps))
    else:
        kernel = forward_kernel(qkv.dtype, q_weight.dtype if norms else qkv.dtype, shape, norms)
        kernel(grid, *arrays, B * T, T, eps)
    return (q, k, v), (qkv, q_weight, k_weight, positions, rstd)


def backward(xp, dys, saved, *, heads, kv_heads, eps, theta, into):
    qkv, q_weight, k_weight, positions, rstd = saved
    B, T, width = qkv.shape
    Dh, norms = width // (heads + 2 * kv_heads), q_weight is not None
    dys, dqkv = tuple(xp.ascontiguousarray(d) for d in dys), xp.empty(qkv.shape, qkv.dtype)
    shape = head_shape(heads, kv_heads, Dh, B * T, qkv, *dys, dqkv)
    blocks = min(-(-B * T // shape.tokens), PARTS)
    partial = xp.empty((blocks, 2 * Dh), "float32") if norms else None
    inputs = (qkv, q_weight, k_weight, frequencies_for(xp, Dh, theta), positions, rstd)
    arrays = (*inputs, *dys, dqkv, partial)
    if suits_cpp(shape, qkv, q_weight):
        kernel = cpp_kernel("qk_norm_rope_backward", shape, norms)
        _launch(kernel, blocks, shape, arrays, B * T, T)
    else:
        kernel = backward_kernel(qkv.dtype, q_weight.dtype if norms else qkv.dtype, shape, norms)
        kernel(blocks, *arrays, B * T, T, blocks)
    if not norms:
        return dqkv, None, None, None
    dq_weight = weight_gradient(xp, partial, q_weight, into[0])
    dk_weight = weight_gradient(xp, partial, k_weight, into[1], first=Dh)
    return dqkv, dq_weight, dk_weight, None


def suits_cpp(shape: HeadShape, qkv, gain) -> bool:
    """Whether the kernel in CUDA C++ takes these heads; it has no form for the simulator."""
    fits = qkv.dtype == bfloat16 and shape.aligned and shape.width == width_of(bfloat16)
    fits = fits and (gain is None or gain.dtype == np.float32) and shape.block % WARP == 0
    return fits and qkv.nbytes // VECTOR_BYTES < 2**31 and not SIMULATED


@functools.cache
def cpp_kernel(entry: str, shape: HeadShape, norms: bool):
    """The kernel of `qk_norm_rope.cu` for heads of this shape."""
    sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HALF": shape.half}
    sizes |= {"ABREAST": shape.abreast, "TILE": shape.tokens, "NORMS": int(norms)}
    return nvrtc.function(
        "qk_norm_rope.cu", entry, tuple(f"{name}={size}" for name, size in sizes.items())
    )


def _launch(kernel, grid: int, shape: HeadShape, arrays: tuple, tokens: int, T: int, *more) -> None:
    if tokens == 0:
        return
    null = np.uintp(0)  # of an array that there is none of
    given = tuple(null if array is None else array for array in arrays)
    kernel((grid,), (shape.block,), (*given, np.int32(tokens), np.int32(T), *more))


def frequencies_for(xp, head_dim, theta):
    """The frequencies on the current device."""
    number = 0 if xp is np else xp.cuda.runtime.getDevice()
    return frequencies(number, head_dim, theta, xp)


qk_norm_rope.fuse("cuda", forward, backward, accumulates=(1, 2))
