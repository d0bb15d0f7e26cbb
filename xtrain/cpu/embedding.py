"""Row lookup on the CPU, and its gradient added in place. See `xtrain.engine.ops.embedding`.

Threads share the columns, not the rows, so every row is summed in the order of the ids: no atomics,
and the same bits for any number of threads.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.engine.ops.embedding import embedding

COLUMNS = 64  # a thread's share
SERIAL = 65536  # elements below which starting threads costs more than they save


def forward(xp, weight, ids):
    """weight[ids]."""
    return weight[ids], (ids, weight.shape, weight.dtype)


def backward(xp, dy, saved, *, into):
    """Add dy's rows to the gradient buffer, or to zeros."""
    ids, shape, dtype = saved
    dweight = np.zeros(shape, dtype) if into[0] is None else into[0]
    rows = np.ascontiguousarray(dy).reshape(-1, shape[1])
    add = _add_rows if rows.size <= SERIAL else _add_rows_parallel
    add(dweight, np.ascontiguousarray(ids).reshape(-1), rows)
    return (dweight if into[0] is None else None), None


@njit(cache=True)
def _add_rows(dweight, ids, rows):
    for n in range(ids.size):
        for d in range(rows.shape[1]):
            dweight[ids[n], d] += rows[n, d]


@njit(parallel=PRANGE_ONLY, cache=True)
def _add_rows_parallel(dweight, ids, rows):
    width = rows.shape[1]
    for block in prange((width + COLUMNS - 1) // COLUMNS):
        start = np.int64(block) * COLUMNS
        for n in range(ids.size):
            for d in range(start, min(start + COLUMNS, width)):
                dweight[ids[n], d] += rows[n, d]


embedding.fuse("cpu", forward, backward, accumulates=(0,))
