"""Qwen3, the dense decoder: one forward for training, evaluation, prefill and decoding.

    residual = embed(ids)
    each block:  residual += attention(rms_norm(residual));  residual += mlp(rms_norm(residual))
    hidden = rms_norm(residual);  logits = hidden @ head.T

Names are Hugging Face's (`self_attn.q_proj`, `input_layernorm`, ...). q/k/v and gate/up are one
product each; the residual sum is fused into the norm that follows it, so a block takes and returns
the pair (delta, residual).
Source: Qwen3 technical report, arXiv:2505.09388; the original checks against transformers' Qwen3.
"""

import math
from dataclasses import dataclass

from xtrain.engine import device, ops, rng
from xtrain.engine.remat import remat
from xtrain.engine.tensor import Tensor, is_recording
from xtrain.models.config import Qwen3Config
from xtrain.nn.layers import Embedding, Linear, RMSNorm
from xtrain.nn.module import Module


@dataclass(frozen=True)
class Context:
    """What every block of one forward shares.

    positions: (B, T) int32.  starts: (B, T) int32 or None.  offsets: (B,) int32 tokens already in
    the cache, or None.  key: uint32 (4,) for dropout, None in evaluation.
    """

    positions: object
    starts: object = None
    offsets: object = None
    cache: object = None
    key: object = None


class Attention(Module):
    def __init__(self, config: Qwen3Config, layer: int, *, qk_norm: bool):
        self.config, self.layer = config, layer
        c, Dh = config, config.head_dim
        std = c.initializer_range
        q, kv = c.num_attention_heads * Dh, c.num_key_value_heads * Dh
        self.qkv_proj = Linear(c.hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, std=std)
        self.o_proj = Linear(q, c.hidden_size, std=residual_std(c))
        self.q_norm = RMSNorm(Dh, eps=c.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(Dh, eps=c.rms_norm_eps) if qk_norm else None

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        c = self.config
        q, k, v = ops.qk_norm_rope(
            self.qkv_proj(x),
            self.q_norm and self.q_norm.weight,
            self.k_norm and self.k_norm.weight,
            context.positions,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            eps=c.rms_norm_eps,
            theta=c.rope_theta,
        )  # (B, H, T, Dh), (B, Hk, T, Dh) twice
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # (B, Hk, S, Dh) twice
        y = ops.attention(q, k, v, context.starts, context.offsets)
        return self.o_proj(ops.merge_heads(y))


class MLP(Module):
    def __init__(self, config: Qwen3Config):
        F, std = config.intermediate_size, config.initializer_range
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": F, "up_proj": F}, std=std)
        self.down_proj = Linear(F, config.hidden_size, std=residual_std(config))

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class Block(Module):
    def __init__(self, config: Qwen3Config, layer: int, *, qk_norm, remat_mode, dropout):
        self.self_attn = Attention(config, layer, qk_norm=qk_norm)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.remat_mode, self.dropout = remat_mode, dropout
        self.sites = tuple(rng.site_of(f"dropout/{layer}/{part}") for part in ("attn", "mlp"))

    def __call__(self, stream: tuple, context: Context) -> tuple:
        """stream: (residual,) before the first block, else (delta, residual), each (B, T, D)."""
        if self.remat_mode == "block":
            return remat(
                lambda *s: self.mlp_half(*self.attention_half(s, context), context), *stream
            )
        delta, residual = self.attention_half(stream, context)
        if self.remat_mode == "mlp":
            return remat(lambda d, r: self.mlp_half(d, r, context), delta, residual)
        return self.mlp_half(delta, residual, context)

    def attention_half(self, stream: tuple, context: Context) -> tuple:
        if len(stream) == 1:
            residual = stream[0]
            x = self.input_layernorm(residual)
        else:
            x, residual = self.input_layernorm.add(*stream)
        return self.drop(self.self_attn(x, context), context, 0), residual

    def mlp_half(self, delta: Tensor, residual: Tensor, context: Context) -> tuple:
        x, residual = self.post_attention_layernorm.add(delta, residual)
        return self.drop(self.mlp(x), context, 1), residual

    def drop(self, x: Tensor, context: Context, which: int) -> Tensor:
        if context.key is None or self.dropout == 0:
            return x
        return ops.dropout(x, context.key, p=self.dropout, site=self.sites[which])


class Qwen3(Module):
    """The model. Its parameters have shapes at once and storage after `FlatBuffers` placed them."""

    def __init__(
        self, config: Qwen3Config, *, qk_norm=True, remat_mode: str = "none", dropout: float = 0.0
    ):
        self.config = config
        std = config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, std=std)
        self.layers = [
            Block(config, i, qk_norm=qk_norm, remat_mode=remat_mode, dropout=dropout)
            for i in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size, std=std)

    @property
    def head_weight(self):
        """(Vpad, D): the output head, which is the embedding itself when they are tied."""
        return (self.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight

    def __call__(self, input_ids, *, starts=None, cache=None, key=None) -> Tensor:
        """Final hidden states (B, T, D) of input_ids (B, T) int32.

        starts: (B, T) int32, first position of each token's document (None: one document a row).
        cache: earlier keys and values; the new ones are appended.  key: dropout key, None = off.
        """
        xp = device.current().xp
        offsets = None if cache is None else cache.lengths
        positions = xp.broadcast_to(xp.arange(input_ids.shape[1], dtype=xp.int32), input_ids.shape)
        if offsets is not None:
            positions = positions + offsets[:, None]
        if starts is not None:
            positions = positions - starts
        positions = xp.ascontiguousarray(positions)  # once for all layers
        context = Context(positions, starts, offsets, cache, key)
        stream = (self.embed_tokens(input_ids),)
        for block in self.layers:
            stream = block(stream, context)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        return self.norm.add(*stream)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) scores of the real words, without the tape: for sampling and parity checks."""
        scores = ops.linear(hidden.detach(), self.head_weight.detach())
        return Tensor(scores.data[..., : self.config.vocab_size])

    def loss(self, hidden: Tensor, targets, scale) -> Tensor:
        """scale * summed cross-entropy, () float64; must be what `backward()` starts from."""
        weight = self.head_weight
        return ops.linear_cross_entropy(
            hidden,
            weight,
            targets,
            scale,
            vocab_size=self.config.vocab_size,
            dweight_into=weight.grad if is_recording() else None,
        )

    def token_logprob(self, hidden: Tensor, targets) -> Tensor:
        """log p(target) of each position, (B, T) fp32; 0 where the target is ignored."""
        return ops.token_logprob(
            hidden, self.head_weight, targets, vocab_size=self.config.vocab_size
        )


def residual_std(config: Qwen3Config) -> float:
    """Initial spread of the products that write to the residual stream.

    Scaled by 1 / sqrt(2 layers), so that the stream's variance does not grow with depth (GPT-2,
    Radford et al. 2019, section 2.3).
    """
    return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
