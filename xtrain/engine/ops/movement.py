"""Views: reshape, transpose, and both at once for the heads of attention. No arithmetic; any dtype;
the gradient is the inverse movement.

    merge_heads:  (B, H, T, Dh) -> (B, T, H * Dh)      a view where heads are stored token by token
"""

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


def merge_heads_forward(xp, x):
    B, H, T, Dh = x.shape
    return xp.transpose(x, (0, 2, 1, 3)).reshape(B, T, H * Dh), x.shape


def merge_heads_backward(xp, dy, saved):
    B, H, T, Dh = saved
    return (xp.transpose(dy.reshape(B, T, H, Dh), (0, 2, 1, 3)),)


def nothing_moved(direction, inputs, outputs):
    """A view moves no bytes; what a kernel copies all the same is the gap to the floor."""
    return 0.0


reshape = Op(
    "reshape",
    Implementation(reshape_forward, reshape_backward),
    samples=(
        Sample("merge", (normal(2, 3, 5),), {"shape": (6, 5)}),
        Sample("infer", (normal(4, 6),), {"shape": (3, -1)}),
    ),
    moved=nothing_moved,
)
transpose = Op(
    "transpose",
    Implementation(transpose_forward, transpose_backward),
    samples=(
        Sample("swap", (normal(2, 3),), {"axes": (1, 0)}),
        Sample("cycle", (normal(2, 3, 4, 5),), {"axes": (1, 3, 0, 2)}),
    ),
    moved=nothing_moved,
)
merge_heads = Op(
    "merge_heads",
    Implementation(merge_heads_forward, merge_heads_backward),
    samples=(Sample("heads", (normal(2, 3, 5, 4),)),),
    moved=nothing_moved,
)
