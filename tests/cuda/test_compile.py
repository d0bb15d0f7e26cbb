"""Every kernel compiles without a driver: Numba's to PTX and machine code, CUDA C++ with NVRTC."""

import gc
import importlib.util
import re
import weakref

import numpy as np
import pytest

from xtrain.cuda.compile import cubins, launch, nvrtc
from xtrain.cuda.kernels import (
    adamw,
    cross_entropy,
    dropout,
    embedding,
    global_norm,
    matmul,
    qk_norm_rope,
    rms_norm,
    softmax,
    swiglu,
    vector_add,
)
from xtrain.cuda.kernels.qk_norm_rope import HeadShape
from xtrain.cuda.parts import partials, sort
from xtrain.cuda.parts.rows import Shape
from xtrain.engine.dtype import bfloat16, float32

needs_numba_cuda = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None
    or importlib.util.find_spec("nvidia") is None
    or launch.SIMULATED,
    reason="numba-cuda with NVIDIA's compiler wheels is not installed, or Numba simulates",
)
needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None or importlib.util.find_spec("nvidia") is None,
    reason="the wheels of CuPy, NVRTC and the CUDA runtime are not installed",
)
ONE_WARP = Shape(threads=32, vectors=5, vector=8, rows=4, aligned=True)  # rows of 1280, bf16
WARPS = Shape(threads=256, vectors=2, vector=8, rows=1, aligned=True)  # rows of 4096, bf16
FP32 = Shape(threads=32, vectors=10, vector=4, rows=4, aligned=True)  # rows of 1280, fp32
ONCE = Shape(threads=32, vectors=3, vector=4, rows=4, aligned=True)
RAGGED = Shape(threads=32, vectors=3, vector=4, rows=4, aligned=False)
SCORES = Shape(threads=32, vectors=8, vector=4, rows=4, aligned=True)  # 1024 keys, fp32 scores
COLUMNS = Shape(threads=160, vectors=1, vector=8, rows=1, aligned=True)  # rows of 1280, bf16
HEADS = HeadShape(40, 10, 16, 2, 8, 4, 32, True)  # 40 query and 10 kv heads of 32, bf16
RAGGED_HEADS = HeadShape(2, 1, 2, 2, 1, 4, 4, False)
SIZES = (  # of CUDA C++ kernels, besides those that their files compile with
    ("cross_entropy.cu", ("WORDS=40", "VOCAB=301", "THREADS=64")),
    ("qk_norm_rope.cu", ("HEADS=28", "KV_HEADS=7", "HALF=32", "ABREAST=2", "TILE=32", "NORMS=1")),
    ("qk_norm_rope.cu", ("HEADS=2", "KV_HEADS=2", "HALF=8", "ABREAST=4", "TILE=8", "NORMS=0")),
    ("rms_norm.cu", ("WORDS=96", "RESIDUAL=0", "RESIDENT=4")),
)

KERNELS = {
    "vector_add": lambda: vector_add.KERNEL,
    **{f"matmul_{key}": (lambda key=key: matmul.KERNELS[key]) for key in matmul.KERNELS},
    "column_sum": lambda: partials.sum_kernel(float32, True),
    "sort_first": lambda: sort.chunk_kernel(4096, 512, True),
    "sort_merge": lambda: sort.chunk_kernel(4096, 512, False),
    "sort_step": lambda: sort.step_kernel(512),
    "rms_norm": lambda: rms_norm.forward_kernel(bfloat16, float32, ONE_WARP, False),
    "add_rms_norm": lambda: rms_norm.forward_kernel(float32, float32, FP32, True),
    "rms_norm_backward": lambda: rms_norm.backward_kernel(bfloat16, float32, COLUMNS, False),
    "rms_norm_backward_warps": lambda: rms_norm.backward_kernel(bfloat16, bfloat16, WARPS, True),
    "rms_norm_backward_ragged": lambda: rms_norm.backward_kernel(float32, float32, RAGGED, True),
    "qk_norm_rope": lambda: qk_norm_rope.forward_kernel(bfloat16, float32, HEADS, True),
    "qk_norm_rope_ragged": lambda: qk_norm_rope.forward_kernel(
        float32, float32, RAGGED_HEADS, False
    ),
    "qk_norm_rope_backward": lambda: qk_norm_rope.backward_kernel(bfloat16, float32, HEADS, True),
    "swiglu": lambda: swiglu.forward_kernel(bfloat16, WARPS),
    "swiglu_backward": lambda: swiglu.backward_kernel(float32, FP32),
    "dropout": lambda: dropout.dropout_kernel(bfloat16, True),
    "dropout_ragged": lambda: dropout.dropout_kernel(float32, False),
    "embedding": lambda: embedding.forward_kernel(bfloat16, ONE_WARP),
    "embedding_backward": lambda: embedding.backward_kernel(
        bfloat16, float32, ONE_WARP._replace(rows=8)
    ),
    "softmax": lambda: softmax.forward_kernel(float32, bfloat16, SCORES, True, True, True),
    "softmax_backward": lambda: softmax.backward_kernel(
        float32, bfloat16, bfloat16, SCORES, True, False
    ),
    "cross_entropy": lambda: cross_entropy.rows_kernel(float32, bfloat16, True, 1024, True),
    "cross_entropy_logp": lambda: cross_entropy.rows_kernel(float32, float32, True, 1024, False),
    "scaled_loss": lambda: cross_entropy.NEGATED_SUM,
    "global_norm": lambda: global_norm.squares_kernel(float32, True),
    "global_norm_end": lambda: global_norm.NORM,
    "adamw": lambda: adamw.update_kernel(True, True),
    "adamw_ragged": lambda: adamw.update_kernel(False, True),
}
VECTOR_LOADS = {
    "rms_norm": 15,  # 5 of x, 10 of the fp32 gain
    "add_rms_norm": 30,
    "swiglu": 4,
    "dropout": 2,
    "embedding": 5,
    "softmax": 8,
    "cross_entropy": 8,
    "global_norm": 4,
    "adamw": 4,
}


