"""What is composed of products and kernels, in Numba's simulator, where NumPy multiplies."""

import pytest

from xtrain.cuda.kernels import attention
from xtrain.cuda.kernels import linear_cross_entropy as loss
from xtrain.engine import ops
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.testing import kernel_error_ratio

pytestmark = pytest.mark.simulator


@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("name", ["gqa", "documents"])
def test_attention_equals_float64_in_several_blocks(name, dtype, monkeypatch):
    monkeypatch.setattr(attention, "LEAST_QUERIES", 4)
    monkeypatch.setattr(attention, "QUERY_MULTIPLE", 2)
    (sample,) = [s for s in ops.attention.samples if s.name == name]
    assert kernel_error_ratio(ops.attention, sample, "cuda", dtype) <= 1


LOSSES = [(op, s) for op in (ops.linear_cross_entropy, ops.token_logprob) for s in op.samples]


@pytest.mark.parametrize("op, sample", LOSSES, ids=[f"{op.name}-{s.name}" for op, s in LOSSES])
def test_the_loss_equals_float64_in_chunks_of_rows(op, sample, monkeypatch):
    monkeypatch.setattr(loss, "LOSS_BYTES", 16 * 4 * 320)
    assert kernel_error_ratio(op, sample, "cuda", float32) <= 1
