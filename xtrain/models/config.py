"""The shape of a Qwen3 decoder, under Hugging Face's names.

Only shapes: a configuration is the same on every device, and importing this costs nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Qwen3Config:
    """Width, depth and heads; the keys of a Hugging Face Qwen3 `config.json`."""

    hidden_size: int  # features of the residual stream, D
    intermediate_size: int  # features inside the SwiGLU, F
    num_hidden_layers: int  # blocks
    num_attention_heads: int  # query heads, H
    num_key_value_heads: int  # key and value heads, Hk; query head h reads kv head h // (H / Hk)
    head_dim: int  # features a head, Dh; even, because RoPE rotates pairs
    max_position_embeddings: int  # positions; the longest context, in tokens
    vocab_size: int = 50257  # tokens of the tokenizer; memory holds the next multiple of 64
    rms_norm_eps: float = 1e-6  # added to the mean square
    rope_theta: float = 10000.0  # base of the RoPE wavelengths, in positions
    tie_word_embeddings: bool = False  # whether the head is the embedding itself
    initializer_range: float = 0.02  # standard deviation of the initial matrices


# The least and the most that each size can be: beyond any such model, small enough to count with.
SIZES = {
    "hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 20),
    "num_hidden_layers": (1, 1 << 12),
    "num_attention_heads": (1, 1 << 12),
    "num_key_value_heads": (1, 1 << 12),
    "head_dim": (2, 1 << 12),
    "max_position_embeddings": (1, 1 << 24),
    "vocab_size": (1, 1 << 22),
}
# The same of the numbers; all have a float32 whose inverse and square have one, too.
NUMBERS = {
    "rms_norm_eps": (1e-18, 1.0),
    "rope_theta": (1e-3, 1e12),
    "initializer_range": (1e-18, 1e3),
}
