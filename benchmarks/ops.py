"""Every op of a training step at the sizes of a model: time of forward and backward, and the floor.

The floor of an op is the larger of its products over the measured matrix rate and its bytes (inputs
and saved arrays read, outputs and gradients written, each once) over the measured copy rate. On a
GPU a few runs of the op are captured in one graph, so that no host time is counted.
"""

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import floor
from benchmarks.result import Result, versions
from benchmarks.train_step import Work, device_name, load_config
from xtrain.engine import device as devices
from xtrain.engine import ops, rng
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.tensor import SEED
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config

REPEATS = 4  # runs of an op in one timed call
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """An op on arrays of a model's sizes. label: which of the op's uses this is."""

    op: object
    label: str
    inputs: tuple
    attrs: dict
    differentiable: bool = True


def measure_ops(work: Work, only: str | None) -> list[Result]:
    """Time every case, or those of one op; UsageError when there is none of that name."""
    device = devices.use("auto")
    config = load_config(work.model, work.seq)
    makers = _makers(config, work, device)
    chosen = [m for m in makers if only is None or m.__name__ == only]
    if not chosen:
        names = ", ".join(sorted({m.__name__ for m in makers}))
        raise UsageError(f"--op {only}: choose one of {names}")
    rates = floor.measured_rates(device, work.precision)
    return [
        result
        for maker in chosen
        for case in maker()
        for result in _measure_case(case, work, device, rates)
    ]


