"""The head's product and the cross-entropy over it, fused, so that all logits never exist at once.

    logits = x @ weight[:vocab_size].T
    linear_cross_entropy:  loss = scale * sum over n with targets[n] >= 0 of -log p[n, targets[n]]
    token_logprob:         y[n] = log p[n, targets[n]], 0 where the target is ignored

x: (..., D).  weight: (Vpad, D) with Vpad >= vocab_size; the rows beyond are padding: no probability
mass and no gradient.  targets: (...,) int32, negative = ignored.  scale: () float, usually one over
the number of valid tokens of the whole step, so that micro-batches and devices add up.
loss: () float64, accumulated in float64; 0 with gradient 0 when every target is ignored.
y: (...,) fp32.  Logits and softmax in at least fp32. This reference does hold all logits: it is the
specification; the kernels work in chunks.

`dweight_into`: the gradient buffer of weight. With it, forward also produces the gradients of a
loss that is differentiated with seed 1 (the weight's is added to the buffer at once), which saves
a second pass over the vocabulary; backward then insists on being the start of the tape.
Source: the chunked loss follows Hsu et al. (Liger Kernel), arXiv:2410.10989.
"""

from xtrain.engine.dtype import upcast
from xtrain.engine.op import Implementation, Op, Sample, Spec, ids, normal, positive
from xtrain.engine.tensor import SEED


def check_loss(x, weight, targets, scale, *, vocab_size, dweight_into=None):
    check_logprob(x, weight, targets, vocab_size=vocab_size)
    if scale.shape != ():
        raise ValueError(f"linear_cross_entropy: scale must be (), got {scale.shape}")


def check_logprob(x, weight, targets, *, vocab_size):
    if x.shape[:-1] != targets.shape or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"cross entropy: x {x.shape}, weight {weight.shape}, targets {targets.shape} do not fit"
        )
    if vocab_size > weight.shape[0]:
        raise ValueError(f"cross entropy: {vocab_size} words, weight has {weight.shape[0]} rows")


def rows_of(x, targets):
    return upcast(x).reshape(-1, x.shape[-1]), targets.reshape(-1)


def log_probabilities(xp, rows, weight, vocab_size):
    """(N, vocab_size) log-probabilities."""
    logits = xp.matmul(rows, upcast(weight)[:vocab_size].T)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))


def picked(xp, logp, flat):
    """Log-probability of each target, 0 where ignored: (N,)."""
    n = xp.arange(flat.shape[0])
    return xp.where(flat >= 0, logp[n, xp.maximum(flat, 0)], 0)


def gradients(xp, rows, weight, flat, logp, coefficient, *, into):
    """Gradients of sum(coefficient * picked): drows (N, D) and dweight (into, or returned)."""
    vocab_size = logp.shape[1]
    n = xp.arange(flat.shape[0])
    coefficient = xp.where(flat >= 0, coefficient, 0).astype(rows.dtype)
    dlogits = -xp.exp(logp) * coefficient[:, None]
    dlogits[n, xp.maximum(flat, 0)] += coefficient
    drows = xp.matmul(dlogits, upcast(weight)[:vocab_size])
    dweight = xp.matmul(dlogits.T, rows)
    if into is not None:
        into[:vocab_size] += dweight
        return drows, None
    full = xp.zeros(weight.shape, dweight.dtype)
    full[:vocab_size] = dweight
    return drows, full.astype(weight.dtype, copy=False)


def loss_forward(xp, x, weight, targets, scale, *, vocab_size, dweight_into=None):
    rows, flat = rows_of(x, targets)
    logp = log_probabilities(xp, rows, weight, vocab_size)
    loss = -picked(xp, logp, flat).astype(xp.float64).sum() * scale.astype(xp.float64)
    if dweight_into is None:
        return xp.asarray(loss), (x, weight, flat, scale, logp)
    drows, _ = gradients(xp, rows, weight, flat, logp, -scale, into=dweight_into)
    return xp.asarray(loss), (drows.reshape(x.shape).astype(x.dtype, copy=False),)


def loss_backward(xp, dy, saved, *, vocab_size, dweight_into=None, into):
    if dweight_into is not None:
        require_start(dy)
        return saved[0], None, None, None
    x, weight, flat, scale, logp = saved
    dy = 1.0 if dy is SEED else dy
    drows, dweight = gradients(
        xp, rows_of(x, flat)[0], weight, flat, logp, -(scale * dy), into=into[0]
    )
    return drows.reshape(x.shape).astype(x.dtype, copy=False), dweight, None, None


def require_start(dy) -> None:
    """A loss that made its gradients in forward must be what backward starts from."""
    if dy is not SEED:
        raise ValueError(
            "linear_cross_entropy with dweight_into must be the tensor that backward() starts from"
        )


def logprob_forward(xp, x, weight, targets, *, vocab_size):
    rows, flat = rows_of(x, targets)
    logp = log_probabilities(xp, rows, weight, vocab_size)
    y = picked(xp, logp, flat).reshape(targets.shape)
    return y, (x, weight, flat, logp)


def logprob_backward(xp, dy, saved, *, vocab_size, into):
    x, weight, flat, logp = saved
    rows = rows_of(x, flat)[0]
    drows, dweight = gradients(xp, rows, weight, flat, logp, dy.reshape(-1), into=into[0])
    return drows.reshape(x.shape).astype(x.dtype, copy=False), dweight, None


SHAPES = (
    ("one_token", (1,), 4, 11, 11),
    ("padded_words", (3, 5), 8, 50, 64),
    ("ragged", (37,), 12, 301, 320),
    ("few_words", (12,), 4, 3, 16),  # so that word 0 is among the targets
)


def loss_flop(inputs, attrs, direction):
    x, weight = inputs[:2]
    in_forward = attrs.get("dweight_into") is not None
    products = {"forward": 3 if in_forward else 1, "backward": 0 if in_forward else 2}
    return 2.0 * x.size * weight.shape[0] * products[direction]


def loss_bench(n):
    inputs = (normal(n.B, n.T, n.D), normal(n.rows, n.D), ids(n.V, n.B, n.T))
    into = Spec((n.rows, n.D), "zeros", dtype="float32")
    attrs = {"vocab_size": n.V, "dweight_into": into}
    return (Sample("head", (*inputs, Spec((), "positive", dtype="float32")), attrs),)


linear_cross_entropy = Op(
    "linear_cross_entropy",
    Implementation(loss_forward, loss_backward, accumulates=(1,)),
    check=check_loss,
    sees_seed=True,
    samples=tuple(
        Sample(
            name,
            (normal(*n, d), normal(rows, d), Spec(n, "targets", v), positive()),
            {"vocab_size": v},
            reduced=v,
        )
        for name, n, d, v, rows in SHAPES
    ),
    bench=loss_bench,
    flop=loss_flop,
)
token_logprob = Op(
    "token_logprob",
    Implementation(logprob_forward, logprob_backward, accumulates=(1,)),
    check=check_logprob,
    samples=tuple(
        Sample(name, (normal(*n, d), normal(rows, d), ids(v, *n)), {"vocab_size": v}, reduced=v)
        for name, n, d, v, rows in SHAPES
    ),
)
