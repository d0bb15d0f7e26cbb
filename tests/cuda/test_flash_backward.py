"""Flash attention's gradients: compiled without spills; on a GPU, right against float64."""

import importlib.util
import re

import numpy as np
import pytest

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.kernels import flash_attention_backward as flash
from xtrain.engine.dtype import bfloat16, float32, float64
from xtrain.engine.ops.attention import attention

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None or importlib.util.find_spec("nvidia") is None,
    reason="the wheels of CuPy, NVRTC and the CUDA runtime are not installed",
)
HEAD_DIMS = range(16, flash.MOST_HEAD_DIM + 1, 16)
BF16, WGMMA = "flash_attention_backward.cu", "flash_attention_backward_wgmma.cu"
# batch, heads, kv heads, tokens: whole tiles, ragged, less than a tile, one token, a group of 7
SHAPES = [(2, 4, 2, 256), (1, 2, 2, 333), (1, 3, 1, 37), (1, 1, 1, 1), (1, 7, 1, 192)]


@needs_nvrtc
@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    [("sm_80", 16), ("sm_80", 32), ("sm_80", 64), ("sm_90", 112), ("sm_120", 128)],
)
def test_tensor_core_gradients_spill_nothing(architecture, head_dim):
    assert _complaints(BF16, architecture, head_dim) == []


@needs_nvrtc
@pytest.mark.parametrize("head_dim", flash.WGMMA_HEAD_DIMS)
def test_warpgroup_products_spill_nothing_and_are_not_serialized(head_dim):
    assert _complaints(WGMMA, "sm_90a", head_dim) == []


@needs_nvrtc
@pytest.mark.parametrize("head_dim", [16])
def test_fp32_gradients_compile(head_dim):
    defines = (f"HEAD_DIM={head_dim}",)
    assert nvrtc.cubin("flash_attention_backward_plain.cu", "sm_80", defines)


@needs_nvrtc
def test_too_few_registers_are_noticed(tmp_path, monkeypatch):
    text = nvrtc.text(WGMMA)
    crowded = text.replace(
        "__launch_bounds__(THREADS, KEY_BLOCKS)", "__launch_bounds__(THREADS, 6)"
    )
    assert crowded != text
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    (tmp_path / WGMMA).write_text(crowded)
    assert len(_complaints(WGMMA, "sm_90a", 64)) >= 2


def _complaints(file, architecture, head_dim) -> list[str]:
    lines = nvrtc.report(file, architecture, (f"HEAD_DIM={head_dim}",)).splitlines()
    spills = [line for line in lines if re.search(r"[1-9]\d* bytes spill", line)]
    return spills + [line for line in lines if "Potential Performance Loss" in line]


def test_shared_memory_is_enough_for_no_more_than_a_block_may_have():
    for head_dim in HEAD_DIMS:
        portable = flash.variant(bfloat16, head_dim, hopper=False)
        assert portable.hopper is False
        assert max(portable.query_bytes, portable.key_bytes) <= 99 * 1024  # of sm_86 and sm_120
        fp32 = flash.variant(float32, head_dim, hopper=True)
        assert fp32.query_bytes <= 99 * 1024
    for head_dim in flash.WGMMA_HEAD_DIMS:
        hopper = flash.variant(bfloat16, head_dim, hopper=True)
        assert hopper.hopper and max(hopper.query_bytes, hopper.key_bytes) <= 227 * 1024


@pytest.mark.parametrize(
    ("dtype", "head_dim", "named"),
    [(bfloat16, 24, "24"), (bfloat16, 144, "144"), (float64, 32, "float64")],
)
def test_what_no_kernel_serves_is_refused_by_name(dtype, head_dim, named):
    with pytest.raises(ValueError, match=named):
        flash.variant(np.dtype(dtype), head_dim, hopper=True)


@pytest.mark.cuda
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("hopper", [True, False])
def test_bf16_gradients_match_float64(monkeypatch, hopper, head_dim, shape, documents):
    if hopper and not flash._is_hopper():
        pytest.skip("not compute capability 9.0")
    monkeypatch.setattr(flash, "_is_hopper", lambda: hopper)
    problem = _problem(*shape, head_dim, bfloat16, documents)
    found, truth = _gradients(*problem)
    for value, true in zip(found, truth, strict=True):
        assert np.isfinite(value).all()
        # bf16's half unit is 2**-9; p and ds are rounded to it once, the result once
        limit = 2.0**-8 * np.linalg.norm(true) + 1e-2 * np.sqrt(true.size) * (shape[3] == 1)
        assert np.linalg.norm(value - true) <= limit


@pytest.mark.cuda
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_fp32_gradients_match_float64(head_dim, shape, documents):
    found, truth = _gradients(*_problem(*shape, head_dim, float32, documents))
    for value, true in zip(found, truth, strict=True):
        assert np.abs(value - true).max() <= 5e-5


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_gradients_have_the_same_bits_every_time(head_dim):
    problem = _problem(2, 8, 2, 512, head_dim, bfloat16, True)
    first, _ = _gradients(*problem)
    second, _ = _gradients(*problem)
    assert [a.tobytes() for a in first] == [a.tobytes() for a in second]


@pytest.mark.cuda
def test_gradients_do_not_depend_on_how_the_heads_lie():
    import cupy

    problem = _problem(2, 4, 2, 200, 32, bfloat16, True)
    dense, _ = _gradients(*problem)
    by_token, _ = _gradients(
        *problem, arrange=lambda x: cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    )
    assert [a.tobytes() for a in dense] == [a.tobytes() for a in by_token]


def _problem(B, H, Hk, T, Dh, dtype, documents):
    """q, k, v, dy on the host, and first visible keys."""
    rng = np.random.default_rng([B, H, T, Dh])
    heads = [rng.standard_normal((B, n, T, Dh)).astype(dtype) for n in (H, Hk, Hk, H)]
    starts = None
    if documents:
        starts = np.maximum.accumulate(rng.integers(0, T, (B, T)) * (rng.random((B, T)) < 0.03), 1)
        starts = np.minimum(starts, np.arange(T)).astype(np.int32)
        starts[0, -1] = T  # sees nothing
    return heads, starts


def _gradients(heads, starts, arrange=lambda x: x):
    """Of the kernels, in float64 on the host; and true ones."""
    import cupy

    wide = [x.astype(float64) for x in heads]
    q, k, v, dy = wide
    with np.errstate(invalid="ignore"):
        y, p = _forward(q, k, v, starts)
    truth = attention.reference.backward(np, dy, (q, k, v, p))[:3]
    scores = np.einsum("bkgtd,bksd->bkgts", q.reshape(*k.shape[:2], -1, *q.shape[2:]), k)
    scores /= np.sqrt(q.shape[-1])
    with np.errstate(divide="ignore"):
        lse = np.log((np.exp(scores) * (p > 0)).sum(-1)).reshape(q.shape[:3]).astype(np.float32)
    device = [arrange(cupy.asarray(x)) for x in heads]
    given = arrange(cupy.asarray(y.astype(heads[0].dtype)))
    placed = None if starts is None else cupy.asarray(starts)
    q, k, v, dy = device
    found = flash.backward(cupy, q, k, v, given, cupy.asarray(lse), dy, placed)
    return [cupy.asnumpy(x).astype(float64) for x in found], truth


def _forward(q, k, v, starts):
    """y and p of the reference; zeros where a row sees nothing."""
    y, (_, _, _, p) = attention.reference.forward(np, q, k, v, starts, None)
    return np.nan_to_num(y), np.nan_to_num(p)
