"""Flash attention's forward: compiled without spills; on a GPU right, in place, the same again."""

import importlib.util
import re

import numpy as np
import pytest
from parity import bits, gpu

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.kernels import flash_attention as flash
from xtrain.engine import device as devices
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.op import Sample, Spec, normal
from xtrain.engine.ops.attention import attention
from xtrain.engine.testing import kernel_error_ratio

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None or importlib.util.find_spec("nvidia") is None,
    reason="the wheels of CuPy, NVRTC and the CUDA runtime are not installed",
)
HEAD_DIMS = range(16, flash.MOST_HEAD_DIM + 1, 16)
BF16, PLAIN = "flash_attention_forward.cu", "flash_attention_forward_plain.cu"
MOST_SHARED_BYTES = 99 * 1024  # of a block, compute capability 8.6 and 12.0


@needs_nvrtc
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_no_register_of_the_forward_kernel_is_spilled(architecture, head_dim):
    assert _spills(architecture, flash.geometry(head_dim), head_dim) == []


@needs_nvrtc
def test_too_few_registers_are_noticed():
    crowded = flash.geometry(32)._replace(BLOCKS_PER_SM=5)
    assert _spills("sm_90", crowded, 32) != []


def _spills(architecture, geometry, head_dim) -> list[str]:
    macros = flash.defines(geometry._asdict(), head_dim)
    lines = nvrtc.report(BF16, architecture, macros).splitlines()
    assert any("registers" in line for line in lines)
    return [line for line in lines if re.search(r"[1-9]\d* bytes spill", line)]


@needs_nvrtc
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
def test_both_forward_kernels_compile_as_they_are_launched(architecture, head_dim):
    plain = flash.defines(flash.PLAIN | {"STORAGE": "float"}, head_dim)
    tiles = flash.defines(flash.geometry(head_dim)._asdict(), head_dim)
    for name, macros in ((PLAIN, plain), (BF16, tiles)):
        assert nvrtc.cubin(name, architecture, macros).startswith(b"\x7fELF")


def test_a_block_has_the_shared_memory_that_the_smallest_gpu_gives():
    for head_dim in HEAD_DIMS:
        assert flash.geometry(head_dim).shared_bytes(head_dim) <= MOST_SHARED_BYTES


@pytest.mark.parametrize("head_dim", [8, 24, 144])
def test_head_dims_without_kernels_are_composed(head_dim):
    q = np.zeros((1, 1, 20, head_dim), np.float32)
    assert not flash.serves(q, None)


def test_a_few_queries_over_cached_keys_are_composed():
    q = np.zeros((1, 1, 20, 32), np.float32)
    assert flash.serves(q, None) and flash.serves(q, np.zeros(1, np.int32))
    assert not flash.serves(q[:, :, :1], np.zeros(1, np.int32))


def _heads(B, H, Hk, T, S, Dh):
    return normal(B, H, T, Dh), normal(B, Hk, S, Dh), normal(B, Hk, S, Dh)


SAMPLES = [
    *(
        Sample(f"gqa_{Dh}", (*_heads(2, 4, 2, 193, 193, Dh), None, None), reduced=193)
        for Dh in (16, 32, 48, 64, 96, 128)
    ),
    Sample("tiles", (*_heads(1, 2, 1, 512, 512, 64), None, None), reduced=512),
    Sample("one", (*_heads(2, 2, 2, 1, 1, 32), None, None), reduced=32),
    Sample(
        "documents", (*_heads(2, 4, 1, 391, 391, 32), Spec((2, 391), "starts"), None), reduced=391
    ),
    Sample("cached", (*_heads(3, 4, 2, 70, 300, 64), None, Spec((3,), "ids", 230)), reduced=300),
]


@pytest.fixture
def backend():
    devices.use("cuda")
    return gpu()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [bfloat16, float32])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_flash_attention_equals_float64_both_ways(backend, sample, dtype):
    assert kernel_error_ratio(attention, sample, "cuda:flash", dtype) <= 1


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [bfloat16, float32])
def test_two_runs_and_another_layout_give_the_same_bits(backend, dtype):
    (sample,) = [s for s in SAMPLES if s.name == "documents"]
    once = bits(backend, attention, sample, "cuda:flash", dtype)
    assert once == bits(backend, attention, sample, "cuda:flash", dtype)

    def by_token(a):
        return a if a is None or a.ndim < 4 else a.swapaxes(1, 2).copy().swapaxes(1, 2)

    assert once == bits(backend, attention, sample, "cuda:flash", dtype, arrange=by_token)


@pytest.mark.cuda
def test_the_output_lies_token_by_token_for_the_projection(backend):
    q, k = backend.xp.zeros((2, 4, 20, 32), bfloat16), backend.xp.zeros((2, 2, 20, 32), bfloat16)
    y, _ = flash.forward(backend.xp, q, k, k, None, None)
    assert y.shape == q.shape and y.swapaxes(1, 2).flags.c_contiguous


@pytest.mark.cuda
def test_a_score_that_is_not_a_number_shows(backend):
    xp = backend.xp
    q = xp.ones((1, 1, 80, 32), bfloat16)
    k = q.copy()
    k[0, 0, 70, 3] = np.nan
    y, _ = flash.forward(xp, q, k, q, None, None)
    shown = backend.get(xp.isnan(y.astype(np.float32)).all((0, 1, 3)))
    assert not shown[:70].any() and shown[70:].all()


@pytest.mark.cuda
def test_a_gpu_that_was_told_nothing_attends_by_flash(backend):
    q = backend.xp.zeros((1, 1, 20, 32), bfloat16)
    devices.current().variants = type(devices.current())().variants
    assert attention.implementation((q, q, q)).name == "cuda:flash"
