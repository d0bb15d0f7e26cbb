"""What a training step must at least cost: products and bytes over the rates the device reaches.

FLOP of a token = 6 (core + head) + 6 layers width seq: forward and backward of every product, and
of causal attention's half. Optimizer bytes of a parameter: master, gradient and two moments read
and written, and the bf16 copy written. The rates are measured here (CPU) or given (GPU), so the
floor is one that this machine could reach, not a datasheet's.
"""

import time
from dataclasses import dataclass

import numpy as np

from xtrain.models.config import Qwen3Config

H200_FLOPS = 790e12  # bf16 products a second, measured on an H200, driver 580, CUDA 13
H200_FP32_FLOPS = 50e12  # fp32 products a second without TF32; the datasheet's 67e12 is not reached
H200_BYTES = 4.2e12  # bytes read and written a second by a copy, same machine


@dataclass(frozen=True)
class Rates:
    """Products and memory traffic that a device reaches: FLOP and bytes a second."""

    flops: float
    bytes: float


def flop_per_token(config: Qwen3Config, seq: int) -> float:
    """Forward and backward FLOP of one token in a sequence of `seq`."""
    width = config.num_attention_heads * config.head_dim
    products = core_products(config) + config.vocab_size * config.hidden_size
    return 6.0 * products + 6.0 * config.num_hidden_layers * width * seq


def core_products(c: Qwen3Config) -> int:
    """Elements of the blocks' matrices, each one multiply-add a token."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    block = c.hidden_size * (2 * q + 2 * kv) + 3 * c.hidden_size * c.intermediate_size
    return c.num_hidden_layers * block


def step_floor_s(
    config: Qwen3Config, *, tokens: int, seq: int, parameters: int, precision: str, rates: Rates
) -> float:
    """Seconds a step of `tokens` must take: products, then one pass of the optimizer."""
    traffic = parameters * (32 + (2 if precision == "bf16" else 0))
    return tokens * flop_per_token(config, seq) / rates.flops + traffic / rates.bytes


def gpu_rates(precision: str) -> Rates:
    return Rates(H200_FLOPS if precision == "bf16" else H200_FP32_FLOPS, H200_BYTES)


def cpu_rates() -> Rates:
    """The best of five: an fp32 product of 1024 x 1024 and a copy of 64 MiB, by NumPy."""
    a = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    out, source = np.empty_like(a), np.ones(1 << 24, np.float32)
    target = np.zeros_like(source)
    product = min(_seconds(np.matmul, a, a, out) for _ in range(5))
    copy = min(_seconds(np.copyto, target, source) for _ in range(5))
    return Rates(2 * 1024.0**3 / product, 2 * source.nbytes / copy)


def _seconds(function, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started
