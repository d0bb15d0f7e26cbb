"""`embedding`: rows gathered forward; backward sums the rows of each id in the order of the tokens.

Backward sorts (id, position) pairs on the device. The first pair of an id gets a block, whose warps
take the id's tokens in turn; their sums are added in a fixed order, without atomics.
Bytes an element, storage of s bytes: forward 2 s, backward s a token and 8 an id (fp32 buffer).
"""

import functools

from numba import cuda
from numba.types import float32, int64, uint64

from xtrain.cuda.compile.launch import SIMULATED, Kernel, device_function, i64, pointer
from xtrain.cuda.parts.block import column_scratch, column_sums
from xtrain.cuda.parts.rows import Shape, shape_of
from xtrain.cuda.parts.sort import sorted_pairs
from xtrain.cuda.parts.vectors import scalar_access, vector_access
from xtrain.engine.ops.embedding import embedding

BLOCK = 64 if SIMULATED else 256  # threads that share an id's tokens
POSITION = 0xFFFFFFFF


@functools.cache
def forward_kernel(dtype, shape: Shape) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load, store = vector_access(dtype, aligned)[1:]
    values = shape.values

    def embedding_forward(weight, ids, y, rows, columns):
        row = cuda.blockIdx.x * rows_here + cuda.threadIdx.x // threads
        lane = cuda.threadIdx.x % threads
        v = cuda.local.array(values, float32)
        exists = columns if row < rows else 0
        id = int64(ids[row]) if row < rows else int64(0)
        for w in range(vectors):
            at = (w * threads + lane) * width
            load(weight, id * columns + at, exists - at, v, w * width)
        for w in range(vectors):
            at = (w * threads + lane) * width
            store(y, row * columns + at, exists - at, v, w * width)

    signature = (pointer(dtype), pointer("int32"), pointer(dtype), i64, i64)
    return Kernel(embedding_forward, shape.block, *signature)


@functools.cache
def backward_kernel(dtype, out_dtype, shape: Shape) -> Kernel:
    threads, vectors, width, rows_here, aligned = shape
    load = vector_access(dtype, aligned).load
    load_one, store_one = scalar_access(out_dtype)
    values, block = shape.values, shape.block

    @device_function
    def add_to(out, at, value):
        store_one(out, at, load_one(out, at) + value)

    leave = column_sums(block, threads, values, width, add_to)
    scratch_size = column_scratch(block, threads, values)

    def embedding_backward(pairs, dy, dweight, count, columns):
        scratch = cuda.shared.array(scratch_size, float32)
        total = cuda.local.array(values, float32)
        v = cuda.local.array(values, float32)
        first = cuda.blockIdx.x
        id = int64(pairs[first] >> uint64(32))
        if first > 0 and int64(pairs[first - 1] >> uint64(32)) == id:
            return
        lane = cuda.threadIdx.x % threads
        for i in range(values):
            total[i] = float32(0)
        at_pair = first + cuda.threadIdx.x // threads
        pair = int64(pairs[at_pair]) if at_pair < count else int64(-1)
        while pair >> 32 == id:
            row = pair & POSITION
            at_pair += rows_here
            pair = int64(pairs[at_pair]) if at_pair < count else int64(-1)
            for w in range(vectors):
                at = (w * threads + lane) * width
                load(dy, row * columns + at, columns - at, v, w * width)
            for i in range(values):
                total[i] += v[i]
        leave(total, scratch, dweight, id * columns, columns)

    signature = (pointer("uint64"), pointer(dtype), pointer(out_dtype), i64, i64)
    return Kernel(embedding_backward, block, *signature)


def forward(xp, weight, ids):
    weight, flat = xp.ascontiguousarray(weight), xp.ascontiguousarray(ids).reshape(-1)
    y = xp.empty((*ids.shape, weight.shape[1]), weight.dtype)
    shape = shape_of(weight.shape[1], weight, y)
    kernel = forward_kernel(weight.dtype, shape)
    kernel(shape.grid(flat.size), weight, flat, y, flat.size, weight.shape[1])
    return y, (flat, weight.shape, weight.dtype)


def backward(xp, dy, saved, *, into):
    ids, weight_shape, dtype = saved
    dy = xp.ascontiguousarray(dy)
    dweight = xp.zeros(weight_shape, dtype) if into[0] is None else into[0]
    columns = weight_shape[1]
    shape = shape_of(columns, dy)
    shape = shape._replace(rows=max(BLOCK // shape.threads, 1))
    pairs = sorted_pairs(xp, ids)
    kernel = backward_kernel(dy.dtype, dweight.dtype, shape)
    kernel(ids.size, pairs, dy, dweight, ids.size, columns)
    return (dweight if into[0] is None else None), None


embedding.fuse("cuda", forward, backward, accumulates=(0,))
