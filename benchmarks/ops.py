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
from benchmarks.train_step import device_name
from xtrain.assemble.sized_step import Work, load_config
from xtrain.engine import device as devices
from xtrain.engine import ops, rng  # noqa: F401  declares the ops
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.op import OPS, Op, Sample, Sizes, Spec
from xtrain.engine.tensor import SEED
from xtrain.engine.testing import draw_spec
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.models.counts import count_parameters

REPEATS = 4  # runs of an op in one timed call
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """One use of an op in a training step, on arrays of a model's sizes."""

    op: Op
    label: str
    inputs: tuple
    attrs: dict

    @property
    def differentiable(self) -> bool:
        """Whether there is a backward to time: a loss may have made its gradients in forward."""
        return self.op.reference.backward is not None and "dweight_into" not in self.attrs


def measure_ops(work: Work, only: str | None) -> list[Result]:
    """Time every op that says how a step uses it, or one; UsageError when none has that name."""
    device = devices.use("auto")
    sizes = _sizes(load_config(work.model, work.seq), work)
    chosen = {n: op for n, op in OPS.items() if op.bench and (only is None or n == only)}
    if not chosen:
        names = ", ".join(sorted(name for name, op in OPS.items() if op.bench))
        raise UsageError(f"--op {only}: choose one of {names}")
    rates = floor.measured_rates(device, work.precision)
    dtype = bfloat16 if work.precision == "bf16" else float32
    return [
        result
        for op in chosen.values()
        for sample in op.bench(sizes)
        for result in _measure_case(_draw(op, sample, device, dtype), work, device, rates)
    ]


def _sizes(c: Qwen3Config, work: Work) -> Sizes:
    """The sizes of a step; at most 2**29 parameters, so that every buffer has room."""
    parameters = count_parameters(c).total
    return Sizes(
        B=work.batch,
        T=work.seq,
        D=c.hidden_size,
        H=c.num_attention_heads,
        Hk=c.num_key_value_heads,
        Dh=c.head_dim,
        F=c.intermediate_size,
        V=c.vocab_size,
        rows=-(-c.vocab_size // 64) * 64,
        parameters=min(parameters // 64 * 64, 1 << 29),
    )


def _draw(op: Op, sample: Sample, device, dtype) -> Case:
    """The sample on the device; equal Specs share an array, so a step's bytes are what it needs."""
    drawn: dict[int, object] = {}
    arrays = [
        None if spec is None else _draw_one(spec, drawn, device, dtype) for spec in sample.inputs
    ]
    attrs = {
        name: _draw_one(value, drawn, device, dtype) if isinstance(value, Spec) else value
        for name, value in sample.attrs.items()
    }
    return Case(op, sample.name, tuple(arrays), attrs)


def _draw_one(spec: Spec, drawn: dict, device, dtype):
    """An array for a Spec, made on the device: the host would take minutes for v12's."""
    xp, own = device.xp, float32 if spec.dtype == "float32" else dtype
    size = int(np.prod(spec.shape))
    key = rng.key_array(xp, 1, 2, len(drawn))
    drawn[len(drawn)] = spec
    match spec.kind:
        case "normal" | "positive":
            shift = np.float32(0.5 if spec.kind == "normal" else 0)
            return (rng.uniform(xp, size, key, 7) - shift).astype(own).reshape(spec.shape)
        case "ids":
            return (rng.uniform(xp, size, key, 7) * spec.high).astype(np.int32).reshape(spec.shape)
        case "zeros":
            return xp.zeros(spec.shape, own)
        case "copy":  # the narrow copy of weights, where there is one
            return xp.empty(spec.shape, bfloat16) if dtype == bfloat16 else None
    return device.array(draw_spec(spec, np.random.default_rng(0), own))


def _measure_case(case: Case, work: Work, device, rates: floor.Rates) -> list[Result]:
    chosen, xp = case.op.implementation(case.inputs), device.xp
    y, saved = chosen.forward(xp, *case.inputs, **case.attrs)
    results = [
        _result(
            case,
            "forward",
            lambda: chosen.forward(xp, *case.inputs, **case.attrs),
            floor.op_bytes(case.op, case.inputs, y),
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
        bytes_moved = floor.op_backward_bytes(case.op, dy, saved, gradients, into)
        results.append(_result(case, "backward", backward, bytes_moved, work, device, rates))
    return [replace(r, detail=r.detail | {"kernel": chosen.name}) for r in results]


def _ones_like(xp, y):
    if isinstance(y, tuple):
        return tuple(xp.ones_like(each) for each in y)
    return SEED if y.ndim == 0 else xp.ones_like(y)


def _result(case, direction, function, bytes_moved, work, device, rates) -> Result:
    flop = floor.op_flop(case.op, case.inputs, case.attrs, direction)
    seconds = _time(function, device)
    floor_s = rates.floor_s(flop=flop, bytes_moved=bytes_moved)
    detail = {
        "of_floor": floor_s / seconds,
        "gb_s": bytes_moved / seconds / 1e9,
        "tflop_s": flop / seconds / 1e12,
    }
    if not flop:  # it only moves bytes: its speed as a share of a copy's
        detail["of_copy"] = bytes_moved / seconds / rates.bytes
    return Result(
        name=f"ops/{case.op.name}/{case.label}/{direction}",
        work={"model": work.model, "batch": work.batch, "seq": work.seq, "dtype": work.precision},
        device=device_name(device),
        unit="ms",
        ours=seconds * 1e3,
        floor=floor_s * 1e3,
        rounds=ROUNDS,
        versions=versions(),
        detail=detail,
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
