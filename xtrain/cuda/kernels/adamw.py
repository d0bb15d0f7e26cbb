"""`adamw`: one pass over master weights, gradient and moments, and over the bf16 copy.

Bytes an element: 16 read, 16 written (the gradient is zeroed), 2 for the copy. Four loads of 16
bytes in flight a thread. Every operation rounds by itself, so the bits are the reference's.
"""

import functools

import numpy as np
from numba import cuda
from numba.types import float32

from xtrain.cuda.compile.launch import Kernel, f32, i64, pointer
from xtrain.cuda.parts.formula import divide, fp32, multiply, sqrt, subtract
from xtrain.cuda.parts.vectors import are_aligned, vector_access
from xtrain.engine import scalar
from xtrain.engine.dtype import bfloat16
from xtrain.engine.ops.adamw import adamw

THREADS = 256
moment1 = fp32(scalar.adamw_moment1)
moment2 = fp32(scalar.adamw_moment2)
weight = fp32(scalar.adamw_weight)


@functools.cache
def update_kernel(aligned: bool, copies: bool) -> Kernel:
    width, load, store = vector_access("float32", aligned)
    store_copy = vector_access(bfloat16, aligned, width).store

    def adamw_update(
        p, g, m, v, hyper, copy, size, copy_size, decayed,
        one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
    ):  # fmt: skip
        p4 = cuda.local.array(width, float32)
        g4 = cuda.local.array(width, float32)
        m4 = cuda.local.array(width, float32)
        v4 = cuda.local.array(width, float32)
        at = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * width
        left = size - at
        load(p, at, left, p4, 0)
        if hyper[4] != float32(0):
            load(g, at, left, g4, 0)
            load(m, at, left, m4, 0)
            load(v, at, left, v4, 0)
            lr, bias1, sqrt_bias2, clip = hyper[0], hyper[1], hyper[2], hyper[3]
            step_size = divide(lr, bias1)
            shrink = subtract(float32(1), multiply(lr, weight_decay))
            for i in range(width):
                clipped = multiply(g4[i], clip)
                m4[i] = moment1(m4[i], clipped, one_minus_beta1)
                v4[i] = moment2(v4[i], clipped, beta2, one_minus_beta2)
                keeps = shrink if at + i < decayed else float32(1)
                p4[i] = weight(p4[i], m4[i], sqrt(v4[i]), keeps, step_size, sqrt_bias2, eps)
            store(p, at, left, p4, 0)
            store(m, at, left, m4, 0)
            store(v, at, left, v4, 0)
        if copies:
            store_copy(copy, at, copy_size - at, p4, 0)
        for i in range(width):
            g4[i] = float32(0)
        store(g, at, left, g4, 0)

    array = pointer("float32")
    signature = (*[array] * 5, pointer(bfloat16), *[i64] * 3, *[f32] * 5)
    return Kernel(adamw_update, THREADS, *signature)


def forward(xp, p, g, m, v, hyper, copy, *, decayed, beta1, beta2, eps, weight_decay):
    aligned = are_aligned(p.size, p, g, m, v) and (copy is None or are_aligned(copy.size, copy))
    copy_size = 0 if copy is None else copy.size
    constants = map(np.float32, (1 - beta1, beta2, 1 - beta2, eps, weight_decay))
    kernel = update_kernel(aligned, copy is not None)
    grid = -(-p.size // (THREADS * vector_access("float32", aligned).width))
    kernel(grid, p, g, m, v, hyper, copy, p.size, copy_size, decayed, *constants)
    return p, None


adamw.fuse("cuda", forward)
