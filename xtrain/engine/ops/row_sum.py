"""y = sum of each row: of a sequence's log-probabilities, its log-probability.

x: (B, T).  y: (B,) of x's dtype, summed in at least fp32. Ignored tokens are 0 in x already
(`token_logprob` puts them there), so the sum needs no mask.
"""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, normal


def check(x):
    if x.ndim != 2:
        raise ValueError(f"row_sum: x must be (B, T), got {x.shape}")


def forward(xp, x):
    return upcast(x).sum(-1).astype(x.dtype, copy=False), x.shape


def backward(xp, dy, shape):
    return (xp.broadcast_to(dy[:, None], shape).copy(),)


row_sum = Op(
    "row_sum",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("one", (normal(1, 1),)),
        Sample("ragged", (normal(5, 37),), reduced=37),
    ),
)
