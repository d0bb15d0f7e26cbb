"""The bf16 products of a training step: cuBLAS's choice of algorithm against its other candidates.

Every product of a model's step is timed with the algorithm that cuBLAS chooses and with the first
CANDIDATES of cuBLASLt's heuristic, in turn, on random numbers. One that is faster by more than
LEAST_GAIN, in a second look too, is worth a line of the table that `xtrain.cuda.algorithms` reads;
`--write FILE` adds those lines to FILE.
"""

import json
import statistics
from pathlib import Path

import numpy as np

from benchmarks.result import Result, versions
from benchmarks.train_step import device_name
from xtrain.assemble.sized_step import Work, load_config
from xtrain.engine import device as devices
from xtrain.engine import rng
from xtrain.engine.dtype import bfloat16, float32
from xtrain.errors import UsageError

CANDIDATES = 8
LEAST_GAIN = 0.03
ROUNDS = 5
TURN_FLOP = 1e12  # of a turn, about 1.3 ms
HEAD_ROWS = 8192  # of the loss's chunks


def measure_products(work: Work, write: str | None) -> list[Result]:
    """Time every product; UsageError without a GPU or with fp32."""
    device = devices.use("cuda")
    if work.precision != "bf16":
        raise UsageError("products: the table is for bf16; leave --precision out")
    results, faster = [], {}
    for label, shape in _products(load_config(work.model, work.seq), work.tokens).items():
        result, key, algorithm = _measure(label, shape, work, device)
        results.append(result)
        if algorithm is not None:
            faster[key] = algorithm.hex()
    if write is not None:
        _add(Path(write), faster, device)
    return results


def _products(c, tokens: int) -> dict[str, tuple]:
    """(rows, columns, inner, transpose_a, transpose_b, adds) of a step's products by name."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    D, F, words = c.hidden_size, c.intermediate_size, -(-c.vocab_size // 64) * 64
    weights = {"qkv_proj": (q + 2 * kv, D, tokens), "o_proj": (D, q, tokens)}
    weights |= {"gate_up_proj": (2 * F, D, tokens), "down_proj": (D, F, tokens)}
    weights |= {"head": (words, D, min(tokens, HEAD_ROWS))}
    found = {}
    for name, (outer, inner, rows) in weights.items():
        found[f"{name}/forward"] = (rows, outer, inner, False, True, False)
        found[f"{name}/dx"] = (rows, inner, outer, False, False, False)
        found[f"{name}/dweight"] = (outer, inner, rows, True, False, True)
    return found


def _measure(label: str, shape: tuple, work: Work, device):
    """The result, the product's key, and the algorithm to prefer or None."""
    from xtrain.cuda import gemm

    rows, columns, inner, transpose_a, transpose_b, adds = shape
    xp, keys = device.xp, rng.key_array(device.xp, 1, 2, 0)

    def random(*sizes):
        drawn = rng.uniform(xp, sizes[0] * sizes[1], keys, 7) - np.float32(0.5)
        return drawn.astype(bfloat16).reshape(sizes)

    a = random(inner, rows) if transpose_a else random(rows, inner)
    b = random(columns, inner) if transpose_b else random(inner, columns)
    out = xp.zeros((rows, columns), float32 if adds else bfloat16)
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b, "beta": float(adds)}
    call = gemm.call_of(a, b, out, **flags)
    ways = {"cublas": lambda: gemm.by_cublas(call, a, b, out)}
    for algorithm in gemm.candidates(call, CANDIDATES):
        ways[algorithm] = lambda algorithm=algorithm: gemm.by_algorithm(call, algorithm, a, b, out)
    flop = 2.0 * rows * columns * inner
    times = _in_turn(ways, max(int(TURN_FLOP / flop), 1), device)
    default = times.pop("cublas")
    best = min(times, key=lambda each: times[each])
    again = _in_turn(
        {"cublas": ways["cublas"], best: ways[best]}, max(int(TURN_FLOP / flop), 1), device
    )
    gain = min(1 - times[best] / default, 1 - again[best] / again["cublas"])
    result = Result(
        name=f"products/{label}",
        work={"model": work.model, "rows": rows, "columns": columns, "inner": inner},
        device=device_name(device),
        unit="ms",
        ours=times[best] * 1e3,
        floor=None,
        peer=default * 1e3,
        ratio=1 / (1 - gain),
        rounds=ROUNDS,
        versions=versions(),
        detail={"tflop_s": flop / times[best] / 1e12, "candidate": list(times).index(best)},
    )
    return result, call.key, best if gain > LEAST_GAIN else None


def _in_turn(ways: dict, repeats: int, device) -> dict:
    """Median seconds of one run of each way, the ways taking turns."""
    cupy = device.xp
    times = {way: [] for way in ways}
    for turn in range(ROUNDS + 1):  # the first one warms up
        for way, run in ways.items():
            started, ended = cupy.cuda.Event(), cupy.cuda.Event()
            started.record()
            for _ in range(repeats):
                run()
            ended.record()
            ended.synchronize()
            if turn:
                times[way].append(cupy.cuda.get_elapsed_time(started, ended) / repeats / 1e3)
    return {way: statistics.median(found) for way, found in times.items()}


def _add(path: Path, faster: dict[str, str], device) -> None:
    """Add lines to the table, or begin one for this GPU and version of cuBLASLt."""
    from nvmath.bindings import cublasLt

    name = device.xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    start = {"device": name, "cublas_lt": cublasLt.get_version(), "algorithms": {}}
    found = json.loads(path.read_text()) if path.is_file() else start
    if {**found, "algorithms": None} != {**start, "algorithms": None}:
        raise UsageError(f"--write {path}: the table is of another GPU or cuBLASLt")
    found["algorithms"] |= faster
    found["algorithms"] = dict(sorted(found["algorithms"].items()))
    path.write_text(json.dumps(found, indent=1) + "\n")
