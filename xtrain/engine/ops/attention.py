"""Causal scaled dot-product attention with grouped queries.

    y = softmax(q k^T / sqrt(Dh) + mask) v,   query head h reads key-value head h // (H // Hk)

q, y: (B, H, T, Dh).  k, v: (B, Hk, S, Dh).  Query i of row b sits at position offsets[b] + i and
sees key j iff starts[b, i] <= j <= offsets[b] + i.
starts: (B, T) int32, first visible key, or None for 0.  offsets: (B,) int32, cached tokens before
the queries, or None for 0.  A query that sees no key has y = 0 and gives no gradient.
Scores, softmax and sums in at least fp32; y has q's dtype.
The gradient of a key-value head is the sum over its group of query heads, in head order.
Sources: Vaswani et al., arXiv:1706.03762; Ainslie et al. (grouped queries), arXiv:2305.13245.
"""

import math

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, Spec, normal


def check(q, k, v, starts, offsets):
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} do not fit")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"attention: {q.shape[1]} query heads over {k.shape[1]} key-value heads")


def visible(xp, q, k, starts, offsets):
    """Which keys each query sees, bool, broadcastable to (B, Hk, G, T, S)."""
    T, S = q.shape[2], k.shape[2]
    position = xp.arange(T)[None, :]
    if offsets is not None:
        position = position + offsets[:, None]
    key = xp.arange(S)
    mask = key <= position[:, :, None]  # (1 or B, T, S)
    if starts is not None:
        mask = mask & (key >= starts[:, :, None])
    return mask[:, None, None]


def grouped(x, kv_heads):
    """Split the head axis: (B, H, T, Dh) -> (B, Hk, G, T, Dh)."""
    B, H, T, Dh = x.shape
    return x.reshape(B, kv_heads, H // kv_heads, T, Dh)


def forward(xp, q, k, v, starts, offsets):
    q5 = grouped(upcast(q), k.shape[1])
    k32, v32 = upcast(k)[:, :, None], upcast(v)[:, :, None]  # (B, Hk, 1, S, Dh)
    scores = xp.matmul(q5, k32.swapaxes(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
    scores = xp.where(visible(xp, q, k, starts, offsets), scores, -xp.inf)
    peak = scores.max(-1, keepdims=True)
    p = xp.exp(scores - xp.where(peak == -xp.inf, xp.zeros_like(peak), peak))
    total = p.sum(-1, keepdims=True)
    p /= xp.where(total == 0, xp.ones_like(total), total)
    y = xp.matmul(p, v32).reshape(q.shape)
    return y.astype(q.dtype, copy=False), (q, k, v, p)


def backward(xp, dy, saved):
    q, k, v, p = saved
    q5, dy5 = grouped(upcast(q), k.shape[1]), grouped(upcast(dy), k.shape[1])
    k32, v32 = upcast(k)[:, :, None], upcast(v)[:, :, None]
    dv = xp.matmul(p.swapaxes(-1, -2), dy5).sum(2)
    dp = xp.matmul(dy5, v32.swapaxes(-1, -2))
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * (1 / math.sqrt(q.shape[-1]))
    dq = xp.matmul(ds, k32).reshape(q.shape)
    dk = xp.matmul(ds.swapaxes(-1, -2), q5).sum(2)
    return (
        dq.astype(q.dtype, copy=False),
        dk.astype(k.dtype, copy=False),
        dv.astype(v.dtype, copy=False),
        None,
        None,
    )


def _heads(B, H, Hk, T, S, Dh):
    return normal(B, H, T, Dh), normal(B, Hk, S, Dh), normal(B, Hk, S, Dh)


def flop(inputs, attrs, direction):
    q, k = inputs[:2]
    return 2.0 * q.size * k.shape[2] * (1 if direction == "forward" else 2.5)  # the causal half


def bench(n):
    return (Sample("causal", (*_heads(n.B, n.H, n.Hk, n.T, n.T, n.Dh), None, None)),)


attention = Op(
    "attention",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("one_token", (*_heads(1, 1, 1, 1, 1, 4), None, None)),
        Sample("mha", (*_heads(2, 3, 3, 7, 7, 4), None, None), reduced=7),
        Sample("gqa", (*_heads(1, 4, 2, 19, 19, 8), None, None), reduced=19),
        Sample("mqa", (*_heads(2, 4, 1, 5, 5, 8), None, None), reduced=8),
        Sample(
            "documents", (*_heads(2, 2, 1, 11, 11, 4), Spec((2, 11), "starts"), None), reduced=11
        ),
        # Starts anywhere, so some queries see no key.
        Sample("blind", (*_heads(2, 2, 1, 11, 11, 4), Spec((2, 11), "ids", 40), None), reduced=11),
        Sample("cached", (*_heads(2, 4, 2, 3, 9, 4), None, Spec((2,), "ids", 7)), reduced=9),
    ),
    bench=bench,
    flop=flop,
)
