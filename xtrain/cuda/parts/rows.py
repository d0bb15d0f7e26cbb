"""How rows of an array are laid over threads: geometry shared by all row-wise kernels.

A row of `columns` elements belongs to `threads` threads that hold `vectors` vectors each: vector w
of thread t is number w * threads + t of the row, so that neighbours read neighbouring addresses. A
block holds `rows` rows. Everything but the columns is a constant of the compiled kernel, so that
loops unroll and values live in registers.
"""

import functools
from typing import NamedTuple

from xtrain.cuda.compile.launch import SIMULATED
from xtrain.cuda.parts.block import WARP
from xtrain.cuda.parts.vectors import are_aligned, width_of

# Threads of a block of one-warp rows; each costs a thread of the host in the simulator.
BLOCK = 64 if SIMULATED else 128
MOST_THREADS = 512
IN_REGISTERS = 40  # fp32 values of a row that a thread holds; three such rows fit without spilling
MOST_VECTORS = 3  # that a thread holds of an array in a kernel without a reduction


class Shape(NamedTuple):
    """Threads a row, vectors a thread, elements a vector, rows a block, whole vectors or not."""

    threads: int
    vectors: int
    vector: int
    rows: int
    aligned: bool

    @property
    def values(self) -> int:
        """Elements that a thread holds of a row."""
        return self.vectors * self.vector

    @property
    def block(self) -> int:
        return self.threads * self.rows

    def grid(self, rows: int) -> int:
        """Blocks that cover that many rows."""
        return -(-rows // self.rows)


def shape_of(columns: int, *arrays) -> Shape:
    """The geometry for rows of `columns` elements in every one of the arrays that is not None.

    The first array's dtype sets the vector; the others are read as many elements at a time.
    A thread holds IN_REGISTERS elements, unless the row needs more than 512 threads.
    """
    return _shape(columns, width_of(arrays[0].dtype), are_aligned(columns, *arrays))


@functools.cache  # asked at every launch
def _shape(columns: int, vector: int, aligned: bool) -> Shape:
    count = max(-(-columns // vector), 1)
    threads = WARP
    while threads < MOST_THREADS and threads * (IN_REGISTERS // vector) < count:
        threads *= 2
    return Shape(threads, -(-count // threads), vector, max(BLOCK // threads, 1), aligned)


def spread_of(columns: int, *arrays) -> Shape:
    """As `shape_of` for kernels without a reduction: any number of whole warps may share a row.

    Few vectors a thread and no idle ones: a row of 672 vectors takes 224 threads of 3.
    """
    return _spread(columns, width_of(arrays[0].dtype), are_aligned(columns, *arrays))


@functools.cache
def _spread(columns: int, vector: int, aligned: bool) -> Shape:
    count = max(-(-columns // vector), 1)
    least = -(-count // MOST_THREADS)
    choices = range(least, max(least, MOST_VECTORS) + 1)
    taken = {each: -(-count // (each * WARP)) * WARP for each in choices}
    # The fewest idle vectors; of equals two loads in flight before one, and one before three.
    vectors = min(choices, key=lambda each: (taken[each] * each, abs(each - 2), each))
    threads = taken[vectors]
    return Shape(threads, vectors, vector, max(BLOCK // threads, 1), aligned)


def columns_of(columns: int, *arrays) -> Shape:
    """As `shape_of` with as many threads as a row has vectors: a thread keeps its columns.

    For kernels that go down the rows and sum columns on the way. Any number of whole warps may
    share a row, and a thread holds several vectors only where a row has more than 512.
    """
    return _columns(columns, width_of(arrays[0].dtype), are_aligned(columns, *arrays))


@functools.cache
def _columns(columns: int, vector: int, aligned: bool) -> Shape:
    count = max(-(-columns // vector), 1)
    vectors = -(-count // MOST_THREADS)
    threads = -(-count // (vectors * WARP)) * WARP
    return Shape(threads, vectors, vector, max(BLOCK // threads, 1), aligned)


def flat_rows(x) -> int:
    """Number of rows of the last axis."""
    return x.size // x.shape[-1] if x.shape[-1] else 0
