"""CUDA C++ kernels of memory-bound ops, run on the host's threads: their algebra and their indices.

The host's compiler takes the .cu file after a header that stands for CUDA; the few device functions
that are PTX are replaced by what they compute. What only a GPU shows is not tested here: races that
a host's memory hides, registers, speed.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from xtrain.cuda.compile import nvrtc
from xtrain.engine import ops
from xtrain.engine.dtype import bfloat16, float32, float64
from xtrain.engine.testing import relative_error, tolerance

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels with")
SOURCE = np.random.default_rng(0)
PTX = {  # what the device functions that are PTX compute
    "exp2_fast": "return exp2f(x);",
    "pack": "return bf16_bits(first) | bf16_bits(second) << 16;",
    "copy_async": "*shared = *global;",
    "commit": "",
    "wait_until": "",
}


def compiled(folder: Path, name: str, entry: str, block: str, defines: dict, held: int = 0):
    """The kernel as a function (grid, pointers and integers): `entry` names its parameters."""
    text = re.sub(r"^#line.*|^#pragma once", "", nvrtc.text(name), flags=re.MULTILINE)
    for function, body in PTX.items():
        head = rf"(__device__ __forceinline__ \w+ {function}\([^)]*\) )"
        head += r"\{.*?\n?\}(?=\n\n|\n__dev|\n//)"
        text = re.sub(head, rf"\1{{ {body} }}", text, count=1, flags=re.DOTALL)
    text = text.replace("extern __shared__ uint4 held[];", f"static uint4 held[{held}];")
    text = text.replace("__shared__ __align__(16) float", "alignas(16) static float")
    header = Path(__file__).parent / "emulation" / "cuda_on_threads.h"
    kernel, _, parameters = entry.partition("(")
    names = [each.split()[-1].lstrip("*") for each in parameters.rstrip(")").split(",")]
    runner = f'extern "C" void run(int grid, {parameters} {{'
    runner += f" launch(grid, {block}, [=] {{ {kernel}({', '.join(names)}); }}); }}"
    source = folder / f"{kernel}.cpp"
    source.write_text(f'#include "{header}"\n{text}\n{runner}\n')
    flags = [f"-D{key}={value}" for key, value in defines.items()]
    library = folder / f"{kernel}.so"
    options = ["-O1", "-std=c++20", "-w", "-shared", "-fPIC", "-pthread", *flags]
    subprocess.run([COMPILER, *options, "-o", library, source], check=True)
    return ctypes.CDLL(str(library)).run


def call(run, grid: int, *arguments) -> None:
    run(
        grid,
        *[ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments],
    )


def normal(*shape, dtype=bfloat16):
    return SOURCE.standard_normal(shape).astype(dtype)


def poison(*shape, dtype=bfloat16):
    return np.full(shape, np.nan, float32).astype(dtype)


@pytest.mark.parametrize("words, rows", [(40, 13), (5, 3)])
def test_rms_norm_backward_equals_float64(tmp_path, words, rows):
    D, blocks = 8 * words, 3
    entry = (
        "rms_norm_backward(const uint4* x, const float* gains, const float* rstd, const uint4* dy, "
        "const uint4* ds, uint4* dx, float* partial, int rows)"
    )
    defines = {"WORDS": words, "RESIDUAL": 1, "RESIDENT": 1}
    run = compiled(tmp_path, "rms_norm.cu", entry, "kThreads", defines)
    x, dy, ds, gains = (*(normal(rows, D) for _ in range(3)), 1 + normal(D, dtype=float32))
    wide = [a.astype(float64) for a in (x, np.zeros_like(x), gains)]
    _, saved = ops.add_rms_norm.reference.forward(np, *wide, eps=1e-6)
    dys = dy.astype(float64), ds.astype(float64)
    expected = ops.add_rms_norm.reference.backward(np, dys, saved, eps=1e-6)
    dx, partial = poison(rows, D), poison(blocks, D, dtype=float32)
    rstd = saved[2].astype(float32)
    call(run, blocks, x, gains, rstd, dy, ds, dx, partial, rows)
    assert relative_error(dx, expected[0]) <= tolerance(bfloat16, 1)
    assert relative_error(partial.sum(0), expected[2]) <= tolerance(float32, rows)


@pytest.mark.parametrize("words, padded, threads", [(301, 320, 32), (11, 16, 32), (1000, 1024, 64)])
def test_cross_entropy_in_shared_memory_equals_float64(tmp_path, words, padded, threads):
    entry = (
        "cross_entropy(const uint4* z, const int* targets, const float* coefficient, float* logp, "
        "uint4* dz, int rows, int pitch)"
    )
    defines = {"WORDS": padded // 8, "VOCAB": words, "THREADS": threads}
    run = compiled(tmp_path, "cross_entropy.cu", entry, "THREADS", defines, held=padded // 8)
    rows = 5
    z, coefficient = normal(rows, padded), normal(rows, dtype=float32)
    targets = SOURCE.integers(0, words, rows).astype(np.int32)
    targets[1], n = -100, np.arange(rows)
    expected = z.astype(float64)[:, :words]
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    gradient = np.exp(expected)
    gradient[n, np.maximum(targets, 0)] -= 1
    gradient *= (coefficient * (targets >= 0))[:, None]
    picked = np.where(targets >= 0, expected[n, np.maximum(targets, 0)], 0)
    logp = poison(rows, dtype=float32)
    call(run, 2, z, targets, coefficient, logp, z, rows, 1)
    assert relative_error(logp, picked) <= tolerance(float32, words)
    assert relative_error(z[:, :words], gradient) <= tolerance(bfloat16, 1)
    assert (z[:, words:] == 0).all() and (z[1] == 0).all()


HEADS = [  # heads, kv_heads, half, abreast, tile, sequences, tokens
    (4, 2, 16, 4, 4, 2, 13),
    (3, 1, 32, 2, 4, 1, 9),
    (2, 2, 8, 8, 4, 3, 5),
]


@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_qk_norm_rope_equals_float64(tmp_path, shape):
    H, Hk, half, abreast, tile, B, T = shape
    Dh, blocks = 2 * half, 2
    sizes = {"HEADS": H, "KV_HEADS": Hk, "HALF": half, "ABREAST": abreast, "TILE": tile, "NORMS": 1}
    inputs = (
        "const uint4* qkv, const float* q_gain, const float* k_gain, const float* frequency, "
        "const int* positions, "
    )
    ahead = (
        f"qk_norm_rope_forward({inputs}uint4* q, uint4* k, uint4* v, float* rstd, "
        "int tokens, int T, float eps)"
    )
    back = (
        f"qk_norm_rope_backward({inputs}const float* rstd, const uint4* dq, const uint4* dk, "
        "const uint4* dv, uint4* dqkv, float* partial, int tokens, int T)"
    )
    qkv, gains = normal(B, T, (H + 2 * Hk) * Dh), 1 + normal(2, Dh, dtype=float32)
    positions = SOURCE.integers(0, 99, (B, T)).astype(np.int32)
    attrs = {"heads": H, "kv_heads": Hk, "eps": 1e-6, "theta": 10000.0}
    wide = qkv.astype(float64), *gains.astype(float64), positions
    ys, saved = ops.qk_norm_rope.reference.forward(np, *wide, **attrs)
    dys = [normal(*y.shape) for y in ys]
    expected = ops.qk_norm_rope.reference.backward(
        np, tuple(d.astype(float64) for d in dys), saved, **attrs
    )
    frequency = (10000.0 ** -(np.arange(0, Dh, 2) / Dh)).astype(float32)
    made, rstd = [poison(*y.shape) for y in ys], poison(B * T, H + Hk, dtype=float32)
    dqkv, partial = poison(*qkv.shape), poison(blocks, 2 * Dh, dtype=float32)
    common = (qkv, gains[0], gains[1], frequency, positions)
    run = compiled(tmp_path, "qk_norm_rope.cu", ahead, "kThreads", sizes)
    call(run, -(-B * T // tile), *common, *made, rstd, B * T, T, ctypes.c_float(1e-6))
    run = compiled(tmp_path, "qk_norm_rope.cu", back, "kThreads", sizes)
    call(run, blocks, *common, rstd, *dys, dqkv, partial, B * T, T)
    pairs = [*zip(made, ys, strict=True), (dqkv, expected[0])]
    assert max(relative_error(a, b) for a, b in pairs) <= tolerance(bfloat16, 1)
    sums = partial.reshape(blocks, 2, Dh).sum(0)
    assert relative_error(sums[0], expected[1]) <= tolerance(float32, B * T * H)
    assert relative_error(sums[1], expected[2]) <= tolerance(float32, B * T * H)
