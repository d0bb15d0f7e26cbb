"""The head's product and cross-entropy on the GPU, a chunk of rows at a time.

For each chunk: logits (product), log-probabilities of the targets and the logits' gradient in the
logits' place (one kernel), the rows' gradient (product), the weight's gradient (product, added to
its fp32 buffer). A chunk is let go before the next one is made.

Where gradients are made, logits have the operands' dtype: with bf16 they are rounded once, as every
other activation is, and their gradient, which is bf16 anyway for the tensor cores, takes their
place: 2 bytes a logit read and 2 written where fp32 logits cost 4 written, 4 read and 2 written.
Where only log-probabilities are asked for (evaluation, sampling) logits are fp32. Softmax and sums
are fp32 in both.

Rows whose target is ignored are computed too and contribute nothing: which rows those are is known
only on the device. The columns beyond vocab_size are padding and get zeros.
"""

import numpy as np

from xtrain.cuda.gemm import as_operand, gemm
from xtrain.cuda.kernels.cross_entropy import cross_entropy_rows, scaled_loss
from xtrain.cuda.kernels.linear import as_rows
from xtrain.engine.chunks import LOSS_BYTES
from xtrain.engine.ops.linear_cross_entropy import (
    linear_cross_entropy,
    require_start,
    token_logprob,
)
from xtrain.engine.tensor import SEED


def loss_forward(xp, x, weight, targets, scale, *, vocab_size, dweight_into=None):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    rows, flat = as_rows(xp, x), xp.ascontiguousarray(targets).reshape(-1)
    weight, scale = as_operand(xp, weight), scale.astype(np.float32, copy=False)
    if dweight_into is None:
        logp = _log_probabilities(xp, rows, weight, flat, vocab_size)
        return scaled_loss(xp, logp, scale), (x, weight, flat, scale)
    logp, drows = _gradients(xp, rows, weight, flat, scale, vocab_size, dweight_into)
    return scaled_loss(xp, logp, scale), (drows.reshape(x.shape),)


def loss_backward(xp, dy, saved, *, vocab_size, dweight_into=None, into):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    if dweight_into is not None:
        require_start(dy)
        return saved[0], None, None, None
    x, weight, flat, scale = saved
    coefficient = scale if dy is SEED else (scale * dy).astype(np.float32)
    dx, dweight = _both_gradients(xp, x, weight, flat, coefficient, vocab_size, into[0])
    return dx, dweight, None, None


def logprob_forward(xp, x, weight, targets, *, vocab_size):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    flat, weight = xp.ascontiguousarray(targets).reshape(-1), as_operand(xp, weight)
    logp = _log_probabilities(xp, as_rows(xp, x), weight, flat, vocab_size)
    return logp.reshape(targets.shape), (x, weight, flat)


def logprob_backward(xp, dy, saved, *, vocab_size, into):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    x, weight, flat = saved
    coefficient = -xp.ascontiguousarray(dy).reshape(-1).astype(np.float32)
    dx, dweight = _both_gradients(xp, x, weight, flat, coefficient, vocab_size, into[0])
    return dx, dweight, None


def _both_gradients(xp, x, weight, flat, coefficient, vocab_size, into):
    """dx, and dweight unless it was added to `into`."""
    dweight = xp.zeros(weight.shape, np.float32) if into is None else into
    _, drows = _gradients(xp, as_rows(xp, x), weight, flat, coefficient, vocab_size, dweight)
    dx = drows.reshape(x.shape)
    return dx, dweight.astype(weight.dtype, copy=False) if into is None else None


def _log_probabilities(xp, rows, weight, flat, vocab_size):
    """(N,) fp32 log-probabilities of the targets, 0 where ignored."""
    logp = xp.empty(flat.shape, np.float32)
    for part in _chunks(rows, weight, np.dtype(np.float32)):
        logits = _logits(xp, rows[part], weight, np.float32)
        cross_entropy_rows(xp, logits, flat[part], None, logp[part], None, vocab_size=vocab_size)
        del logits
    return logp


def _gradients(xp, rows, weight, flat, coefficient, vocab_size, dweight):
    """Log-probabilities and drows of sum(-coefficient * logp); adds to dweight.

    coefficient: one a row, or () for all.
    """
    logp, drows = xp.empty(flat.shape, np.float32), xp.empty(rows.shape, rows.dtype)
    for part in _chunks(rows, weight, rows.dtype):
        logits = _logits(xp, rows[part], weight, rows.dtype)
        factor = coefficient if coefficient.ndim == 0 else coefficient[part]
        cross_entropy_rows(
            xp, logits, flat[part], factor, logp[part], logits, vocab_size=vocab_size
        )
        gemm(logits, weight, drows[part])
        gemm(logits, rows[part], dweight, transpose_a=True, beta=1.0)
        del logits
    return logp, drows


def _logits(xp, rows, weight, dtype):
    logits = xp.empty((rows.shape[0], weight.shape[0]), dtype)
    gemm(rows, weight, logits, transpose_b=True)
    return logits


def _chunks(rows, weight, dtype) -> list[slice]:
    """Slices of rows whose logits stay within LOSS_BYTES, a power of two of them."""
    most = max(LOSS_BYTES // (dtype.itemsize * weight.shape[0]), 1)
    size = 1 << (most.bit_length() - 1)
    return [slice(start, start + size) for start in range(0, rows.shape[0], size)]


linear_cross_entropy.fuse("cuda", loss_forward, loss_backward, accumulates=(1,))
token_logprob.fuse("cuda", logprob_forward, logprob_backward, accumulates=(1,))