@needs_numba_cuda
@pytest.mark.parametrize("name", KERNELS)
def test_numba_kernel_compiles_to_ptx(name):
    for capability in ((8, 0), (9, 0)):
        kernel = KERNELS[name]()
        text = kernel.ptx(capability)
        assert f".target sm_{capability[0]}{capability[1]}" in text
        assert f".entry {kernel.name}(" in text
        if "qk_norm_rope" not in name:  # whose sine of a huge angle uses a small table
            assert ".local" not in text, "values that should be in registers are in memory"


@needs_numba_cuda
@pytest.mark.parametrize("name", VECTOR_LOADS)
def test_rows_are_loaded_by_vectors_of_16_bytes(name):
    text = KERNELS[name]().ptx((9, 0))
    assert len(re.findall(r"ld\.global\.v4", text)) == VECTOR_LOADS[name]


@needs_numba_cuda
@pytest.mark.parametrize("name", ["add_rms_norm", "adamw", "sort_first"])
def test_numba_kernel_assembles_to_machine_code(name):
    assert KERNELS[name]().cubin((9, 0)).startswith(b"\x7fELF")


@needs_numba_cuda
def test_a_first_compilation_keeps_nothing_of_its_callers_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(cubins, "FOLDER", tmp_path)
    # A shape that no other test compiles.
    gc.collect()
    gc.disable()
    try:
        assert _of_a_caller(rms_norm.forward_kernel(float32, float32, ONCE, False))() is None
    finally:
        gc.enable()


def _of_a_caller(kernel):
    """A weak reference to an array that only a function that loads a new kernel held."""
    held = np.empty(1)
    kernel.machine_code((9, 0))
    return weakref.ref(held)


@needs_numba_cuda
def test_adamw_rounds_after_every_operation():
    text = KERNELS["adamw"]().ptx((9, 0))
    assert "fma" not in text
    assert not re.findall(r"(?:mul|add|sub)\.f32", text)  # unlike mul.rn.f32, these may be fused


@needs_nvrtc
@pytest.mark.parametrize("name", nvrtc.files())
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_cuda_source_compiles_to_machine_code(name, architecture):
    assert nvrtc.cubin(name, architecture).startswith(b"\x7fELF")


@needs_nvrtc
def test_an_included_header_is_compiled_in_place_and_errors_name_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    (tmp_path / "half.cuh").write_text("#pragma once\ntypedef float real;\n")
    twice = '#include "half.cuh"\n#include "half.cuh"\n'
    kernel = twice + 'extern "C" __global__ void f(real* x) { *x = 1; }\n'
    (tmp_path / "good.cu").write_text(kernel)
    (tmp_path / "bad.cu").write_text(kernel.replace("{ *x", "{ y"))
    assert nvrtc.cubin("good.cu", "sm_80").startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"bad\.cu\(3\).*undefined"):
        nvrtc.cubin("bad.cu", "sm_80")


@needs_nvrtc
@pytest.mark.parametrize("name, defines", SIZES, ids=lambda v: v if isinstance(v, str) else "")
def test_cuda_source_compiles_for_other_sizes(name, defines):
    assert nvrtc.cubin(name, "sm_90", defines).startswith(b"\x7fELF")


def test_a_header_may_include_a_header_that_its_file_includes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    (tmp_path / "inner.cuh").write_text("typedef float real;\n")
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\ntypedef real* reals;\n')
    (tmp_path / "both.cu").write_text('#include "outer.cuh"\n#include "inner.cuh"\nint last;\n')
    lines = nvrtc.text("both.cu").splitlines()
    assert [line for line in lines if line.startswith("typedef")] == [
        "typedef float real;",
        "typedef real* reals;",
    ]
    assert lines[lines.index("typedef real* reals;") - 1] == '#line 2 "outer.cuh"'
    assert lines[-3:] == ['#line 2 "both.cu"', "", "int last;"]


def test_kernels_see_bf16_as_its_bits():
    assert launch.storage_name(bfloat16) == "uint16"
    assert launch.storage_name(np.float32) == "float32"
