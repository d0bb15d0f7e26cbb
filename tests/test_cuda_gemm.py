"""How products are asked of cuBLAS, checked without a GPU by a column-major BLAS in NumPy."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

pytest.importorskip("numba.cuda")

from xtrain.cuda import gemm as module
from xtrain.cuda.gemm import Arrangement, gemm, gemm_batched

SOURCE = np.random.default_rng(0)
LAYOUTS = ("contiguous", "slice", "transposed")
SIZES = ((5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1))


class OnDevice:
    """A NumPy array that shows what CuPy's would show of itself: all but its elements."""

    def __init__(self, host):
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self.size, self.itemsize, self.ndim = host.size, host.itemsize, host.ndim
        self.data = SimpleNamespace(ptr=host.ctypes.data)
        self.host = host  # keeps the memory


class Library:
    """cuBLAS's two calls, for fp32: pointers, leading dimensions, column-major order."""

    def __init__(self):
        names = ("COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "COMPUTE_32F_FAST_TF32")
        self.ComputeType = {name: number for number, name in enumerate(names)}
        self.asked_for = []  # compute types

    def gemm_ex(self, handle, op_a, op_b, m, n, k, alpha, a, _a, lda, b, _b, ldb, beta, *rest):
        c, _c, ldc, compute_type, _ = rest
        sizes = (op_a, op_b, m, n, k)
        self._multiply(sizes, alpha, (a, lda, 0), (b, ldb, 0), beta, (c, ldc, 0), 1)
        self.asked_for.append(compute_type)

    def gemm_strided_batched_ex(
        self, handle, op_a, op_b, m, n, k, alpha, a, _a, lda, sa, b, _b, ldb, sb, beta, *rest
    ):
        c, _c, ldc, sc, count, compute_type, _ = rest
        sizes = (op_a, op_b, m, n, k)
        self._multiply(sizes, alpha, (a, lda, sa), (b, ldb, sb), beta, (c, ldc, sc), count)
        self.asked_for.append(compute_type)

    def _multiply(self, sizes, alpha, a, b, beta, c, count):
        op_a, op_b, m, n, k = sizes
        left = matrices(*a, *((k, m) if op_a else (m, k)), count)
        right = matrices(*b, *((n, k) if op_b else (k, n)), count)
        out = matrices(*c, m, n, count)
        left, right = (x.swapaxes(1, 2) if op else x for x, op in ((left, op_a), (right, op_b)))
        factor, kept = (ctypes.c_float.from_address(scalar).value for scalar in (alpha, beta))
        out[...] = np.float32(factor) * (left @ right) + (kept * out if kept else 0)


def matrices(address, leading, batch_stride, rows, columns, count):
    """Column-major fp32 matrices in memory, (count, rows, columns)."""
    first = np.frombuffer((ctypes.c_float * 1).from_address(address), np.float32)
    return as_strided(first, (count, rows, columns), (4 * batch_stride, 4, 4 * leading))


@pytest.fixture
def library(monkeypatch):
    """A cuBLAS in NumPy instead of the real one; what is remembered of its calls is forgotten."""
    library = Library()
    monkeypatch.setattr(module, "SIMULATED", False)
    monkeypatch.setattr(module, "_handle", lambda: (library, 7))
    monkeypatch.setattr(module, "_bindings", lambda: (None, library))
    monkeypatch.setattr(module.devices, "current", lambda: SimpleNamespace(tf32=False))
    module._described.cache_clear()
    yield library
    module._described.cache_clear()


def normal(*shape):
    return SOURCE.standard_normal(shape).astype(np.float32)


def draw(rows, columns, layout):
    """A (rows, columns) matrix that is stored contiguously, as a slice, or transposed."""
    match layout:
        case "contiguous":
            return normal(rows, columns)
        case "slice":
            return normal(rows + 2, columns + 3)[1:-1, 2:-1]
        case "transposed":
            return normal(columns, rows).T


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("M, N, K", SIZES)
def test_a_row_major_product_is_asked_of_a_column_major_library(
    library, M, N, K, transpose_a, transpose_b, layout
):
    a = draw(K, M, layout) if transpose_a else draw(M, K, layout)
    b = draw(N, K, layout) if transpose_b else draw(K, N, layout)
    out = np.full((M + 1, N + 2), np.nan, np.float32)
    arrays = map(OnDevice, (a, b, out[:M, :N]))
    gemm(*arrays, transpose_a=transpose_a, transpose_b=transpose_b)
    truth = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
    np.testing.assert_allclose(out[:M, :N], truth, rtol=1e-5, atol=1e-6)
    assert np.isnan(out[M:]).all() and np.isnan(out[:, N:]).all()


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_a_batch_of_slices_is_one_call_that_writes_only_its_slices(
    library, transpose_a, transpose_b
):
    a = normal(3, 6, 4)[:, 1:] if transpose_a else normal(3, 4, 9)[:, :, 2:7]
    b = normal(3, 8, 5)[:, 2:] if transpose_b else normal(3, 7, 6)[:, 1:6]
    out = np.full((3, 6, 6), np.nan, np.float32)
    arrays = map(OnDevice, (a, b, out[:, 1:5]))
    gemm_batched(*arrays, transpose_a=transpose_a, transpose_b=transpose_b)
    left, right = (a.swapaxes(1, 2) if transpose_a else a), (b.swapaxes(1, 2) if transpose_b else b)
    np.testing.assert_allclose(out[:, 1:5], left @ right, rtol=1e-5, atol=1e-6)
    assert np.isnan(out[:, 0]).all() and np.isnan(out[:, 5]).all() and len(library.asked_for) == 1


def test_leading_axes_count_as_one(library):
    a, b, out = normal(2, 3, 4), normal(5, 4), np.empty((2, 3, 5), np.float32)
    gemm(*map(OnDevice, (a, b, out)), transpose_b=True)
    np.testing.assert_allclose(out, a @ b.T, rtol=1e-5, atol=1e-6)


def test_products_of_the_same_arrays_differ_by_their_factors(library):
    a, b, out = normal(3, 4), normal(4, 5), np.ones((3, 5), np.float32)
    arrays = [OnDevice(x) for x in (a, b, out)]
    gemm(*arrays, alpha=2.0)
    np.testing.assert_allclose(out, 2 * (a @ b), rtol=1e-5, atol=1e-6)
    gemm(*arrays, alpha=2.0, beta=1.0)
    np.testing.assert_allclose(out, 4 * (a @ b), rtol=1e-5, atol=1e-6)
    gemm(*arrays)
    np.testing.assert_allclose(out, a @ b, rtol=1e-5, atol=1e-6)


def test_tf32_is_used_only_where_the_device_asks_for_it(library, monkeypatch):
    arrays = [OnDevice(x) for x in (normal(3, 4), normal(4, 5), normal(3, 5))]
    for tf32 in (False, True, False):
        here = SimpleNamespace(tf32=tf32)
        monkeypatch.setattr(module.devices, "current", lambda here=here: here)
        gemm(*arrays)
    pedantic, tf32 = (library.ComputeType[f"COMPUTE_32F_{n}"] for n in ("PEDANTIC", "FAST_TF32"))
    assert library.asked_for == [pedantic, tf32, pedantic]


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
