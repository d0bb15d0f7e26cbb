"""`rms_norm` and `add_rms_norm`: a row is read once, held in registers, and written once.

Forward keeps 1 / sqrt(mean(x**2) + eps) of each row, fp32; one or a few warps take a row. Backward
goes down the rows with one vector of a row a thread, so that the gain and its gradient stay in
eight registers each, and takes two rows between barriers. It leaves the weight's gradient as one
partial row a block; `partials` adds those up. Loads and stores are 16 bytes, sums are fp32.
For bf16 rows backward is CUDA C++ and loads the next rows before the barrier of the present ones.

Bytes an element, storage of s bytes: forward 2 s, with residual 4 s; backward 3 s, with residual
4 s. bf16: 5 loads in flight a thread of a row of 1280 forward, 6 backward.
"""

import functools

import numpy as np
from numba import cuda
from numba.types import float32

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.compile.launch import SIMULATED, Kernel, f32, i64, pointer
from xtrain.cuda.parts.block import (
    WARP,
    column_scratch,
    column_sums,
    row_sum,
    row_sums,
    row_sums_scratch,
)
from xtrain.cuda.parts.formula import sqrt
from xtrain.cuda.parts.partials import PARTS, weight_gradient
from xtrain.cuda.parts.rows import Shape, columns_of, flat_rows, shape_of
from xtrain.cuda.parts.vectors import rounding, vector_access
from xtrain.engine.dtype import bfloat16
from xtrain.engine.ops.rms_norm import add_rms_norm, rms_norm

AT_ONCE = 2  # rows of a thread in backward; more would cost the registers of another block
RESIDENT = 3  # blocks of Numba's backward on a multiprocessor, so that all PARTS run at once
MOST_RESIDENT = 160  # threads a block that find enough registers then
MULTIPROCESSORS = 132  # of an H200; fixed, as the order of sums, and with it the bits, follow it


@functools.cache
def forward_kernel(dtype, weight_dtype, shape: Shape, with_residual: bool) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load, store = vector_access(dtype, aligned)[1:]
    load_weight = vector_access(weight_dtype, aligned, width).load
    total, rounded = row_sum(threads), rounding(dtype)
    values, block = shape.values, shape.block

    def rms_norm_forward(x, residual, weight, s, y, rstd, rows, columns, eps):
        scratch = cuda.shared.array(block, float32)
        row = cuda.blockIdx.x * rows_here + cuda.threadIdx.x // threads
        lane = cuda.threadIdx.x % threads
        v = cuda.local.array(values, float32)
        other = cuda.local.array(values, float32)
        exists = columns if row < rows else 0
        for w in range(vectors):
            at = (w * threads + lane) * width
            load(x, row * columns + at, exists - at, v, w * width)
        if with_residual:
            for w in range(vectors):
                at = (w * threads + lane) * width
                load(residual, row * columns + at, exists - at, other, w * width)
            for i in range(values):
                v[i] = rounded(v[i] + other[i])
            for w in range(vectors):
                at = (w * threads + lane) * width
                store(s, row * columns + at, exists - at, v, w * width)
        for w in range(vectors):
            at = (w * threads + lane) * width
            load_weight(weight, at, columns - at, other, w * width)
        square = float32(0)
        for i in range(values):
            square += v[i] * v[i]
        scale = float32(1) / sqrt(total(square, scratch) / float32(columns) + eps)
        for i in range(values):
            v[i] = v[i] * scale * other[i]
        for w in range(vectors):
            at = (w * threads + lane) * width
            store(y, row * columns + at, exists - at, v, w * width)
        if lane == 0 and row < rows:
            rstd[row] = scale

    array, weights = pointer(dtype), pointer(weight_dtype)
    signature = (array, array, weights, array, array, pointer("float32"), i64, i64, f32)
    return Kernel(rms_norm_forward, block, *signature)


@functools.cache
def backward_kernel(dtype, weight_dtype, shape: Shape, with_residual: bool) -> Kernel:
    threads, vectors, width, groups, aligned = shape
    load, store = vector_access(dtype, aligned)[1:]
    load_weight = vector_access(weight_dtype, aligned, width).load
    own, block, several = shape.values, shape.block, rows_at_once(shape)
    values, rows_here = several * own, groups * several
    total = row_sums(threads, block, several)
    leave = column_sums(block, threads, own, width)
    scratch_size = max(column_scratch(block, threads, own), row_sums_scratch(block, several))

    def rms_norm_backward(x, weight, rstd, dy, ds, dx, partial, rows, columns, blocks):
        scratch = cuda.shared.array(scratch_size, float32)
        group, lane = cuda.threadIdx.x // threads, cuda.threadIdx.x % threads
        x_hat = cuda.local.array(values, float32)
        gradient = cuda.local.array(values, float32)
        other = cuda.local.array(values, float32)
        gain = cuda.local.array(own, float32)
        dweight = cuda.local.array(own, float32)
        dot = cuda.local.array(several, float32)
        scale = cuda.local.array(several, float32)
        for w in range(vectors):
            at = (w * threads + lane) * width
            load_weight(weight, at, columns - at, gain, w * width)
        for i in range(own):
            dweight[i] = float32(0)
        side = 0
        for base in range(cuda.blockIdx.x * rows_here, rows, blocks * rows_here):
            first = base + group * several
            for r in range(several):
                exists = columns if first + r < rows else 0
                for w in range(vectors):
                    at = (w * threads + lane) * width
                    here, to = (first + r) * columns + at, r * own + w * width
                    load(x, here, exists - at, x_hat, to)
                    load(dy, here, exists - at, gradient, to)
                    if with_residual:
                        load(ds, here, exists - at, other, to)
                scale[r] = rstd[first + r] if first + r < rows else float32(0)
            for r in range(several):
                dot[r] = float32(0)
                for i in range(own):
                    j = r * own + i
                    x_hat[j] *= scale[r]
                    dweight[i] += gradient[j] * x_hat[j]
                    gradient[j] *= gain[i]
                    dot[r] += gradient[j] * x_hat[j]
            total(dot, scratch, side)
            side = 1 - side
            for r in range(several):
                mean = dot[r] / float32(columns)
                for i in range(own):
                    j = r * own + i
                    gradient[j] = scale[r] * (gradient[j] - x_hat[j] * mean)
                    if with_residual:
                        gradient[j] += other[j]
                exists = columns if first + r < rows else 0
                for w in range(vectors):
                    at = (w * threads + lane) * width
                    here, to = (first + r) * columns + at, r * own + w * width
                    store(dx, here, exists - at, gradient, to)
        cuda.syncthreads()
        leave(dweight, scratch, partial, cuda.blockIdx.x * columns, columns)

    array, weights, fp32 = pointer(dtype), pointer(weight_dtype), pointer("float32")
    signature = (array, weights, fp32, array, array, array, fp32, i64, i64, i64)
    resident = RESIDENT if block <= MOST_RESIDENT else 0
    return Kernel(rms_norm_backward, block, *signature, resident=resident)


