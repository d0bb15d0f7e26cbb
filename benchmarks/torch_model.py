"""The peer: the same Qwen3-style decoder in plain PyTorch, as a user would train it instead.

Fused q/k/v and gate/up products, QK-norm, RoPE, SDPA with grouped queries, cross-entropy over all
logits, fused AdamW with decay on matrices, gradient clipping; bf16 by autocast over fp32 weights;
compiled unless asked otherwise. The vocabulary is the tokenizer's, unpadded, as a user's would be.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from xtrain.models.config import Qwen3Config


class Block(nn.Module):
    def __init__(self, c: Qwen3Config):
        super().__init__()
        self.c = c
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.qkv_proj = nn.Linear(c.hidden_size, q + 2 * kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.o_proj(self.attention(self.input_layernorm(x), cos, sin))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)

    def attention(self, x, cos, sin):
        c = self.c
        B, T, _ = x.shape
        H, Hk, Dh = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q, k, v = self.qkv_proj(x).view(B, T, H + 2 * Hk, Dh).split([H, Hk, Hk], 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        y = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=Hk != H
        )
        return y.transpose(1, 2).reshape(B, T, H * Dh)


class Decoder(nn.Module):
    def __init__(self, c: Qwen3Config, vocab_size: int, seq: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, vocab_size, bias=False)
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(seq).float(), frequency)  # (T, Dh / 2)
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=c.initializer_range)

    def forward(self, ids, targets):
        x = self.embed_tokens(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@dataclass
class TorchStep:
    """A training step of the peer: model, optimizer and a fixed batch on its device."""

    run: object
    parameters: list
    optimizer: torch.optim.Optimizer
    ids: torch.Tensor
    targets: torch.Tensor
    bf16: bool

    def __call__(self):
        device = self.ids.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bf16):
            loss = self.run(self.ids, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_step(
    c: Qwen3Config,
    ids,
    targets,
    *,
    device: str,
    bf16: bool,
    compiled: bool,
    vocab_size: int,
    learning_rate: float,
) -> TorchStep:
    """A step on NumPy ids and targets (B, T) int32; fp32 products are fp32, as ours are."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model = Decoder(c, vocab_size, ids.shape[1]).to(device)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    return TorchStep(
        torch.compile(model) if compiled else model,
        parameters,
        optimizer,
        torch.from_numpy(ids).to(device, torch.int64),
        torch.from_numpy(targets).to(device, torch.int64),
        bf16,
    )
