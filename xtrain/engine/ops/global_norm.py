"""L2 norm of a flat gradient buffer: sqrt(sum g**2), as () float64.

Squares are summed in float64, which no fp32 gradient overflows. NaN or infinity anywhere in the
gradient gives a non-finite norm. Summation order is fixed, so the bits are too.
"""

from xtrain.engine.op import Implementation, Op, Sample, normal


def forward(xp, gradient):
    wide = gradient.astype(xp.float64)
    return xp.asarray(xp.sqrt((wide * wide).sum())), None


def bench(n):
    return (Sample("gradient", (normal(n.parameters, dtype="float32"),)),)


global_norm = Op(
    "global_norm",
    Implementation(forward),
    samples=(
        Sample("short", (normal(64),), reduced=64),
        Sample("overflows_fp32", (normal(777, scale=1e30),), reduced=777),
        # More than the 65536 elements of a CPU's block, and no multiple: the last block.
        Sample("blocks", (normal(70_001),), reduced=70_001),
    ),
    bench=bench,
)
