"""How `phase=decode` continues a prompt: values only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """Length and sampling of a continuation; the noise comes from the run's seed."""

    max_new_tokens: int = 128  # at most; a text may end sooner
    temperature: float = 0.8  # divides the logits; 0 = greedy
    top_k: int | None = 50  # keep the k best words; null = all
    top_p: float | None = None  # keep the best words that reach probability p; null = all
