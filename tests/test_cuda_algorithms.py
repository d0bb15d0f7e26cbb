"""The table of algorithms: what it calls a product, when it holds, and how cuBLASLt is asked."""

import ctypes
import json

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from xtrain.cuda import algorithms, gemm
from xtrain.engine.dtype import bfloat16, float32

FORWARD = {"transpose_a": False, "transpose_b": True, "out_type": 14, "adds": False}
DWEIGHT = {"transpose_a": True, "transpose_b": False, "out_type": 0, "adds": True}


def test_a_product_is_called_the_same_whatever_its_tokens():
    keys = {algorithms.key((tokens, 1920, 1280), **FORWARD) for tokens in (4096, 32768)}
    assert keys == {"nt 1920x1280 bf16"}
    assert algorithms.key((1920, 1280, 8192), **DWEIGHT) == "tn 1920x1280 fp32+"


def test_few_tokens_are_left_to_the_library():
    assert algorithms.key((1, 1920, 1280), **FORWARD) is None
    assert algorithms.key((1920, 1280, 4095), **DWEIGHT) is None


def test_the_table_holds_for_its_gpu_and_its_library_alone():
    found = json.loads(algorithms.TABLE.read_text())
    named = algorithms.table(found["device"], found["cublas_lt"])
    assert len(named) == len(found["algorithms"]) > 0
    assert all(len(each) == algorithms.ALGORITHM_BYTES for each in named.values())
    assert algorithms.table("another GPU", found["cublas_lt"]) == {}
    assert algorithms.table(found["device"], found["cublas_lt"] + 1) == {}


class Library:
    """cuBLASLt in NumPy, for fp32 operands in host memory."""

    def matmul_desc_create(self, compute, scale):
        return {}

    def matmul_desc_set_attribute(self, description, attribute, address, size):
        description[attribute] = ctypes.c_int32.from_address(address).value

    def matrix_layout_create(self, kind, rows, columns, leading):
        return rows, columns, leading

    def matmul(self, handle, description, alpha, a, la, b, lb, beta, c, lc, d, ld, *rest):
        left, right, out = (_matrix(*each) for each in ((a, la), (b, lb), (d, ld)))
        left = left.T if description[algorithms.TRANSPOSE_A] else left
        right = right.T if description[algorithms.TRANSPOSE_B] else right
        factors = [ctypes.c_float.from_address(each).value for each in (alpha, beta)]
        out[...] = factors[0] * (left @ right) + factors[1] * _matrix(c, lc)


def _matrix(address, layout):
    rows, columns, leading = layout
    first = np.frombuffer((ctypes.c_float * 1).from_address(address), np.float32)
    return as_strided(first, (rows, columns), (4, 4 * leading))


@pytest.mark.parametrize("flags", [FORWARD, DWEIGHT, {**FORWARD, "transpose_b": False}])
def test_a_row_major_product_is_asked_of_a_column_major_library(flags, monkeypatch):
    monkeypatch.setattr(gemm, "_compute_type", lambda *_: algorithms.COMPUTE_32F)
    source = np.random.default_rng(1)
    ta, tb, adds = flags["transpose_a"], flags["transpose_b"], flags["adds"]
    a = source.standard_normal((5, 3) if ta else (3, 5)).astype(float32)
    b = source.standard_normal((7, 5) if tb else (5, 7)).astype(float32)
    out = source.standard_normal((3, 7)).astype(float32)
    expected = (a.T if ta else a) @ (b.T if tb else b) + (out if adds else 0)
    call = _described(a, b, out, ta, tb, float(adds))
    product = gemm.described_product(call, Library())
    scalars = call.sizes[5], call.first[2]
    addresses = tuple(each.ctypes.data for each in (b, a, out))
    product.run(None, 0, addresses, scalars, (0, 0), 0)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def _described(a, b, out, transpose_a, transpose_b, beta):
    """The call, taken for one of bf16 operands, whose compute type needs no library."""
    layouts = [(each.shape, each.strides, each.dtype) for each in (a, b, out)]
    kinds = [
        (shape, tuple(s // 2 for s in strides), np.dtype(bfloat16)) for shape, strides, _ in layouts
    ]
    flat = [part for kind in kinds for part in kind]
    return gemm._described.__wrapped__(*flat, transpose_a, transpose_b, 1.0, beta, False, False)
