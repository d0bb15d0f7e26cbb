"""Elementwise sums and products of arrays of one shape, and multiplication by a constant.

Any float dtype; computed in at least fp32. Broadcasting is not supported: shapes must be equal.
"""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, normal


def check_same_shape(a, b):
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {a.shape} and {b.shape}")


def add_forward(xp, a, b):
    return (upcast(a) + upcast(b)).astype(a.dtype, copy=False), None


def add_backward(xp, dy, saved):
    return dy, dy


def multiply_forward(xp, a, b):
    return (upcast(a) * upcast(b)).astype(a.dtype, copy=False), (a, b)


def multiply_backward(xp, dy, saved):
    a, b = saved
    dy = upcast(dy)
    return (dy * upcast(b)).astype(a.dtype), (dy * upcast(a)).astype(b.dtype)


def scale_forward(xp, x, *, factor):
    return (upcast(x) * factor).astype(x.dtype, copy=False), None


def scale_backward(xp, dy, saved, *, factor):
    return ((upcast(dy) * factor).astype(dy.dtype, copy=False),)


PAIR = (
    Sample("row", (normal(7), normal(7))),
    Sample("empty", (normal(0, 3), normal(0, 3))),
    Sample("block", (normal(2, 3, 5), normal(2, 3, 5))),
)

add = Op("add", Implementation(add_forward, add_backward), samples=PAIR, check=check_same_shape)
multiply = Op(
    "multiply",
    Implementation(multiply_forward, multiply_backward),
    samples=PAIR,
    check=check_same_shape,
)
scale = Op(
    "scale",
    Implementation(scale_forward, scale_backward),
    samples=(Sample("half", (normal(3, 5),), {"factor": 0.5}),),
)
