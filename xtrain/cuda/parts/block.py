"""Block mechanics: thread numbers and reductions, on a GPU and in the simulator.

A row of data belongs to `threads` consecutive threads of a block, a power of two from 1 to 1024. On
a GPU they exchange through warp shuffles and, beyond a warp, one value a warp through shared
memory; the simulator has no shuffles, so there every thread's value goes through shared memory.
Either way each thread gets the same bits, in an order fixed by the thread numbers.
"""

import functools
import threading
from collections.abc import Callable

from numba import cuda

from xtrain.cuda.compile.launch import SIMULATED, device_function

WARP = 32
EVERY_LANE = 0xFFFFFFFF


@device_function
def larger(a, b):
    """The larger of two numbers; NaN wins, so that it is seen."""
    return a if a > b or a != a else b


@device_function
def plus(a, b):
    return a + b


@functools.cache
def row_sum(threads: int) -> Callable:
    """Device function (value, scratch) -> sum of the row's values, for every thread of the block.

    scratch: shared array with one element a thread of the block, free to use again afterwards.
    """
    return _row_reduction(threads, plus)


@functools.cache
def row_max(threads: int) -> Callable:
    """Device function (value, scratch) -> largest of the row's values; see `row_sum`."""
    return _row_reduction(threads, larger)


def _row_reduction(threads: int, combine: Callable) -> Callable:
    if threads & (threads - 1) or not 1 <= threads <= 1024:
        raise ValueError(f"a row takes a power of two of at most 1024 threads, got {threads}")
    if SIMULATED:
        return _simulated_reduction(threads, combine)
    first = min(threads, WARP) // 2
    warps = threads // WARP

    @device_function
    def within_warp(value):
        distance = first
        while distance > 0:
            value = combine(value, cuda.shfl_xor_sync(EVERY_LANE, value, distance))
            distance >>= 1
        return value

    @device_function
    def across_warps(value, scratch):
        value = within_warp(value)
        warp = cuda.threadIdx.x // WARP
        if cuda.threadIdx.x % WARP == 0:
            scratch[warp] = value
        cuda.syncthreads()
        base = warp // warps * warps
        total = scratch[base]
        for i in range(1, warps):
            total = combine(total, scratch[base + i])
        cuda.syncthreads()
        return total

    @device_function
    def in_one_warp(value, scratch):
        return within_warp(value)

    return across_warps if threads > WARP else in_one_warp


def _simulated_reduction(threads: int, combine: Callable) -> Callable:
    def reduce(value, scratch):
        thread = thread_index()
        scratch[thread] = value
        synchronize()
        base = thread // threads * threads
        total = scratch[base]
        for i in range(1, threads):
            total = combine(total, scratch[base + i])
        synchronize()
        return total

    return reduce


@functools.cache
def row_sums(threads: int, block: int, count: int) -> Callable:
    """Device function (values, scratch, side): each of `count` values becomes its sum over the row.

    Here a row belongs to any whole number of warps. One barrier serves all values, and none where a
    row is one warp. scratch: shared array of `row_sums_scratch` elements; side: 0 and 1 in turn, so
    that a slow warp may still read what the last call left there.
    """
    step = 1 if SIMULATED else WARP  # the simulator sums over threads, as it has no shuffles
    parts, all_parts = threads // step, block // step

    @device_function
    def within_warp(value):
        distance = WARP // 2
        while distance > 0:
            value += cuda.shfl_xor_sync(EVERY_LANE, value, distance)
            distance >>= 1
        return value

    @device_function
    def reduce(values, scratch, side):
        thread = thread_index()
        part = thread // step
        base = side * count * all_parts
        for i in range(count):
            if not SIMULATED:
                values[i] = within_warp(values[i])
            if parts > 1 and thread % step == 0:
                scratch[base + i * all_parts + part] = values[i]
        if parts > 1:
            synchronize()
            first = part // parts * parts
            for i in range(count):
                total = scratch[base + i * all_parts + first]
                for other in range(1, parts):
                    total += scratch[base + i * all_parts + first + other]
                values[i] = total

    return reduce


def row_sums_scratch(block: int, count: int) -> int:
    """Elements of shared memory that `row_sums` needs."""
    return 2 * count * (block if SIMULATED else block // WARP)


@device_function
def put(out, at, value):
    out[at] = value


@functools.cache
def column_sums(threads: int, lanes: int, count: int, width: int, emit: Callable = put) -> Callable:
    """Device function (values, scratch, out, start, columns): sums over the threads of each lane.

    A thread's lane is its number modulo `lanes`, a power of two. Its `count` values are pieces of
    `width` columns: piece p of lane l holds the columns from (p * lanes + l) * width on. For every
    column < columns, emit(out, start + column, sum over the block's threads) is called once.
    scratch: shared fp32 array of `column_scratch` elements.
    """
    warp_lanes = min(lanes, WARP)
    parts = _column_parts(threads, lanes)

    @device_function
    def across_lanes(value):
        distance = WARP // 2
        while distance >= warp_lanes:
            value += cuda.shfl_xor_sync(EVERY_LANE, value, distance)
            distance >>= 1
        return value

    @device_function
    def reduce(values, scratch, out, start, columns):
        thread = thread_index()
        for i in range(count):
            value = values[i]
            if not SIMULATED:
                value = across_lanes(value)
            if SIMULATED or thread % WARP < lanes:
                part = thread // lanes if SIMULATED or lanes >= WARP else thread // WARP
                scratch[(part * count + i) * lanes + thread % lanes] = value
        synchronize()
        for at in range(thread, count * lanes, threads):
            i, lane = at // lanes, at % lanes
            column = (i // width * lanes + lane) * width + i % width
            if column < columns:
                total = scratch[at]
                for part in range(1, parts):
                    total += scratch[part * count * lanes + at]
                emit(out, start + column, total)
        synchronize()

    return reduce


def column_scratch(threads: int, lanes: int, count: int) -> int:
    """Elements of shared memory that `column_sums` needs."""
    return _column_parts(threads, lanes) * count * lanes


def _column_parts(threads: int, lanes: int) -> int:
    return threads // (lanes if SIMULATED else max(lanes, WARP))


if SIMULATED:

    def thread_index() -> int:
        """Number of this thread in its block."""
        return threading.current_thread().threadIdx.x

    def synchronize() -> None:
        """Wait for all threads of the block."""
        threading.current_thread().syncthreads()

else:

    @device_function
    def thread_index():
        """Number of this thread in its block."""
        return cuda.threadIdx.x

    @device_function
    def synchronize():
        """Wait for all threads of the block."""
        cuda.syncthreads()
