"""Row lookup: y[n] = weight[ids[n]]; the gradient of a row is the sum over its uses.

weight: (V, D) float.  ids: any shape, int32, each in [0, V).  y: ids.shape + (D,), weight's dtype.
The sum runs in the order of the ids, so repeated ids give the same bits each time.
"""

import numpy as np

from xtrain.engine.op import Implementation, Op, Sample, ids, normal


def check(weight, ids):
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight must be (V, D), got {weight.shape}")


def forward(xp, weight, ids):
    return weight[ids], (ids, weight.shape, weight.dtype)


def backward(xp, dy, saved, *, into):
    ids, shape, dtype = saved
    dweight = xp.zeros(shape, dtype) if into[0] is None else into[0]
    add_at = np.add.at if xp is np else xp.add.at
    add_at(dweight, ids.reshape(-1), dy.reshape(-1, shape[1]).astype(dweight.dtype, copy=False))
    return (dweight if into[0] is None else None), None


def moved(direction, inputs, outputs):
    """Of the table only the rows that are looked up; their gradients are added to what is there."""
    if direction == "forward":
        return inputs[1].nbytes + 2 * outputs.nbytes
    return 3 * inputs.nbytes


def bench(n):
    return (Sample("tokens", (normal(n.rows, n.D), ids(n.V, n.B, n.T))),)


embedding = Op(
    "embedding",
    Implementation(forward, backward, accumulates=(0,)),
    check=check,
    samples=(
        Sample("one", (normal(5, 3), ids(5, 1))),
        Sample("repeats", (normal(4, 6), ids(4, 3, 50)), reduced=50),
    ),
    bench=bench,
    moved=moved,
)
