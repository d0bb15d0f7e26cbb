"""How rows of an array are laid over threads: geometry shared by all row-wise kernels.

A row of `width` elements belongs to `threads` threads that hold `words` words each: word w of
thread t is number w * threads + t of the row, so that neighbours read neighbouring addresses. A
block holds `rows` rows. Everything but the width is a constant of the compiled kernel, so that
loops unroll and values live in registers.
"""

import functools
from typing import NamedTuple

from xtrain.cuda.compile.launch import SIMULATED
from xtrain.cuda.parts.block import WARP
from xtrain.cuda.parts.words import are_aligned, width_of

# Threads of a block of one-warp rows; each costs a thread of the host in the simulator.
BLOCK = 64 if SIMULATED else 128
MOST_THREADS = 512
IN_REGISTERS = 40  # fp32 values of a row that a thread holds; three such rows fit without spilling
MOST_WORDS = 3  # that a thread holds of an array in a kernel without a reduction


class Shape(NamedTuple):
    """Threads a row, words a thread, elements a word, rows a block, and whole words or not."""

    threads: int
    words: int
    width: int
    rows: int
    aligned: bool

    @property
    def values(self) -> int:
        """Elements that a thread holds of a row."""
        return self.words * self.width

    @property
    def block(self) -> int:
        return self.threads * self.rows

    def grid(self, rows: int) -> int:
        """Blocks that cover that many rows."""
        return -(-rows // self.rows)


def shape_of(width: int, *arrays) -> Shape:
    """The geometry for rows of `width` elements in every one of the arrays that is not None.

    The first array's dtype sets the word; the others are read as many elements at a time as that.
    A thread holds IN_REGISTERS elements, unless the row needs more than 512 threads.
    """
    return _shape(width, width_of(arrays[0].dtype), are_aligned(width, *arrays))


@functools.cache  # asked at every launch
def _shape(width: int, word: int, aligned: bool) -> Shape:
    count = max(-(-width // word), 1)
    threads = WARP
    while threads < MOST_THREADS and threads * (IN_REGISTERS // word) < count:
        threads *= 2
    return Shape(threads, -(-count // threads), word, max(BLOCK // threads, 1), aligned)


def spread_of(width: int, *arrays) -> Shape:
    """As `shape_of` for kernels without a reduction: any number of whole warps may share a row.

    Few words a thread and no idle ones: a row of 672 words takes 224 threads of 3.
    """
    return _spread(width, width_of(arrays[0].dtype), are_aligned(width, *arrays))


@functools.cache
def _spread(width: int, word: int, aligned: bool) -> Shape:
    count = max(-(-width // word), 1)
    least = -(-count // MOST_THREADS)
    choices = range(least, max(least, MOST_WORDS) + 1)
    taken = {words: -(-count // (words * WARP)) * WARP for words in choices}
    # The fewest idle words; of equals two loads in flight before one, and one before three.
    words = min(choices, key=lambda words: (taken[words] * words, abs(words - 2), words))
    threads = taken[words]
    return Shape(threads, words, word, max(BLOCK // threads, 1), aligned)


def columns_of(width: int, *arrays) -> Shape:
    """As `shape_of` with as many threads as a row has words: a thread keeps its columns.

    For kernels that go down the rows and sum columns on the way. Any number of whole warps may
    share a row, and a thread holds several words only where a row has more than 512.
    """
    return _columns(width, width_of(arrays[0].dtype), are_aligned(width, *arrays))


@functools.cache
def _columns(width: int, word: int, aligned: bool) -> Shape:
    count = max(-(-width // word), 1)
    words = -(-count // MOST_THREADS)
    threads = -(-count // (words * WARP)) * WARP
    return Shape(threads, words, word, max(BLOCK // threads, 1), aligned)


def flat_rows(x) -> int:
    """Number of rows of the last axis."""
    return x.size // x.shape[-1] if x.shape[-1] else 0