def _makers(c: Qwen3Config, work: Work, device) -> list:
    """Functions that build the cases of one op each; arrays live only while their op is timed."""
    xp, B, T, D = device.xp, work.batch, work.seq, c.hidden_size
    H, Hk, Dh, F = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size
    words = -(-c.vocab_size // 64) * 64
    dtype = bfloat16 if work.precision == "bf16" else float32
    key = rng.key_array(xp, 1, 2, 0)

    def normal(*shape, dtype=dtype):
        size = int(np.prod(shape))
        return (rng.uniform(xp, size, key, 7) - np.float32(0.5)).astype(dtype).reshape(shape)

    def token_ids():
        drawn = np.random.default_rng(0).integers(0, c.vocab_size, (B, T))
        return device.array(drawn.astype(np.int32))

    def embedding():
        yield Case(ops.embedding, "tokens", (normal(words, D), token_ids()), {})

    def add_rms_norm():
        gain = normal(D, dtype=float32)
        inputs = (normal(B, T, D), normal(B, T, D), gain)
        yield Case(ops.add_rms_norm, "residual", inputs, {"eps": 1e-6})

    def linear():
        sizes = {
            "qkv_proj": (D, (H + 2 * Hk) * Dh),
            "o_proj": (H * Dh, D),
            "gate_up_proj": (D, 2 * F),
            "down_proj": (F, D),
        }
        for name, (inner, outer) in sizes.items():
            yield Case(ops.linear, name, (normal(B, T, inner), normal(outer, inner)), {})

    def qk_norm_rope():
        gains = (normal(Dh, dtype=float32), normal(Dh, dtype=float32))
        positions = xp.broadcast_to(xp.arange(T, dtype=np.int32), (B, T))
        attrs = {"heads": H, "kv_heads": Hk, "eps": 1e-6, "theta": c.rope_theta}
        inputs = (normal(B, T, (H + 2 * Hk) * Dh), *gains, positions)
        yield Case(ops.qk_norm_rope, "heads", inputs, attrs)

    def attention():
        inputs = (normal(B, H, T, Dh), normal(B, Hk, T, Dh), normal(B, Hk, T, Dh), None, None)
        yield Case(ops.attention, "causal", inputs, {})

    def swiglu():
        yield Case(ops.swiglu, "gate", (normal(B, T, 2 * F),), {})

    def dropout():
        yield Case(ops.dropout, "stream", (normal(B, T, D), key), {"p": 0.1, "site": 3})

    def linear_cross_entropy():
        weight = normal(words, D)
        into = xp.zeros(weight.shape, np.float32)
        inputs = (normal(B, T, D), weight, token_ids(), xp.ones((), np.float32))
        attrs = {"vocab_size": c.vocab_size, "dweight_into": into}
        yield Case(ops.linear_cross_entropy, "head", inputs, attrs, differentiable=False)

    def global_norm():
        yield Case(ops.global_norm, "gradient", (_flat(c, normal),), {}, differentiable=False)

    def adamw():
        buffers = tuple(_flat(c, normal) for _ in range(3))
        second = xp.abs(_flat(c, normal))
        copy = xp.empty(second.size, bfloat16) if dtype == bfloat16 else None
        hyper = device.array(np.array([1e-3, 0.1, 0.2, 1.0, 1.0], np.float32))
        attrs = {"decayed": second.size, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        inputs = (*buffers, second, hyper, copy)
        attrs |= {"weight_decay": 0.1}
        yield Case(ops.adamw, "buffers", inputs, attrs, differentiable=False)

    return [
        embedding,
        add_rms_norm,
        linear,
        qk_norm_rope,
        attention,
        swiglu,
        dropout,
        linear_cross_entropy,
        global_norm,
        adamw,
    ]


def _flat(c: Qwen3Config, normal):
    """A buffer of as many elements as the model has, fp32, at most 2**29 of them."""
    count = floor.core_products(c) + 2 * c.vocab_size * c.hidden_size
    return normal(min(count // 64 * 64, 1 << 29), dtype=float32)


def _measure_case(case: Case, work: Work, device, rates: floor.Rates) -> list[Result]:
    chosen, xp = case.op.implementation(case.inputs), device.xp
    y, saved = chosen.forward(xp, *case.inputs, **case.attrs)
    results = [
        _result(
            case,
            "forward",
            lambda: chosen.forward(xp, *case.inputs, **case.attrs),
            floor.op_bytes(case.op.name, case.inputs, y, mutates=case.op.mutates),
            work,
            device,
            rates,
        )
    ]
    if case.differentiable:
        dy = _ones_like(xp, y)
        extra = {}
        if chosen.accumulates:
            shapes = [case.inputs[i].shape for i in chosen.accumulates]
            extra["into"] = tuple(xp.zeros(shape, np.float32) for shape in shapes)

        def backward():
            return chosen.backward(xp, dy, saved, **extra, **case.attrs)

        gradients = backward()
        into = extra.get("into")
        bytes_moved = floor.op_backward_bytes(case.op.name, dy, saved, gradients, into)
        results.append(_result(case, "backward", backward, bytes_moved, work, device, rates))
    return [replace(r, detail=r.detail | {"kernel": chosen.name}) for r in results]


def _ones_like(xp, y):
    if isinstance(y, tuple):
        return tuple(xp.ones_like(each) for each in y)
    return SEED if y.ndim == 0 else xp.ones_like(y)


def _result(case, direction, function, bytes_moved, work, device, rates) -> Result:
    flop = floor.op_flop(case.op.name, case.inputs, case.attrs, direction)
    seconds = _time(function, device)
    floor_s = rates.floor_s(flop=flop, bytes_moved=bytes_moved)
    return Result(
        name=f"ops/{case.op.name}/{case.label}/{direction}",
        work={"model": work.model, "batch": work.batch, "seq": work.seq, "dtype": work.precision},
        device=device_name(device),
        unit="ms",
        ours=seconds * 1e3,
        floor=floor_s * 1e3,
        rounds=ROUNDS,
        versions=versions(),
        detail={
            "of_floor": floor_s / seconds,
            "gb_s": bytes_moved / seconds / 1e9,
            "tflop_s": flop / seconds / 1e12,
        },
    )


def _time(function, device) -> float:
    """Median seconds of one run of `function`."""
    marker = device.xp.zeros((), np.float32)

    def several():
        for _ in range(REPEATS):
            function()
        return marker

    run = device.capture(several)
    for _ in range(4):
        run()
    device.synchronize()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        device.synchronize()
        times.append((time.perf_counter() - started) / REPEATS)
    return statistics.median(times)
