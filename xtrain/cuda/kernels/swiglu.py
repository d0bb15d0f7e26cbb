"""`swiglu`: gate and up are two halves of a row; one pass forward, one back, 16-byte access.

Bytes an element of y, storage of s bytes: forward 3 s, backward 5 s. Arithmetic is fp32.
"""

import functools

from numba import cuda
from numba.types import float32

from xtrain.cuda.compile.launch import Kernel, i64, pointer
from xtrain.cuda.parts.formula import sigmoid
from xtrain.cuda.parts.rows import Shape, flat_rows, spread_of
from xtrain.cuda.parts.vectors import vector_access
from xtrain.engine.ops.swiglu import swiglu


@functools.cache
def forward_kernel(dtype, shape: Shape) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load, store = vector_access(dtype, aligned)[1:]
    values = shape.values

    def swiglu_forward(gate_up, y, rows, columns):
        row = cuda.blockIdx.x * rows_here + cuda.threadIdx.x // threads
        lane = cuda.threadIdx.x % threads
        gate = cuda.local.array(values, float32)
        up = cuda.local.array(values, float32)
        exists = columns if row < rows else 0
        for w in range(vectors):
            at = (w * threads + lane) * width
            load(gate_up, 2 * row * columns + at, exists - at, gate, w * width)
            load(gate_up, (2 * row + 1) * columns + at, exists - at, up, w * width)
        for i in range(values):
            gate[i] = gate[i] * sigmoid(gate[i]) * up[i]
        for w in range(vectors):
            at = (w * threads + lane) * width
            store(y, row * columns + at, exists - at, gate, w * width)

    return Kernel(swiglu_forward, shape.block, pointer(dtype), pointer(dtype), i64, i64)


@functools.cache
def backward_kernel(dtype, shape: Shape) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load, store = vector_access(dtype, aligned)[1:]
    values = shape.values

    def swiglu_backward(gate_up, dy, dgate_up, rows, columns):
        row = cuda.blockIdx.x * rows_here + cuda.threadIdx.x // threads
        lane = cuda.threadIdx.x % threads
        gate = cuda.local.array(values, float32)
        up = cuda.local.array(values, float32)
        gradient = cuda.local.array(values, float32)
        exists = columns if row < rows else 0
        for w in range(vectors):
            at = (w * threads + lane) * width
            load(gate_up, 2 * row * columns + at, exists - at, gate, w * width)
            load(gate_up, (2 * row + 1) * columns + at, exists - at, up, w * width)
            load(dy, row * columns + at, exists - at, gradient, w * width)
        for i in range(values):
            s = sigmoid(gate[i])
            scaled = gradient[i] * s
            gradient[i] = scaled * gate[i]
            gate[i] = scaled * up[i] * (float32(1) + gate[i] * (float32(1) - s))
        for w in range(vectors):
            at = (w * threads + lane) * width
            store(dgate_up, 2 * row * columns + at, exists - at, gate, w * width)
            store(dgate_up, (2 * row + 1) * columns + at, exists - at, gradient, w * width)

    return Kernel(swiglu_backward, shape.block, *[pointer(dtype)] * 3, i64, i64)


def forward(xp, gate_up):
    gate_up = xp.ascontiguousarray(gate_up)
    columns, rows = gate_up.shape[-1] // 2, flat_rows(gate_up)
    y = xp.empty((*gate_up.shape[:-1], columns), gate_up.dtype)
    shape = spread_of(columns, gate_up, y)
    forward_kernel(gate_up.dtype, shape)(shape.grid(rows), gate_up, y, rows, columns)
    return y, gate_up


def backward(xp, dy, saved):
    dy, dgate_up = xp.ascontiguousarray(dy), xp.empty(saved.shape, saved.dtype)
    columns, rows = saved.shape[-1] // 2, flat_rows(saved)
    shape = spread_of(columns, saved, dy, dgate_up)
    kernel = backward_kernel(saved.dtype, shape)
    kernel(shape.grid(rows), saved, dy, dgate_up, rows, columns)
    return (dgate_up,)


swiglu.fuse("cuda", forward, backward)
