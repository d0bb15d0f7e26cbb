"""What work must at least cost: products and bytes over the rates that the device reaches.

FLOPs of a token: `xtrain.models.counts`. Optimizer bytes of a parameter: master, gradient and two
moments read and written, and the bf16 copy written. The rates are measured where the benchmark
runs, so the floor is one that this machine could reach, not a datasheet's.
"""

import time
from dataclasses import dataclass

import numpy as np

from xtrain.engine import ops
from xtrain.engine.op import Op
from xtrain.models.config import Qwen3Config
from xtrain.models.counts import flops_per_token

MFU_FLOPS = 790e12  # by convention: bf16 products a second of an H200, measured at 8192 cubed


@dataclass(frozen=True)
class Rates:
    """Products and memory traffic that a device reaches: FLOP and bytes a second."""

    flops: float
    bytes: float

    def floor_s(self, *, flop: float, bytes_moved: float) -> float:
        """Seconds of the larger of the two, for work that overlaps both."""
        return max(flop / self.flops, bytes_moved / self.bytes)


def step_floor_s(
    config: Qwen3Config, *, tokens: int, seq: int, parameters: int, precision: str, rates: Rates
) -> float:
    """Seconds a step of `tokens` must take: products, then one pass of the optimizer."""
    traffic = parameters * (32 + (2 if precision == "bf16" else 0))
    return tokens * flops_per_token(config, seq) / rates.flops + traffic / rates.bytes


def op_flop(op: Op, inputs: tuple, attrs: dict, direction: str) -> float:
    """FLOP of the products in one op; 0 for ops that only move and combine bytes."""
    return 0.0 if op.flop is None else op.flop(inputs, attrs, direction)


def op_bytes(op: Op, inputs: tuple, outputs) -> float:
    """Bytes that a forward must read and write; inputs that it mutates are both."""
    if op.moved is not None:
        return op.moved("forward", inputs, outputs)
    if op.mutates:
        return nbytes(inputs) + nbytes([inputs[i] for i in op.mutates])
    return nbytes(inputs) + nbytes(outputs)


def op_backward_bytes(op: Op, dy, saved, gradients, into) -> float:
    """Bytes that a backward must move; buffers that are added to are read and written."""
    if op.moved is not None:
        return op.moved("backward", dy, gradients)
    return nbytes((dy, saved, gradients)) + 2 * nbytes(into)


def nbytes(arrays) -> float:
    """Bytes of all arrays in a nest of tuples, each counted once."""
    return float(sum({id(a): a.nbytes for a in flatten(arrays)}.values()))


def flatten(nest):
    """The arrays in a nest of tuples, lists and other things."""
    if isinstance(nest, (tuple, list)):
        for item in nest:
            yield from flatten(item)
    elif hasattr(nest, "nbytes") and hasattr(nest, "shape"):
        yield nest


def measured_rates(device, precision: str = "fp32") -> Rates:
    """The best of five of a product and of a copy on the device, in the given precision."""
    return _cpu_rates() if device.name == "cpu" else _gpu_rates(device, precision)


def _cpu_rates() -> Rates:
    a = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    out, source = np.empty_like(a), np.ones(1 << 24, np.float32)
    target = np.zeros_like(source)
    # Ours first: BLAS's threads go on spinning for a while, and take its cores from it.
    products = (lambda: ops.linear.run(a, a), lambda: np.matmul(a, a, out))
    product = min(_seconds(each) for each in products for _ in range(5))
    copy = min(_seconds(lambda: np.copyto(target, source)) for _ in range(5))
    return Rates(2 * 1024.0**3 / product, 2 * source.nbytes / copy)


def _gpu_rates(device, precision: str) -> Rates:
    from xtrain.cuda.gemm import gemm
    from xtrain.engine.dtype import bfloat16, float32

    size = 8192 if precision == "bf16" else 4096
    drawn = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    a = device.array(drawn).astype(bfloat16 if precision == "bf16" else float32)
    out, source = device.xp.empty_like(a), device.xp.ones(1 << 28, np.float32)
    target = device.xp.zeros_like(source)

    def product():
        for _ in range(10):
            gemm(a, a, out)
        device.synchronize()

    def copy():
        for _ in range(10):
            target[...] = source
        device.synchronize()

    product(), copy()
    product_s = min(_seconds(product) for _ in range(5)) / 10
    copy_s = min(_seconds(copy) for _ in range(5)) / 10
    return Rates(2 * float(size) ** 3 / product_s, 2 * source.nbytes / copy_s)


def _seconds(function) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
