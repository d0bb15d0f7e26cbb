"""RMSNorm on the CPU, alone and fused with the residual sum. See `xtrain.engine.ops.rms_norm`.

fp32. Rows are taken in blocks of fixed size and the blocks' parts of dweight are summed in order, so
the bits do not depend on the number of threads.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY, SERIAL
from xtrain.engine.ops.rms_norm import add_rms_norm, rms_norm

BLOCK = 64  # rows a thread takes at a time
_ROW_SUMS = {"reassoc", "contract"}  # sums along a row may use vector lanes; NaN is kept


def forward(xp, x, weight, *, eps):
    """y, and what backward needs."""
    x = np.ascontiguousarray(x)
    y, rstd = np.empty_like(x), np.empty(x.shape[:-1], np.float32)
    rows = x.reshape(-1, x.shape[-1])
    _forward(rows, rows[:0], weight, np.float32(eps), rows[:0], y.reshape(rows.shape), rstd.reshape(-1))
    return y, (x, weight, rstd)


def add_forward(xp, x, residual, weight, *, eps):
    """(y, x + residual), and what backward needs."""
    s, y, rstd = np.empty_like(x), np.empty_like(x), np.empty(x.shape[:-1], np.float32)
    ...
