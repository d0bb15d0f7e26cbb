"""PyTorch's attention: forward and backward of one causal call, timed in turn with our kernels'."""

import math

from gates.judging.gate import NotMeasured
from xtrain.assemble.timing import Contender, interleave, paired_ratio
from xtrain.engine import ops
from xtrain.engine.device import Device
from xtrain.engine.dtype import bfloat16

SEQUENCES, TOKENS = 32, 1024
HEADS = {32: (40, 10), 64: (20, 5), 128: (10, 10)}  # query and key-value heads, by head dim
PEERS = {"sdpa": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def why_absent() -> NotMeasured | None:
    """The reason why PyTorch cannot be timed here, or None."""
    try:
        import torch
    except ImportError:
        return NotMeasured("torch is not installed (xtrain[peers])")
    return None if torch.cuda.is_available() else NotMeasured("torch sees no GPU")


def ratios(here: Device, head_dim: int, *, rounds: int = 5, steps: int = 10) -> dict[str, float]:
    """How many times as fast ours is as each of PEERS, at bf16 and 32 x 1024 tokens."""
    contenders = {"ours": _ours(here, head_dim)}
    contenders |= {name: _peer(backend, head_dim) for name, backend in PEERS.items()}
    taken = interleave(contenders, rounds=rounds, steps=steps, warm_up=3)
    return {name: paired_ratio(taken[name], taken["ours"]) for name in PEERS}


def _ours(here: Device, head_dim: int) -> Contender:
    xp = here.xp
    heads, kv_heads = HEADS[head_dim]
    source = xp.random.RandomState(head_dim)

    def draw(count):
        shape = (SEQUENCES, count, TOKENS, head_dim)
        return source.standard_normal(shape, dtype=xp.float32).astype(bfloat16)

    q, k, v, dy = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    dy = dy.swapaxes(1, 2).copy().swapaxes(1, 2)  # as the projection's gradient lies
    chosen = ops.attention.implementation((q, k, v))

    def step():
        _, saved = chosen.forward(xp, q, k, v, None, None)
        return chosen.backward(xp, dy, saved)

    return Contender(step, here.synchronize)


def _peer(backend: str, head_dim: int) -> Contender:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    heads, kv_heads = HEADS[head_dim]
    torch.manual_seed(head_dim)

    def draw(count, **options):
        shape = (SEQUENCES, count, TOKENS, head_dim)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, **options)

    q, k, v = (draw(count, requires_grad=True) for count in (heads, kv_heads, kv_heads))
    dy = draw(heads)

    def step():
        with sdpa_kernel(getattr(SDPBackend, backend)):
            y = scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True, scale=1 / math.sqrt(head_dim)
            )
        return torch.autograd.grad(y, (q, k, v), dy)

    return Contender(step, torch.cuda.synchronize)
