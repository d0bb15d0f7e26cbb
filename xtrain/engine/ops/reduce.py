"""Sum and mean of all elements: float64 scalars, accumulated in float64.

x: any shape, any float dtype. y: () float64.
"""

from xtrain.engine.op import Implementation, Op, Sample, normal


def total_forward(xp, x):
    return xp.asarray(x.astype(xp.float64).sum()), (x.shape, x.dtype)


def total_backward(xp, dy, saved):
    shape, dtype = saved
    return (xp.broadcast_to(dy, shape).astype(dtype),)


def mean_forward(xp, x):
    return xp.asarray(x.astype(xp.float64).sum() / max(x.size, 1)), (x.shape, x.dtype, x.size)


def mean_backward(xp, dy, saved):
    shape, dtype, size = saved
    return (xp.broadcast_to(dy / max(size, 1), shape).astype(dtype),)


SAMPLES = (Sample("block", (normal(3, 5, 7),), reduced=105), Sample("empty", (normal(0, 4),)))

total = Op("total", Implementation(total_forward, total_backward), samples=SAMPLES)
mean = Op("mean", Implementation(mean_forward, mean_backward), samples=SAMPLES)
