"""The clipped policy gradient of sampled tokens, with a penalty for leaving a reference.

    r = exp(logp - old);  A = advantages of the row
    gain = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    loss = sum of weights (beta r k3 - gain),   k3 = u - 1 - log u,  u = exp(reference - logp)

logp, old, weights: (B, T); 0 weight for every token that was not sampled.  advantages: (B,).
reference: (B, T) log-probabilities of the reference, or None without a penalty.  loss: () float64.
At r = 1 the gradient of r k3 is log(p / p_ref) times that of logp, the unbiased gradient of the KL
divergence; that of k3 alone is not. With clip_low = clip_high = inf it is plain REINFORCE with
importance weights.
Sources: PPO's clip, Schulman et al., arXiv:1707.06347, eq. 7; GRPO, Shao et al., arXiv:2402.03300,
eq. 3 and 4; clip_high above clip_low, Yu et al. (DAPO), arXiv:2503.14476.
"""

import math

import numpy as np

from xtrain.engine.op import Implementation, Op, Sample, normal, positive


def check(logp, old, advantages, weights, reference, *, clip_low, clip_high, beta):
    like = [old.shape, weights.shape] + ([] if reference is None else [reference.shape])
    if logp.ndim != 2 or any(s != logp.shape for s in like) or advantages.shape != logp.shape[:1]:
        raise ValueError(
            f"policy_loss: logp {logp.shape}, advantages {advantages.shape}, others {like}"
        )
    if (beta > 0) != (reference is not None):
        raise ValueError(f"policy_loss: beta={beta} with reference {reference is not None}")


def forward(xp, logp, old, advantages, weights, reference, *, clip_low, clip_high, beta):
    wide = logp.astype(np.float64)
    ratio = xp.exp(wide - old.astype(np.float64))
    A = advantages.astype(np.float64)[:, None]
    free, clipped = ratio * A, xp.clip(ratio, 1 - clip_low, 1 + clip_high) * A
    cost = -xp.minimum(free, clipped)
    slope = -xp.where(free <= clipped, free, 0.0)  # d cost / d logp
    if reference is not None:
        log_u = reference.astype(np.float64) - wide
        u = xp.exp(log_u)
        k3 = u - 1 - log_u
        cost = cost + beta * ratio * k3
        slope = slope + beta * ratio * (k3 + 1 - u)
    w = weights.astype(np.float64)
    # A token that was not sampled has weight 0, and whatever stands there counts for nothing.
    loss = xp.where(w != 0, w * cost, 0.0).sum()
    return loss, (xp.where(w != 0, w * slope, 0.0), logp.dtype)


def backward(xp, dy, saved, *, clip_low, clip_high, beta):
    slope, dtype = saved
    return ((slope * dy).astype(dtype), None, None, None, None)


def _sample(name, rows, tokens, reference, **attrs):
    shape = (rows, tokens)
    small = normal(*shape, scale=0.3)
    inputs = (small, small, normal(rows), positive(*shape), small if reference else None)
    return Sample(name, inputs, attrs, reduced=rows * tokens)


policy_loss = Op(
    "policy_loss",
    Implementation(forward, backward),
    check=check,
    samples=(
        _sample("clipped", 5, 7, False, clip_low=0.2, clip_high=0.28, beta=0.0),
        _sample("free", 3, 4, False, clip_low=math.inf, clip_high=math.inf, beta=0.0),
        _sample("leashed", 4, 6, True, clip_low=0.2, clip_high=0.2, beta=0.04),
    ),
)
