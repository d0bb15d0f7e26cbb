"""Softmax over the last axis: y = exp(x - max) / sum, in at least fp32; y has x's dtype."""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, normal


def forward(xp, x):
    x32 = upcast(x)
    e = xp.exp(x32 - x32.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    return y.astype(x.dtype, copy=False), y


def backward(xp, dy, saved):
    dx = saved * (upcast(dy) - (upcast(dy) * saved).sum(-1, keepdims=True))
    return (dx.astype(dy.dtype, copy=False),)


softmax = Op(
    "softmax",
    Implementation(forward, backward),
    samples=(
        Sample("row", (normal(1, 5),), reduced=5),
        Sample("wide", (normal(3, 4, 67, scale=5.0),), reduced=67),
    ),
)
