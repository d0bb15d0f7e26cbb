"""How rows of an array are laid over threads: geometry shared by all row-wise kernels.

A row of `width` elements belongs to `threads` threads that hold `words` words each: word w of
thread t is number w * threads + t of the row, so that neighbours read neighbouring addresses. A
block holds `rows` rows. Everything but the width is a constant of the compiled kernel, so that
loops unroll and values live in registers.
"""

from typing import NamedTuple

from numba.types import int64

from xtrain.cuda.block import WARP
from xtrain.cuda.launch import device_function
from xtrain.cuda.words import are_aligned, width_of

BLOCK = 128  # threads of a block of one-warp rows
MOST_THREADS = 512
REGISTERS = 40  # fp32 values of one row that a thread holds; twice that with a gradient still fits


class Shape(NamedTuple):
    """Threads a row, words a thread, rows a block, and whether access is by whole words."""

    threads: int
    words: int
    rows: int
    aligned: bool

    @property
    def block(self) -> int:
        return self.threads * self.rows

    def grid(self, rows: int) -> int:
        """Blocks that cover that many rows."""
        return -(-rows // self.rows)


def shape_of(width: int, *arrays) -> Shape:
    """The geometry for rows of `width` elements in every one of the arrays.

    The words of the first array are counted; arrays of other dtypes are read as many elements at a
    time as that one.
    """
    words = -(-width // width_of(arrays[0].dtype))
    most = REGISTERS // width_of(arrays[0].dtype)
    threads = WARP
    while threads < MOST_THREADS and threads * most < words:
        threads *= 2
    rows = max(BLOCK // threads, 1)
    return Shape(threads, -(-words // threads), rows, are_aligned(width, *arrays))


def row_place(shape: Shape, width: int):
    """Device function (block, thread, w) -> (row of the block's, first element of word w)."""
    threads, rows = shape.threads, shape.rows

    @device_function
    def place(block, thread, w):
        row = int64(block) * rows + thread // threads
        return row, (w * threads + thread % threads) * width

    return place
