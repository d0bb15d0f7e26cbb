"""One AdamW update of flat buffers, in place, with clipping folded in; the gradient is zeroed.

    g = clip * g;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g**2
    p = (1 - lr weight_decay) p - (lr / bias1) m / (sqrt(v) / sqrt(bias2) + eps)

p, g, m, v: (n,) fp32, modified.  hyper: (5,) fp32 on the device, [lr, bias1, sqrt(bias2), clip,
apply]; with apply = 0 (a gradient that is not finite) only the gradient is zeroed. Weight decay
applies to the first `decayed` elements. copy: bf16, or None; its elements are set to the rounded
weights, in the same pass; it may be shorter than p. Each element takes one fp32 rounding an
operation, in the order of `xtrain.engine.scalar`, so every backend agrees bit for bit.
Source: Loshchilov and Hutter, arXiv:1711.05101; eps is outside the corrected root, as in PyTorch.
"""

import numpy as np

from xtrain.engine import scalar
from xtrain.engine.op import Implementation, Op, Sample, Spec, normal, positive

ATTRS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def check(p, g, m, v, hyper, copy, *, decayed, beta1, beta2, eps, weight_decay):
    if not p.shape == g.shape == m.shape == v.shape or p.ndim != 1:
        raise ValueError(f"adamw: buffers differ: {p.shape} {g.shape} {m.shape} {v.shape}")
    if not 0 <= decayed <= p.size:
        raise ValueError(f"adamw: decayed={decayed} of {p.size} elements")


def forward(xp, p, g, m, v, hyper, copy, *, decayed, beta1, beta2, eps, weight_decay):
    f32 = np.float32
    lr, bias1, sqrt_bias2, clip, apply = (hyper[i] for i in range(5))
    clipped = g * clip
    m_next = scalar.adamw_moment1(m, clipped, f32(1 - beta1))
    v_next = scalar.adamw_moment2(v, clipped, f32(beta2), f32(1 - beta2))
    shrink = xp.ones_like(p)
    shrink[:decayed] = f32(1) - lr * f32(weight_decay)
    p_next = scalar.adamw_weight(
        p, m_next, xp.sqrt(v_next), shrink, lr / bias1, sqrt_bias2, f32(eps)
    )
    keep = apply == 0
    p[...] = xp.where(keep, p, p_next)
    m[...] = xp.where(keep, m, m_next)
    v[...] = xp.where(keep, v, v_next)
    g[...] = 0
    if copy is not None:
        copy[...] = p[: copy.size].astype(copy.dtype)
    return p, None


def _sample(name, n, decayed, apply):
    buffers = (normal(n), normal(n), normal(n, scale=0.1), positive(n))
    hyper = Spec((5,), "hyper", high=apply)
    return Sample(name, (*buffers, hyper, None), ATTRS | {"decayed": decayed})


def bench(n):
    size = n.parameters
    buffer = normal(size, dtype="float32")
    second = Spec((size,), "positive", dtype="float32")
    hyper = Spec((5,), "hyper", high=1, dtype="float32")
    inputs = (buffer, buffer, buffer, second, hyper, Spec((size,), "copy"))
    return (Sample("buffers", inputs, ATTRS | {"decayed": size}),)


adamw = Op(
    "adamw",
    Implementation(forward),
    check=check,
    mutates=(0, 1, 2, 3),
    samples=(_sample("mixed", 1003, 517, 1), _sample("skipped", 64, 64, 0)),
    bench=bench,
)
