"""Kernels that are no op by themselves, and bits that must be equal, in Numba's simulator."""

import numpy as np
import pytest
from rows import check_causal_softmax, check_cross_entropy

from gates.instruments import simulated_kernels
from xtrain.cuda.kernels import adamw as adamw_kernels  # noqa: F401  fuses the op
from xtrain.cuda.kernels import dropout as dropout_kernels  # noqa: F401
from xtrain.cuda.kernels import matmul
from xtrain.cuda.parts import block, partials, sort
from xtrain.engine import testing
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.op import OPS

pytestmark = pytest.mark.simulator


def test_vector_add_equals_numpy_bit_for_bit():
    assert simulated_kernels.measure_vector_add()["differing"] == 0


def test_tiled_product_is_exact_to_fp32_for_all_transposes():
    assert simulated_kernels.measure_matmul()["error"] <= 1e-6


def test_tiled_product_adds_to_a_buffer():
    source = np.random.default_rng(1)
    a, b, before = (source.standard_normal((5, 5)).astype(np.float32) for _ in range(3))
    into = before.copy()
    matmul.multiply(np, a, b, into=into)
    np.testing.assert_allclose(into, before + a @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sample", OPS["adamw"].samples, ids=lambda s: s.name)
@pytest.mark.parametrize("share", [None, 0.5, 1])
def test_adamw_equals_the_reference_bit_for_bit(sample, share):
    op, expected = OPS["adamw"], testing.draw(OPS["adamw"], sample, float32)
    expected[5] = None if share is None else np.zeros(int(share * expected[0].size), bfloat16)
    actual = [None if a is None else a.copy() for a in expected]
    op.reference.forward(np, *expected, **sample.attrs)
    op.fused["cuda"].forward(np, *actual, **sample.attrs)
    for a, b in zip(actual, expected, strict=True):
        assert a is None or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", [(7, 13), (4, 16)])
def test_dropout_keeps_what_the_reference_keeps(shape):
    x = np.ones(shape, np.float32)
    key = np.array([1, 2, 3, 4], np.uint32)
    op, attrs = OPS["dropout"], {"p": 0.4, "site": 9}
    expected, _ = op.reference.forward(np, x, key, **attrs)
    actual, _ = op.fused["cuda"].forward(np, x, key, **attrs)
    assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("count", "chunk"), [(1, 4096), (2, 16), (50, 4096), (50, 16), (65, 8)])
def test_sorted_pairs_are_in_the_order_of_id_and_position(count, chunk):
    ids = np.random.default_rng(0).integers(0, 20, count).astype(np.int32)
    pairs = sort.sorted_pairs(np, ids, chunk=chunk)[:count]
    expected = np.sort((ids.astype(np.uint64) << np.uint64(32)) | np.arange(count, dtype=np.uint64))
    np.testing.assert_array_equal(pairs, expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_partial_rows_are_summed_or_added(accumulate):
    source = np.random.default_rng(2)
    partial = source.standard_normal((37, 40)).astype(np.float32)
    out = np.ones(33, np.float32)
    partials.sum_rows(partial, out, accumulate=accumulate, first=5)
    expected = partial[:, 5:38].astype(np.float64).sum(0) + accumulate
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_reductions_over_a_fraction_of_a_block_are_refused_unless_a_power_of_two():
    with pytest.raises(ValueError, match="power of two"):
        block.row_sum(48)


SOFTMAX = [
    # sequences, kv_heads, group, queries, keys, first, rows of queries, out, starts, offsets
    (1, 2, 2, 7, 7, 0, 7, float32, False, False),
    (2, 1, 3, 5, 5, 2, 3, bfloat16, True, False),
    (2, 1, 1, 3, 9, 0, 3, float32, False, True),
    (1, 1, 2, 8, 16, 4, 4, bfloat16, False, True),
    (1, 1, 1, 2, 48, 1, 1, bfloat16, True, True),
]


@pytest.mark.parametrize("case", SOFTMAX, ids=lambda c: f"{c[4]}_keys_{np.dtype(c[7]).name}")
def test_causal_softmax_equals_float64(case):
    check_causal_softmax(np, np.array, np.asarray, *case)


CROSS_ENTROPY = [
    # rows, vocabulary, padded vocabulary, dtype of the logits, dtype of the gradient
    (3, 301, 320, float32, float32),
    (3, 301, 320, float32, bfloat16),
    (2, 11, 11, float32, float32),
    (2, 1000, 1024, float32, bfloat16),
    (2, 50, 64, bfloat16, bfloat16),
]


@pytest.mark.parametrize("case", CROSS_ENTROPY, ids=lambda c: f"{c[1]}_{np.dtype(c[4]).name}")
def test_cross_entropy_rows_equal_float64(case):
    check_cross_entropy(np, np.array, np.asarray, *case)
