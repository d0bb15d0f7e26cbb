"""Products by cuBLAS and what is composed of them, on a GPU."""

import numpy as np
import pytest

from xtrain.cuda.gemm import gemm, gemm_batched
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.op import Sample, Spec, normal, positive
from xtrain.engine.testing import kernel_error_ratio

pytestmark = pytest.mark.cuda

HEADS = (normal(2, 8, 300, 32), normal(2, 2, 300, 32), normal(2, 2, 300, 32))
BLOCKS = [
    Sample("blocks", (*HEADS, None, None), reduced=300),
    Sample("documents", (*HEADS, Spec((2, 300), "starts"), None), reduced=300),
]
CHUNKS = Sample(
    "chunks",
    (normal(700, 64), normal(1024, 64), Spec((700,), "targets", 1001), positive()),
    {"vocab_size": 1001},
    reduced=1001,
)


@pytest.fixture
def device():
    return devices.use("cuda")


@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("sample", BLOCKS, ids=lambda sample: sample.name)
def test_attention_in_blocks_of_queries_equals_float64(device, sample, dtype):
    assert kernel_error_ratio(ops.attention, sample, "cuda", dtype) <= 1


@pytest.mark.parametrize("dtype", [float32, bfloat16])
def test_the_loss_in_chunks_of_rows_equals_float64(device, dtype, monkeypatch):
    from xtrain.cuda.kernels import linear_cross_entropy as loss

    monkeypatch.setattr(loss, "LOSS_BYTES", 256 * 4 * 1024)
    assert kernel_error_ratio(ops.linear_cross_entropy, CHUNKS, "cuda", dtype) <= 1


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("dtype, limit", [(float32, 1e-6), (bfloat16, 4e-3)])
def test_products_agree_with_float64(device, dtype, limit, transpose_a, transpose_b):
    source = np.random.default_rng(1)
    a = source.standard_normal((96, 72) if transpose_a else (72, 96)).astype(dtype)
    b = source.standard_normal((40, 96) if transpose_b else (96, 40)).astype(dtype)
    out = device.xp.full((72, 40), np.nan, np.float32).astype(dtype)
    gemm(
        device.array(a),
        device.array(b),
        out,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        alpha=0.5,
    )
    left, right = (m.astype(np.float64) for m in (a, b))
    truth = 0.5 * (left.T if transpose_a else left) @ (right.T if transpose_b else right)
    error = device.host(out).astype(np.float64) - truth
    assert np.linalg.norm(error) <= limit * np.linalg.norm(truth)


def test_a_bf16_product_is_added_to_an_fp32_buffer(device):
    source = np.random.default_rng(2)
    dy, x = (source.standard_normal((64, n)).astype(bfloat16) for n in (24, 40))
    buffer = device.xp.ones((24, 40), np.float32)
    gemm(device.array(dy), device.array(x), buffer, transpose_a=True, beta=1.0)
    truth = 1 + dy.astype(np.float64).T @ x.astype(np.float64)
    error = device.host(buffer) - truth
    assert np.linalg.norm(error) <= 1e-6 * np.linalg.norm(truth)


def test_a_batched_product_of_slices_writes_only_its_slice(device):
    source = np.random.default_rng(3)
    q, k = (source.standard_normal((6, n, 16)).astype(np.float32) for n in (32, 24))
    out = device.xp.zeros((6, 32, 24), np.float32)
    gemm_batched(
        device.array(q)[:, 8:16], device.array(k)[:, :16], out[:, 8:16, :16], transpose_b=True
    )
    truth = np.zeros((6, 32, 24))
    truth[:, 8:16, :16] = q[:, 8:16].astype(np.float64) @ k[:, :16].swapaxes(1, 2)
    np.testing.assert_allclose(device.host(out), truth, atol=1e-5)
