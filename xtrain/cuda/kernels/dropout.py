"""`dropout`: the mask is drawn again in both directions, from the bits of `engine.rng`.

One draw of four random numbers serves four elements. Bytes an element, storage of s bytes: 2 s.
"""

import functools

from numba import cuda
from numba.types import float32, uint32, uint64

from xtrain.cuda.compile.launch import Kernel, device_function, f32, i64, pointer, u32
from xtrain.cuda.parts.vectors import are_aligned, vector_access
from xtrain.engine.ops.dropout import dropout

THREADS = 256
VECTORS = 2  # loads in flight a thread
LOW = uint64(0xFFFFFFFF)
M0, M1 = uint64(0xD2511F53), uint64(0xCD9E8D57)
W0, W1 = uint64(0x9E3779B9), uint64(0xBB67AE85)
HALF = uint64(32)


@device_function
def philox(block, site, step, micro, key0, key1):
    """Ten rounds of Philox4x32 as `xtrain.engine.rng.philox`: four uint32, held in uint64."""
    c0, c1, c2, c3 = uint64(block), uint64(site), uint64(step), uint64(micro)
    k0, k1 = uint64(key0), uint64(key1)
    for _ in range(10):
        p0 = c0 * M0
        p1 = c2 * M1
        c0 = (p1 >> HALF) ^ c1 ^ k0
        c2 = (p0 >> HALF) ^ c3 ^ k1
        c1 = p1 & LOW
        c3 = p0 & LOW
        k0 = (k0 + W0) & LOW
        k1 = (k1 + W1) & LOW
    return uint32(c0), uint32(c1), uint32(c2), uint32(c3)


@functools.cache
def dropout_kernel(dtype, aligned: bool) -> Kernel:
    width, load, store = vector_access(dtype, aligned)
    values = VECTORS * width

    def dropout_mask(x, y, key, site, threshold, scale, size):
        v = cuda.local.array(values, float32)
        first = cuda.blockIdx.x * THREADS * VECTORS + cuda.threadIdx.x
        for w in range(VECTORS):
            at = (first + w * THREADS) * width
            load(x, at, size - at, v, w * width)
        for w in range(VECTORS):
            at = (first + w * THREADS) * width
            for i in range(0, width, 4):
                block = (at + i) >> 2
                a, b, c, d = philox(block, site, key[2], key[3], key[0], key[1])
                j = w * width + i
                v[j] = v[j] * scale if a >= threshold else float32(0)
                v[j + 1] = v[j + 1] * scale if b >= threshold else float32(0)
                v[j + 2] = v[j + 2] * scale if c >= threshold else float32(0)
                v[j + 3] = v[j + 3] * scale if d >= threshold else float32(0)
        for w in range(VECTORS):
            at = (first + w * THREADS) * width
            store(y, at, size - at, v, w * width)

    signature = (pointer(dtype), pointer(dtype), pointer("uint32"), u32, u32, f32, i64)
    return Kernel(dropout_mask, THREADS, *signature)


def masked(xp, x, key, p, site):
    """x where kept, over 1 - p; 0 where dropped."""
    x = xp.ascontiguousarray(x)
    y = xp.empty(x.shape, x.dtype)
    aligned = are_aligned(x.size, x, y)
    kernel = dropout_kernel(x.dtype, aligned)
    per_block = THREADS * VECTORS * vector_access(x.dtype, aligned).width
    grid = -(-x.size // per_block)
    threshold = round(p * 2**32)
    kernel(grid, x, y, key, site, threshold, 1 / (1 - p), x.size)
    return y


def forward(xp, x, key, *, p, site):
    key = xp.ascontiguousarray(key)
    return masked(xp, x, key, p, site), key


def backward(xp, dy, saved, *, p, site):
    return masked(xp, dy, saved, p, site), None


dropout.fuse("cuda", forward, backward)
