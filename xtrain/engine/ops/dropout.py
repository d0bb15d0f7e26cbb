"""Inverted dropout: y = x * keep / (1 - p), keep ~ Bernoulli(1 - p), from a counter.

x, y: any shape.  key: uint32 (4,) from `rng.key_array` (seed, step, micro-batch).  site: which
dropout this is. Nothing is stored: backward draws the same mask again, and so does recomputation.
Source: Srivastava et al., JMLR 15 (2014).
"""

from xtrain.engine import rng
from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, Spec, normal


def check(x, key, *, p, site):
    if not 0 <= p <= 1 - 2**-32:  # above, the bound of the 32 random bits does not fit into them
        raise ValueError(f"dropout: p must be in [0, 1 - 2^-32], got {p}")


def keep_mask(xp, shape, size, key, p, site):
    """1 / (1 - p) where kept, else 0; element i is dropped iff its 32 random bits < p * 2**32."""
    kept = rng.bits(xp, size, key, site) >= xp.uint32(round(p * 2**32))
    return kept.reshape(shape).astype(xp.float32) * xp.float32(1 / (1 - p))


def forward(xp, x, key, *, p, site):
    mask = keep_mask(xp, x.shape, x.size, key, p, site)
    return (upcast(x) * mask).astype(x.dtype, copy=False), key


def backward(xp, dy, saved, *, p, site):
    mask = keep_mask(xp, dy.shape, dy.size, saved, p, site)
    return (upcast(dy) * mask).astype(dy.dtype, copy=False), None


def bench(n):
    attrs = {"p": 0.1, "site": 3}
    return (Sample("stream", (normal(n.B, n.T, n.D), Spec((4,), "key")), attrs),)


dropout = Op(
    "dropout",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("none", (normal(3, 5), Spec((4,), "key")), {"p": 0.0, "site": 1}),
        Sample("some", (normal(7, 13), Spec((4,), "key")), {"p": 0.3, "site": 2}),
    ),
    bench=bench,
)
