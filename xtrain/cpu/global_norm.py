"""L2 norm of a flat gradient on the CPU. See `xtrain.engine.ops.global_norm`.

Squares are summed in float64 in blocks of fixed size, and the blocks in order, so the bits do not
depend on the number of threads.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.engine.ops.global_norm import global_norm

BLOCK = 65536


def forward(xp, gradient):
    """The norm, () float64."""
    return np.asarray(np.sqrt(_sum_of_squares(gradient.reshape(-1)))), None


# `reassoc` lets the sum of a block use vector lanes; NaN and infinity still propagate.
@njit(parallel=PRANGE_ONLY, fastmath={"reassoc", "contract"}, cache=True)
def _sum_of_squares(gradient):
    blocks = (gradient.size + BLOCK - 1) // BLOCK
    partial = np.empty(blocks, np.float64)
    for block in prange(blocks):
        start = np.int64(block) * BLOCK
        part = gradient[start : start + BLOCK]  # of an index that might be negative LLVM makes no
        summed = 0.0  # vector loop: a slice is six times as fast
        for i in range(part.size):
            wide = np.float64(part[i])
            summed += wide * wide
        partial[block] = summed
    total = 0.0
    for block in range(blocks):
        total += partial[block]
    return total


global_norm.fuse("cpu", forward)
