"""The same Qwen3-style decoder in plain PyTorch, as a user would train it instead.

Fused q/k/v and gate/up products, QK-norm, RoPE, SDPA with grouped queries, cross-entropy over all
logits, fused AdamW with decay on matrices, gradient clipping; bf16 by autocast over fp32 weights.

    make_step       a step as it is told: eager or compiled, with so many words in the vocabulary
    strongest_step  compiled, in the form that is fastest on a GPU: the vocabulary padded to a
                    multiple of 64, the faster of flash's and cuDNN's attention at its shape, and
                    CUDA graphs where the model is small; `description` says which it was
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from xtrain.assemble.sized_step import LEARNING_RATE
from xtrain.assemble.timing import Contender
from xtrain.models.config import Qwen3Config
from xtrain.models.counts import count_parameters

WORD_MULTIPLE = 64  # of the vocabulary, as users of PyTorch pad it for the tensor cores
SMALL_MODEL = 100_000_000  # parameters below which launches cost more than what they launch
BACKENDS = ("flash", "cudnn")  # of attention, as torch.backends.cuda names them


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
    """A training step of the peer: model, optimizer and fixed micro-batches on its device.

    ids, targets: (A, B, T) int64; the A micro-batches make one update.
    """

    run: object
    parameters: list
    optimizer: torch.optim.Optimizer
    ids: torch.Tensor
    targets: torch.Tensor
    bf16: bool
    description: str
    graphs: bool = False

    def __call__(self):
        device, count = self.ids.device.type, self.ids.shape[0]
        total = 0.0
        for ids, targets in zip(self.ids, self.targets, strict=True):
            if self.graphs:  # what the last micro-batch returned may be overwritten
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(device, torch.bfloat16, enabled=self.bf16):
                loss = self.run(ids, targets) / count
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def make_step(
    c: Qwen3Config,
    ids,
    targets,
    *,
    device: str,
    bf16: bool,
    mode: str,
    words: int,
    learning_rate: float,
) -> TorchStep:
    """A step on NumPy ids and targets (A, B, T) int32; fp32 products are fp32, as ours are.

    mode: eager, or a mode of torch.compile such as default.  words: rows of the vocabulary.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model = Decoder(c, words, ids.shape[2]).to(device)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    return TorchStep(
        model if mode == "eager" else torch.compile(model, mode=mode),
        parameters,
        optimizer,
        torch.from_numpy(ids).to(device, torch.int64),
        torch.from_numpy(targets).to(device, torch.int64),
        bf16,
        f"{mode}, {words} words",
        graphs=mode == "reduce-overhead",
    )


def strongest_step(
    c: Qwen3Config, ids, targets, *, device: str, bf16: bool, learning_rate: float
) -> TorchStep:
    """The compiled step in the form that is fastest there; see the module."""
    words = -(-c.vocab_size // WORD_MULTIPLE) * WORD_MULTIPLE
    chosen = _choose_attention(c, ids.shape[1:]) if device == "cuda" and bf16 else None
    small = count_parameters(c).total < SMALL_MODEL and device == "cuda"
    step = make_step(
        c,
        ids,
        targets,
        device=device,
        bf16=bf16,
        mode="reduce-overhead" if small else "default",
        words=words,
        learning_rate=learning_rate,
    )
    named = f"compiled ({step.description.partition(',')[0]}), {words} words"
    step.description = named + (f", {chosen} attention" if chosen else "")
    return step


def contender(c: Qwen3Config, batch, *, device: str) -> Contender:
    """The eager fp32 step on the micro-batches of `batch` (A, B, T), to be timed beside ours."""
    arrays = batch["input_ids"], batch["targets"]
    options = {"mode": "eager", "words": c.vocab_size, "learning_rate": LEARNING_RATE}
    step = make_step(c, *arrays, device=device, bf16=False, **options)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Contender(step, wait)


def _choose_attention(c: Qwen3Config, shape: tuple[int, int]) -> str:
    """Leave the faster of flash and cuDNN as the only attention of this process; its name."""
    times = {name: _attention_ms(c, shape, name) for name in BACKENDS}
    best = min(times, key=lambda name: times[name])
    _allow(best)
    return best


def _attention_ms(c: Qwen3Config, shape: tuple[int, int], name: str) -> float:
    """Milliseconds of forward and backward; infinite where the backend does not take the shape."""
    _allow(name)
    (B, T), Dh = shape, c.head_dim
    sizes = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
    q, k, v = (
        torch.randn(B, T, heads, Dh, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in sizes
    )
    times = []
    try:
        for _ in range(6):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=sizes[0] != sizes[1]
            )
            y.backward(y.detach())
            ended.record()
            ended.synchronize()
            times.append(started.elapsed_time(ended))
    except RuntimeError:
        return float("inf")
    return min(times[1:])


def _allow(name: str) -> None:
    for backend in (*BACKENDS, "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(backend == name)
