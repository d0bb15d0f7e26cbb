"""What is composed of products and kernels, in Numba's simulator, where NumPy multiplies."""

import pytest
from parity import SIMULATOR, error_ratio

from xtrain.cuda.kernels import attention, linear
from xtrain.cuda.kernels import linear_cross_entropy as loss
from xtrain.engine import ops
from xtrain.engine.dtype import bfloat16, float32

pytestmark = pytest.mark.simulator


def parametrized(*chosen):
    cases = [(op, sample) for op in chosen for sample in op.samples]
    return pytest.mark.parametrize(
        "op, sample", cases, ids=[f"{op.name}-{sample.name}" for op, sample in cases]
    )


@parametrized(ops.linear, ops.matmul)
def test_products_equal_float64(op, sample):
    assert linear.linear is ops.linear
    assert error_ratio(SIMULATOR, op, sample, "cuda", float32) <= 1


@parametrized(ops.attention)
def test_attention_equals_float64_in_one_block(op, sample):
    assert error_ratio(SIMULATOR, op, sample, "cuda", float32) <= 1


@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("name", ["gqa", "documents"])
def test_attention_equals_float64_in_several_blocks(name, dtype, monkeypatch):
    monkeypatch.setattr(attention, "LEAST_QUERIES", 4)
    monkeypatch.setattr(attention, "QUERY_MULTIPLE", 2)
    (sample,) = [s for s in ops.attention.samples if s.name == name]
    assert error_ratio(SIMULATOR, ops.attention, sample, "cuda", dtype) <= 1


@parametrized(ops.linear_cross_entropy, ops.token_logprob)
def test_the_loss_equals_float64_in_chunks_of_rows(op, sample, monkeypatch):
    monkeypatch.setattr(loss, "LOGIT_BYTES", 16 * 4 * 320)
    assert error_ratio(SIMULATOR, op, sample, "cuda", float32) <= 1