def rows_at_once(shape: Shape) -> int:
    """Rows that a thread of backward takes between barriers."""
    return AT_ONCE if shape.vectors == 1 else 1


def launch_forward(xp, x, residual, weight, eps):
    x, weight = xp.ascontiguousarray(x), xp.ascontiguousarray(weight)
    y, s, rows = xp.empty(x.shape, x.dtype), None, flat_rows(x)
    if residual is not None:
        residual, s = xp.ascontiguousarray(residual), xp.empty(x.shape, x.dtype)
    rstd = xp.empty(rows, "float32")
    shape = shape_of(x.shape[-1], x, weight, residual, y, s)
    kernel = forward_kernel(x.dtype, weight.dtype, shape, residual is not None)
    grid = shape.grid(rows)
    kernel(grid, x, residual, weight, s, y, rstd, rows, x.shape[-1], eps)
    return y, s, (x if s is None else s, weight, rstd)


def launch_backward(xp, dy, ds, saved, into):
    x, weight, rstd = saved
    dy = xp.ascontiguousarray(dy)
    ds = None if ds is None else xp.ascontiguousarray(ds)
    dx, rows, columns = xp.empty(x.shape, x.dtype), flat_rows(x), x.shape[-1]
    shape = columns_of(columns, x, weight, dy, ds, dx)
    if suits_cpp(shape, x, weight):
        partial = _launch_cpp(xp, shape, (x, weight, rstd, dy, ds, dx), rows)
    else:
        blocks = min(-(-rows // (shape.rows * rows_at_once(shape))), PARTS)
        partial = xp.empty((blocks, columns), "float32")
        kernel = backward_kernel(x.dtype, weight.dtype, shape, ds is not None)
        kernel(blocks, x, weight, rstd, dy, ds, dx, partial, rows, columns, blocks)
    return dx, weight_gradient(xp, partial, weight, into)


def suits_cpp(shape: Shape, x, weight) -> bool:
    """Whether the kernel in CUDA C++ takes these rows; it has no form for the simulator."""
    fits = x.dtype == bfloat16 and weight.dtype == np.float32 and x.size > 0
    return fits and shape.aligned and shape.vectors == 1 and not SIMULATED


def _launch_cpp(xp, shape: Shape, arrays: tuple, rows: int):
    """Run the kernel of `rms_norm.cu`; returns the partial rows."""
    columns, ds = arrays[0].shape[-1], arrays[4]
    # Blocks that a multiprocessor holds: as many as keep about 400 threads there.
    resident = 2 if shape.threads > 160 else 3 if shape.threads > 96 else 4
    vectors = columns // shape.vector
    sizes = (f"WORDS={vectors}", f"RESIDUAL={int(ds is not None)}", f"RESIDENT={resident}")
    kernel = nvrtc.function("rms_norm.cu", "rms_norm_backward", sizes)
    blocks = min(-(-rows // AT_ONCE), resident * MULTIPROCESSORS)
    partial = xp.empty((blocks, columns), "float32")
    given = tuple(np.uintp(0) if array is None else array for array in arrays)
    kernel((blocks,), (-(-vectors // WARP) * WARP,), (*given, partial, np.int32(rows)))
    return partial


def forward(xp, x, weight, *, eps):
    y, _, saved = launch_forward(xp, x, None, weight, eps)
    return y, saved


def backward(xp, dy, saved, *, eps, into):
    return launch_backward(xp, dy, None, saved, into[0])


def add_forward(xp, x, residual, weight, *, eps):
    y, s, saved = launch_forward(xp, x, residual, weight, eps)
    return (y, s), saved


def add_backward(xp, dys, saved, *, eps, into):
    dx, dweight = launch_backward(xp, *dys, saved, into[0])
    return dx, dx, dweight


rms_norm.fuse("cuda", forward, backward, accumulates=(1,))
add_rms_norm.fuse("cuda", add_forward, add_backward, accumulates=(2,))
