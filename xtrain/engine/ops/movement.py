"""Views: reshape and transpose. No arithmetic; any dtype; the gradient is the inverse movement."""

import functools

import numpy as np

from xtrain.engine.op import Implementation, Op, Sample, normal


def reshape_forward(xp, x, *, shape):
    return x.reshape(shape), x.shape


def reshape_backward(xp, dy, saved, *, shape):
    return (dy.reshape(saved),)


def transpose_forward(xp, x, *, axes):
    return xp.transpose(x, axes), None


def transpose_backward(xp, dy, saved, *, axes):
    return (xp.transpose(dy, _inverse(axes)),)


@functools.cache
def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(axes))


reshape = Op(
    "reshape",
    Implementation(reshape_forward, reshape_backward),
    samples=(
        Sample("merge", (normal(2, 3, 5),), {"shape": (6, 5)}),
        Sample("infer", (normal(4, 6),), {"shape": (3, -1)}),
    ),
)
transpose = Op(
    "transpose",
    Implementation(transpose_forward, transpose_backward),
    samples=(
        Sample("swap", (normal(2, 3),), {"axes": (1, 0)}),
        Sample("cycle", (normal(2, 3, 4, 5),), {"axes": (1, 3, 0, 2)}),
    ),
)
