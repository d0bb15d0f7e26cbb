"""How products are described to cuBLAS, checked without a GPU by a column-major BLAS in NumPy."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

pytest.importorskip("numba.cuda")

from xtrain.cuda.gemm import Arrangement, _sizes, gemm

SOURCE = np.random.default_rng(0)


def blas(a, b, out, transpose_a, transpose_b):
    """What cuBLAS does with the arguments that `gemm` gives it: column-major, operands swapped."""
    first, second, target = Arrangement(a, transpose_a), Arrangement(b, transpose_b), None
    target = Arrangement(out, False)
    rows, columns, inner = _sizes(a, b, out, transpose_a, transpose_b)
    left = operand(b, second, columns, inner)
    right = operand(a, first, inner, rows)
    column_major(out, target.leading, columns, rows)[...] = left @ right


def operand(array, arrangement, rows, columns):
    if arrangement.operation:
        return column_major(array, arrangement.leading, columns, rows).T
    return column_major(array, arrangement.leading, rows, columns)


def column_major(array, leading, rows, columns):
    return as_strided(array, (rows, columns), (array.itemsize, leading * array.itemsize))


def draw(rows, columns, layout):
    """A (rows, columns) matrix that is stored contiguously, as a slice, or transposed."""
    match layout:
        case "contiguous":
            return SOURCE.standard_normal((rows, columns))
        case "slice":
            return SOURCE.standard_normal((rows + 2, columns + 3))[1:-1, 2:-1]
        case "transposed":
            return SOURCE.standard_normal((columns, rows)).T


@pytest.mark.parametrize("layout", ["contiguous", "slice", "transposed"])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("M, N, K", [(5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1)])
def test_a_row_major_product_is_described_to_a_column_major_library(
    M, N, K, transpose_a, transpose_b, layout
):
    a = draw(K, M, layout) if transpose_a else draw(M, K, layout)
    b = draw(N, K, layout) if transpose_b else draw(K, N, layout)
    out = np.full((M + 1, N + 2), np.nan)
    blas(a, b, out[:M, :N], transpose_a, transpose_b)
    truth = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
    np.testing.assert_allclose(out[:M, :N], truth, rtol=1e-12)
    assert np.isnan(out[M:]).all() and np.isnan(out[:, N:]).all()


def test_a_matrix_with_no_contiguous_axis_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        Arrangement(np.zeros((6, 8))[::2, ::2], False)


def test_the_batch_stride_of_a_slice_is_that_of_the_whole():
    whole = np.zeros((3, 10, 4), np.float32)
    assert Arrangement(whole[:, 2:5], False).batch_stride == 40


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.0), (1.0, 7.0)])
def test_a_sum_of_no_terms_is_zero_or_what_was_there(beta, expected):
    out = np.full((3, 4), 7, np.float32)
    gemm(np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32), out, beta=beta)
    assert (out == expected).all()
