"""Gated activation: y = silu(gate) * up, silu(g) = g / (1 + exp(-g)).

gate_up: (..., 2F), the fused product [gate | up].  y: (..., F).  Computed in at least fp32.
Source: Shazeer, arXiv:2002.05202.
"""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, normal


def check(gate_up):
    if gate_up.shape[-1] % 2:
        raise ValueError(f"swiglu: the last axis of {gate_up.shape} must be even")


def sigmoid(xp, x):
    """1 / (1 + exp(-x)) without overflow: exp is only taken of -|x|."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))


def forward(xp, gate_up):
    half = gate_up.shape[-1] // 2
    gate, up = upcast(gate_up[..., :half]), upcast(gate_up[..., half:])
    return (gate * sigmoid(xp, gate) * up).astype(gate_up.dtype, copy=False), gate_up


def backward(xp, dy, saved):
    half = saved.shape[-1] // 2
    gate, up = upcast(saved[..., :half]), upcast(saved[..., half:])
    s, dy = sigmoid(xp, gate), upcast(dy)
    dgate = dy * up * s * (1 + gate * (1 - s))
    dup = dy * gate * s
    return (xp.concatenate([dgate, dup], axis=-1).astype(saved.dtype, copy=False),)


def bench(n):
    return (Sample("gate", (normal(n.B, n.T, 2 * n.F),)),)


swiglu = Op(
    "swiglu",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("row", (normal(1, 6),)),
        Sample("ragged", (normal(3, 5, 26, scale=3.0),)),
    ),
    bench=bench,
)
