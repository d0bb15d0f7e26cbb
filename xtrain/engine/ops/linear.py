"""Matrix products.

    linear:  y = x @ weight.T        x: (..., K)  weight: (M, K)  y: (..., M)
    matmul:  y = op(a) @ op(b)       a: (M, K)  b: (K, N), or transposed as stored

The library's GEMM: fp32 in, fp32 accumulation (float64 stays). The gradient of a weight is added to
its gradient buffer. `linear` has the variant `tiled`: the engine's own blocked GEMM.
"""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, normal


def check_linear(x, weight):
    if weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: the last axis of x {x.shape} must equal the last of weight {weight.shape}"
        )


def linear_forward(xp, x, weight):
    y = xp.matmul(upcast(x), upcast(weight).T)
    return y.astype(x.dtype, copy=False), (x, weight)


def linear_backward(xp, dy, saved, *, into):
    x, weight = saved
    rows = upcast(dy).reshape(-1, weight.shape[0])
    dx = xp.matmul(rows, upcast(weight)).reshape(x.shape).astype(x.dtype, copy=False)
    dweight = xp.matmul(rows.T, upcast(x).reshape(-1, weight.shape[1]))
    if into[0] is None:
        return dx, dweight.astype(weight.dtype, copy=False)
    into[0][...] += dweight
    return dx, None


def check_matmul(a, b, *, transpose_a=False, transpose_b=False):
    inner_a = a.shape[0] if transpose_a else a.shape[1]
    inner_b = b.shape[1] if transpose_b else b.shape[0]
    if a.ndim != 2 or b.ndim != 2 or inner_a != inner_b:
        raise ValueError(f"matmul: inner sizes differ, {inner_a} and {inner_b}")


def matmul_forward(xp, a, b, *, transpose_a=False, transpose_b=False):
    left = upcast(a).T if transpose_a else upcast(a)
    right = upcast(b).T if transpose_b else upcast(b)
    return xp.matmul(left, right).astype(a.dtype, copy=False), (a, b)


def matmul_backward(xp, dy, saved, *, transpose_a=False, transpose_b=False):
    a, b = (upcast(s) for s in saved)
    dy = upcast(dy)
    da = xp.matmul(dy, b if transpose_b else b.T)
    db = xp.matmul(a if transpose_a else a.T, dy)
    return da.T if transpose_a else da, db.T if transpose_b else db


def linear_flop(inputs, attrs, direction):
    x, weight = inputs[:2]
    return 2.0 * x.size * weight.shape[0] * (1 if direction == "forward" else 2)


def linear_bench(n):
    products = {
        "qkv_proj": (n.D, (n.H + 2 * n.Hk) * n.Dh),
        "o_proj": (n.H * n.Dh, n.D),
        "gate_up_proj": (n.D, 2 * n.F),
        "down_proj": (n.F, n.D),
    }
    return tuple(
        Sample(name, (normal(n.B, n.T, inner), normal(outer, inner)))
        for name, (inner, outer) in products.items()
    )


linear = Op(
    "linear",
    Implementation(linear_forward, linear_backward, accumulates=(1,)),
    check=check_linear,
    samples=(
        Sample("row", (normal(1, 3), normal(2, 3)), reduced=3),
        Sample("ragged", (normal(2, 5, 37), normal(19, 37)), reduced=37),
    ),
    bench=linear_bench,
    flop=linear_flop,
)
matmul = Op(
    "matmul",
    Implementation(matmul_forward, matmul_backward),
    check=check_matmul,
    samples=tuple(
        Sample(
            f"ragged_{'t' if ta else 'n'}{'t' if tb else 'n'}",
            (normal(*((33, 17) if ta else (17, 33))), normal(*((9, 33) if tb else (33, 9)))),
            {"transpose_a": ta, "transpose_b": tb},
            reduced=33,
        )
        for ta in (False, True)
        for tb in (False, True)
    ),
)
