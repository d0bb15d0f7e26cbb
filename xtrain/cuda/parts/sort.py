"""A stable order of small integers on the device: bitonic sort of (id, position) pairs.

Captured in a graph like any kernel: no host read, a fixed sequence of launches for a length. Pairs
are distinct, so there is one right order and the bits are the same each time. 32768 ids take ten
launches; chunks are sorted in shared memory, longer distances are exchanged in global memory.
Source: Batcher, "Sorting networks and their applications", AFIPS 1968.
"""

import functools

from numba import cuda
from numba.types import int64, uint64

from xtrain.cuda.compile.launch import Kernel, device_function, i64, pointer
from xtrain.cuda.parts.block import synchronize, thread_index

CHUNK = 4096  # pairs sorted in shared memory: 32 KB
THREADS = 512  # at most


@device_function
def exchange(pairs, i, j, ascending):
    a, b = pairs[i], pairs[j]
    if (a > b) == ascending:
        pairs[i] = b
        pairs[j] = a


@functools.cache
def chunk_kernel(chunk: int, threads: int, starts: bool) -> Kernel:
    """Sort each chunk (starts), or do the steps of a merge that stay within chunks."""
    half = chunk // 2

    @device_function
    def merge(shared, base, size, first_distance):
        distance = first_distance
        while distance > 0:
            for t in range(thread_index(), half, threads):
                i = 2 * t - (t & (distance - 1))
                exchange(shared, i, i + distance, ((base + i) & size) == 0)
            synchronize()
            distance >>= 1

    def sort_chunks(ids, pairs, count, size):
        shared = cuda.shared.array(chunk, uint64)
        base = cuda.blockIdx.x * chunk
        for i in range(cuda.threadIdx.x, chunk, threads):
            if starts:
                id = int64(ids[base + i]) if base + i < count else int64(0x7FFFFFFF)
                shared[i] = uint64((id << 32) | (base + i))
            else:
                shared[i] = pairs[base + i]
        cuda.syncthreads()
        if starts:
            stage = 2
            while stage <= chunk:
                merge(shared, base, stage, stage >> 1)
                stage <<= 1
        else:
            merge(shared, base, size, half)
        for i in range(cuda.threadIdx.x, chunk, threads):
            pairs[base + i] = shared[i]

    return Kernel(sort_chunks, threads, pointer("int32"), pointer("uint64"), i64, i64)


@functools.cache
def step_kernel(threads: int) -> Kernel:
    def sort_step(pairs, size, distance):
        t = cuda.blockIdx.x * threads + cuda.threadIdx.x
        i = 2 * t - (t & (distance - 1))
        exchange(pairs, i, i + distance, (i & size) == 0)

    return Kernel(sort_step, threads, pointer("uint64"), i64, i64)


def sorted_pairs(xp, ids, *, chunk: int = CHUNK):
    """Pairs id << 32 | position of ids (N,) int32 >= 0, ascending: uint64, at least N of them.

    What lies beyond N is padding. chunk: a power of two.
    """
    count = ids.size
    length = 1 << max(count - 1, 1).bit_length()
    chunk = min(chunk, length)
    threads = min(THREADS, chunk // 2)
    pairs = xp.empty(length, "uint64")
    chunks, blocks = length // chunk, length // 2 // threads
    chunk_kernel(chunk, threads, True)(chunks, ids, pairs, count, 0)
    size = 2 * chunk
    while size <= length:
        distance = size // 2
        while distance >= chunk:
            step_kernel(threads)(blocks, pairs, size, distance)
            distance //= 2
        chunk_kernel(chunk, threads, False)(chunks, None, pairs, count, size)
        size *= 2
    return pairs
