"""AdamW on the CPU: one pass over the four flat buffers, which also zeroes the gradient.

See `xtrain.engine.ops.adamw`. fp32 with one rounding an operation (no fast-math, no fused
multiply-add), so the bits are the reference's.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.engine import scalar
from xtrain.engine.ops.adamw import adamw

BLOCK = 16384  # elements a thread takes at a time

_moment1 = njit(scalar.adamw_moment1)
_moment2 = njit(scalar.adamw_moment2)
# With Python's error model a zero divisor raises, and the branch for it prevents vectorization.
_weight = njit(error_model="numpy")(scalar.adamw_weight)


def forward(xp, p, g, m, v, hyper, copy, *, decayed, beta1, beta2, eps, weight_decay):
    """Update p, m, v and the bf16 copy in place and zero g; returns p."""
    constants = np.array([1 - beta1, beta2, 1 - beta2, eps, weight_decay], np.float32)
    _update(p, g, m, v, hyper, constants, decayed)
    if copy is not None:
        copy[...] = p[: copy.size].astype(copy.dtype)
    return p, None


@njit(parallel=PRANGE_ONLY, error_model="numpy", cache=True)
def _update(p, g, m, v, hyper, constants, decayed):
    lr, bias1, sqrt_bias2, clip = hyper[0], hyper[1], hyper[2], hyper[3]
    one_minus_beta1, beta2, one_minus_beta2 = constants[0], constants[1], constants[2]
    eps, weight_decay = constants[3], constants[4]
    step_size = lr / bias1
    blocks = (p.size + BLOCK - 1) // BLOCK
    for block in prange(blocks):
        start = np.int64(block) * BLOCK
        stop = min(start + BLOCK, p.size)
        if hyper[4] != 0:
            for decays in (True, False):
                first = start if decays else max(start, decayed)
                last = min(stop, decayed) if decays else stop
                shrink = np.float32(1) - lr * weight_decay if decays else np.float32(1)
                # Slices: of an index that might be negative LLVM makes no vector loop.
                weights, gradients = p[first:last], g[first:last]
                moments1, moments2 = m[first:last], v[first:last]
                for i in range(weights.size):
                    clipped = gradients[i] * clip
                    moments1[i] = _moment1(moments1[i], clipped, one_minus_beta1)
                    moments2[i] = _moment2(moments2[i], clipped, beta2, one_minus_beta2)
                    root = np.sqrt(moments2[i])
                    weights[i] = _weight(
                        weights[i], moments1[i], root, shrink, step_size, sqrt_bias2, eps
                    )
        g[start:stop] = 0


adamw.fuse("cpu", forward)
