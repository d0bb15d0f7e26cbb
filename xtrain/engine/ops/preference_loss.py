"""The logistic loss of pairs of which the first should score higher: DPO's, and Bradley-Terry's.

    margin[p] = beta ((x[2p] - reference[2p]) - (x[2p + 1] - reference[2p + 1]))
    loss = scale * sum over p of -log sigmoid(margin[p])

x: (2P,), rows chosen, rejected, chosen, ...: log-probabilities of whole completions for DPO (its
eq. 7), scores for a reward model, which has no reference (None) and beta 1.  reference: (2P,).
scale: () float, usually one over the pairs of the step.  loss: () float64. With x = reference it is
log 2 a pair, exactly what a policy that has not moved must show.
Sources: Rafailov et al., arXiv:2305.18290; Bradley and Terry, Biometrika 39 (1952).
"""

import numpy as np

from xtrain.engine.op import Implementation, Op, Sample, normal, positive


def check(x, reference, scale, *, beta):
    if x.ndim != 1 or x.shape[0] % 2 or (reference is not None and reference.shape != x.shape):
        shape = None if reference is None else reference.shape
        raise ValueError(f"preference_loss: x {x.shape}, reference {shape} are not whole pairs")


def margins(x, reference, beta):
    """(P,) float64."""
    moved = x.astype(np.float64)
    if reference is not None:
        moved = moved - reference.astype(np.float64)
    return beta * (moved[0::2] - moved[1::2])


def forward(xp, x, reference, scale, *, beta):
    margin = margins(x, reference, beta)
    loss = xp.logaddexp(0.0, -margin).sum() * scale.astype(np.float64)
    return loss, (margin, scale, x.dtype)


def backward(xp, dy, saved, *, beta):
    margin, scale, dtype = saved
    # d/dm of log(1 + exp(-m)) = -sigmoid(-m), without an exponential that overflows.
    slope = -0.5 * (1.0 - xp.tanh(0.5 * margin)) * beta * scale.astype(np.float64) * dy
    dx = xp.empty(2 * margin.shape[0], dtype)
    dx[0::2], dx[1::2] = slope, -slope
    return dx, None, None


preference_loss = Op(
    "preference_loss",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("dpo", (normal(12, scale=3.0), normal(12), positive()), {"beta": 0.3}, reduced=12),
        Sample("scores", (normal(8, scale=3.0), None, positive()), {"beta": 1.0}, reduced=8),
    ),
)
