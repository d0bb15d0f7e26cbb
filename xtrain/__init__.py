"""xtrain: train small Qwen3-style language models on our own engine, judged by executable gates."""

__version__ = "0.1.0"
