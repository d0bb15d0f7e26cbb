"""Root-mean-square normalization over the last axis, alone and fused with the residual sum.

    rms_norm:      y = x * rstd * weight,  rstd = 1 / sqrt(mean(x**2) + eps)
    add_rms_norm:  s = x + residual,  y = rms_norm(s);  returns (y, s)

x, residual, y, s: (..., D).  weight: (D,).  Computed in at least fp32; outputs have x's dtype.
Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, normal


def check(x, weight, *, eps):
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {weight.shape}, last axis of x {x.shape}")


def check_add(x, residual, weight, *, eps):
    check(x, weight, eps=eps)
    if x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: x {x.shape}, residual {residual.shape}")


def forward(xp, x, weight, *, eps):
    x32 = upcast(x)
    rstd = 1 / xp.sqrt((x32 * x32).mean(-1, keepdims=True) + eps)
    y = x32 * rstd * upcast(weight)
    return y.astype(x.dtype, copy=False), (x, weight, rstd)


def backward(xp, dy, saved, *, eps):
    x, weight, rstd = saved
    x_hat = upcast(x) * rstd
    dy32 = upcast(dy)
    dweight = (dy32 * x_hat).reshape(-1, weight.shape[0]).sum(0)
    dx_hat = dy32 * upcast(weight)
    dx = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdims=True))
    return dx.astype(x.dtype, copy=False), dweight.astype(weight.dtype, copy=False)


def add_forward(xp, x, residual, weight, *, eps):
    s = (upcast(x) + upcast(residual)).astype(x.dtype, copy=False)
    y, saved = forward(xp, s, weight, eps=eps)
    return (y, s), saved


def add_backward(xp, dys, saved, *, eps):
    dy, ds = dys
    dx, dweight = backward(xp, dy, saved, eps=eps)
    dx = (upcast(dx) + upcast(ds)).astype(dx.dtype, copy=False)
    return dx, dx, dweight


def add_bench(n):
    stream = normal(n.B, n.T, n.D)
    return (Sample("residual", (stream, stream, normal(n.D, dtype="float32")), {"eps": 1e-6}),)


rms_norm = Op(
    "rms_norm",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("one_row", (normal(1, 8), normal(8)), {"eps": 1e-6}, reduced=8),
        Sample("ragged", (normal(3, 5, 67), normal(67)), {"eps": 1e-5}, reduced=67),
    ),
)
add_rms_norm = Op(
    "add_rms_norm",
    Implementation(add_forward, add_backward),
    check=check_add,
    samples=(
        Sample("one_row", (normal(1, 8), normal(1, 8), normal(8)), {"eps": 1e-6}, reduced=8),
        Sample(
            "ragged", (normal(3, 5, 67), normal(3, 5, 67), normal(67)), {"eps": 1e-5}, reduced=67
        ),
    ),
    bench=add_bench,
)
