"""Parameters and training FLOPs of a model, from its configuration.

    FLOP a token = 6 x (core + head) + 6 x layers x width x seq     (causal half; width = H x Dh)

Forward and backward of a product are 6 FLOP a weight and token; attention's two products are
12 x width x seq a layer, of which a causal mask needs half. MFU is quoted with this convention;
what remat computes twice is not counted.
"""

from dataclasses import dataclass

from xtrain.models.config import Qwen3Config


@dataclass(frozen=True)
class Counts:
    """Parameters by part. core: everything but the embedding and the head."""

    core: int
    embedding: int
    head: int  # 0 when it is the embedding

    @property
    def total(self) -> int:
        """All parameters, as exported: of the true vocabulary, not the padded one."""
        return self.core + self.embedding + self.head


def count_parameters(config: Qwen3Config, qk_norm: bool = True) -> Counts:
    """Exact counts, norm gains included."""
    D, F, Dh = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * Dh, config.num_key_value_heads * Dh
    attention = D * q + 2 * D * kv + q * D + (2 * Dh if qk_norm else 0)
    block = attention + 3 * D * F + 2 * D
    vocabulary = config.vocab_size * D
    return Counts(
        core=config.num_hidden_layers * block + D,
        embedding=vocabulary,
        head=0 if config.tie_word_embeddings else vocabulary,
    )


def flops_per_token(config: Qwen3Config, seq_len: int, qk_norm: bool = True) -> int:
    """Training FLOPs of one token in a sequence of seq_len; the convention is at the top."""
    head = config.vocab_size * config.hidden_size  # multiplied even when it is the embedding
    core = count_parameters(config, qk_norm=qk_norm).core
    width = config.num_attention_heads * config.head_dim
    return 6 * (core + head) + 6 * config.num_hidden_layers * width * seq_len
