"""From the fused projection to attention heads: per-head RMSNorm of q and k, rotation, layout.

    qkv: (B, T, (H + 2 Hk) * Dh), rows [q heads | k heads | v heads]
    q = rope(rms_norm(q) * q_weight, positions);  k likewise;  v is only laid out
    returns q: (B, H, T, Dh), k: (B, Hk, T, Dh), v: (B, Hk, T, Dh)

positions: (B, T) int32. q_weight, k_weight: (Dh,), or both None for no normalization. The rotation
is the half-split one of Hugging Face's Qwen3 (`rotate_half`): channel i < Dh/2 is paired with
i + Dh/2 at frequency theta**(-2i/Dh). Angles are computed in fp32 whatever the dtype (float64 for
float64), since low-precision angles make distant positions coincide. Outputs have qkv's dtype.
Sources: Su et al., arXiv:2104.09864; Qwen3 technical report, arXiv:2505.09388.
"""

from xtrain.engine.dtype import compute_dtype, upcast
from xtrain.engine.op import Implementation, Op, Sample, ids, normal


def check(qkv, q_weight, k_weight, positions, *, heads, kv_heads, eps, theta):
    width = heads + 2 * kv_heads
    if qkv.ndim != 3 or qkv.shape[-1] % width or (qkv.shape[-1] // width) % 2:
        raise ValueError(
            f"qk_norm_rope: the last axis of qkv {qkv.shape} must be ({heads} + 2 * {kv_heads}) "
            "times an even head size"
        )
    if positions.shape != qkv.shape[:2]:
        raise ValueError(f"qk_norm_rope: positions {positions.shape}, qkv {qkv.shape}")


def rotation(xp, positions, head_dim: int, theta: float, dtype):
    """cos and sin of the rotation angles, (B, 1, T, Dh/2), in the given compute dtype."""
    exponent = xp.arange(0, head_dim, 2, dtype=dtype) / head_dim
    frequency = (1.0 / theta**exponent).astype(dtype)
    angle = positions.astype(dtype)[:, None, :, None] * frequency
    return xp.cos(angle), xp.sin(angle)


def rotate(xp, x, cos, sin):
    """Rotate the channel pairs of x (..., T, Dh) by the angle; `-sin` rotates back."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def forward(xp, qkv, q_weight, k_weight, positions, *, heads, kv_heads, eps, theta):
    B, T, width = qkv.shape
    Dh = width // (heads + 2 * kv_heads)
    x = upcast(qkv).reshape(B, T, heads + 2 * kv_heads, Dh).transpose(0, 2, 1, 3)
    qk, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    rstd = None
    if q_weight is not None:
        rstd = 1 / xp.sqrt((qk * qk).mean(-1, keepdims=True) + eps)
        qk = qk * rstd * per_head(xp, q_weight, k_weight, heads, kv_heads)
    qk = rotate(xp, qk, *rotation(xp, positions, Dh, theta, compute_dtype(qkv.dtype)))
    outputs = (qk[:, :heads], qk[:, heads:], v)
    return (
        tuple(xp.ascontiguousarray(o).astype(qkv.dtype, copy=False) for o in outputs),
        (qkv, q_weight, k_weight, positions, rstd),
    )


def per_head(xp, q_weight, k_weight, heads, kv_heads):
    """The gain of each q and k head, (H + Hk, 1, Dh)."""
    q = xp.broadcast_to(upcast(q_weight), (heads, *q_weight.shape))
    k = xp.broadcast_to(upcast(k_weight), (kv_heads, *k_weight.shape))
    return xp.concatenate([q, k])[:, None, :]


def backward(xp, dys, saved, *, heads, kv_heads, eps, theta):
    qkv, q_weight, k_weight, positions, rstd = saved
    B, T, width = qkv.shape
    Dh = width // (heads + 2 * kv_heads)
    dq, dk, dv = (upcast(d) for d in dys)
    cos, sin = rotation(xp, positions, Dh, theta, compute_dtype(qkv.dtype))
    dqk = rotate(xp, xp.concatenate([dq, dk], axis=1), cos, -sin)
    dq_weight = dk_weight = None
    if q_weight is not None:
        x = upcast(qkv).reshape(B, T, heads + 2 * kv_heads, Dh).transpose(0, 2, 1, 3)
        x_hat = x[:, : heads + kv_heads] * rstd
        dgain = (dqk * x_hat).sum((0, 2))  # (H + Hk, Dh)
        dq_weight = dgain[:heads].sum(0).astype(q_weight.dtype)
        dk_weight = dgain[heads:].sum(0).astype(k_weight.dtype)
        dx_hat = dqk * per_head(xp, q_weight, k_weight, heads, kv_heads)
        dqk = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdims=True))
    dqkv = xp.concatenate([dqk, dv], axis=1).transpose(0, 2, 1, 3).reshape(B, T, width)
    return dqkv.astype(qkv.dtype, copy=False), dq_weight, dk_weight, None


def _attrs(heads, kv_heads):
    return {"heads": heads, "kv_heads": kv_heads, "eps": 1e-6, "theta": 10000.0}


def bench(n):
    gain = normal(n.Dh, dtype="float32")
    heads = normal(n.B, n.T, (n.H + 2 * n.Hk) * n.Dh)
    inputs = (heads, gain, gain, ids(n.T, n.B, n.T))
    return (Sample("heads", inputs, _attrs(n.H, n.Hk)),)


qk_norm_rope = Op(
    "qk_norm_rope",
    Implementation(forward, backward),
    check=check,
    samples=(
        Sample("mha", (normal(2, 5, 24), normal(4), normal(4), ids(9, 2, 5)), _attrs(2, 2), 4),
        Sample("gqa", (normal(1, 7, 64), normal(8), normal(8), ids(99, 1, 7)), _attrs(4, 2), 8),
        Sample("no_norm", (normal(2, 3, 24), None, None, ids(50, 2, 3)), _attrs(4, 1), 4),
    ),
    bench=bench,
)
