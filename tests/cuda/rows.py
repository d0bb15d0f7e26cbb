"""Checks of the softmax and cross-entropy kernels against float64, on a GPU or simulated."""

import numpy as np

from xtrain.cuda.kernels.cross_entropy import cross_entropy_rows
from xtrain.cuda.kernels.softmax import causal_softmax, causal_softmax_backward
from xtrain.engine.dtype import float32
from xtrain.engine.testing import relative_error, tolerance


def check_causal_softmax(
    xp, put, get, B, kv_heads, group, queries, keys, first, block, dtype, has_starts, has_offsets
):
    """Forward and backward of a block of queries; in place when the probabilities are fp32."""
    source = np.random.default_rng(3)
    scores = 3 * source.standard_normal((B * kv_heads, block * group, keys)).astype(np.float32)
    offsets = source.integers(0, keys - queries + 1, B).astype(np.int32) if has_offsets else None
    starts = source.integers(0, np.arange(1, queries + 1), (B, queries)).astype(np.int32)
    starts = starts if has_starts else None
    visible = _visible(scores.shape, kv_heads, group, first, starts, offsets)
    p = _softmax(scores, visible)
    dp = source.standard_normal(scores.shape).astype(np.float32)
    places = {"group": group, "first": first, "queries": queries, "kv_heads": kv_heads}
    on_device = [None if a is None else put(a) for a in (starts, offsets)]

    z = put(scores)
    out = z if dtype == float32 else xp.full(scores.shape, np.nan, float32).astype(dtype)
    causal_softmax(xp, z, out, *on_device, **places)
    made = get(out).astype(np.float64)
    assert relative_error(made, p) <= tolerance(dtype, keys)
    assert (made[~visible] == 0).all()

    causal_softmax_backward(xp, out, put(dp), out, *on_device, **places)
    ds = made * (dp - (dp * made).sum(-1, keepdims=True))
    assert relative_error(get(out), ds) <= tolerance(dtype, keys)
    assert (get(out).astype(np.float64)[~visible] == 0).all()


def _visible(shape, kv_heads, group, first, starts, offsets):
    visible = np.zeros(shape, bool)
    for batch in range(shape[0]):
        b = batch // kv_heads
        for row in range(shape[1]):
            query = first + row // group
            low = 0 if starts is None else starts[b, query]
            end = query + 1 + (0 if offsets is None else offsets[b])
            visible[batch, row, low:end] = True
    return visible


def _softmax(scores, visible):
    wide = np.where(visible, scores.astype(np.float64), -np.inf)
    p = np.exp(wide - wide.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def check_cross_entropy(xp, put, get, rows, vocab_size, padded, dtype, out_dtype):
    """Log-probabilities alone, then with gradients; one row is ignored."""
    source = np.random.default_rng(4)
    logits = (3 * source.standard_normal((rows, padded))).astype(dtype)
    targets = source.integers(0, vocab_size, rows).astype(np.int32)
    targets[1] = -100
    coefficient = source.standard_normal(rows).astype(np.float32)
    wide = logits.astype(np.float64)[:, :vocab_size]
    everything = wide - wide.max(-1, keepdims=True)
    everything -= np.log(np.exp(everything).sum(-1, keepdims=True))
    counts, n = targets >= 0, np.arange(rows)
    expected = np.where(counts, everything[n, np.maximum(targets, 0)], 0)
    gradient = np.exp(everything)
    gradient[n, np.maximum(targets, 0)] -= 1
    gradient *= (coefficient * counts)[:, None]

    z, t, logp = put(logits), put(targets), xp.full(rows, np.nan, "float32")
    cross_entropy_rows(xp, z, t, None, logp, None, vocab_size=vocab_size)
    assert relative_error(get(logp), expected) <= tolerance(float32, vocab_size)
    assert get(z).tobytes() == logits.tobytes()

    in_place = dtype == out_dtype
    dz = z if in_place else xp.full(logits.shape, np.nan, float32).astype(out_dtype)
    logp = xp.full(rows, np.nan, "float32")
    cross_entropy_rows(xp, z, t, put(coefficient), logp, dz, vocab_size=vocab_size)
    made = get(dz).astype(np.float64)
    assert relative_error(get(logp), expected) <= tolerance(float32, vocab_size)
    assert relative_error(made[:, :vocab_size], gradient) <= tolerance(out_dtype, vocab_size)
    assert (made[:, vocab_size:] == 0).all()
    assert (made[1] == 0).all()
