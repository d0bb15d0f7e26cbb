"""Every kernel of every op on a GPU: parity, bits, layouts, capture, in fp32 and bf16."""

import importlib.util

import numpy as np
import pytest
from parity import bits, cases, every_second, gpu
from rows import check_causal_softmax, check_cross_entropy
from samples import LARGE, WHOLE_VECTORS
from test_simulator_kernels import CROSS_ENTROPY, SOFTMAX

import xtrain.engine.ops  # noqa: F401  declares the ops
from xtrain.cuda import runtime
from xtrain.engine import device, testing
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.op import OPS
from xtrain.engine.testing import kernel_error_ratio

pytestmark = pytest.mark.cuda

USABLE = importlib.util.find_spec("cupy") is not None and runtime.why_unusable() is None
if USABLE:
    device.use("cuda")
OWN = {name: list(op.samples) for name, op in OPS.items()}
ALL = cases(OWN, [float32, bfloat16]) + cases(WHOLE_VECTORS, [float32, bfloat16])
BIG = cases(LARGE, [float32, bfloat16])
FP32 = cases(OWN) + cases(WHOLE_VECTORS)


def parametrized(chosen):
    return pytest.mark.parametrize("case", [c for _, c in chosen], ids=[i for i, _ in chosen])


@pytest.fixture
def backend():
    device.use("cuda")
    return gpu()


@parametrized(ALL)
def test_kernel_equals_the_float64_reference(backend, case):
    assert kernel_error_ratio(*case) <= 1


@parametrized(BIG)
def test_kernel_equals_the_float64_reference_at_training_sizes(backend, case):
    assert kernel_error_ratio(*case) <= 1


@parametrized(FP32)
def test_two_runs_give_identical_bits(backend, case):
    assert bits(backend, *case) == bits(backend, *case)


@parametrized(FP32)
def test_strided_inputs_give_the_bits_of_contiguous_ones(backend, case):
    op = case[0]
    if op.mutates:
        pytest.skip("flat buffers are contiguous by construction")
    assert bits(backend, *case, arrange=every_second) == bits(backend, *case)


# A variant that works on the host cannot be captured; the device refuses it by name.
CAPTURABLE = [c for c in cases(WHOLE_VECTORS) if not c[1][2].endswith(":host")]


@parametrized(CAPTURABLE)
def test_replay_of_a_graph_equals_the_eager_run_on_changed_inputs(backend, case):
    cupy = backend.xp
    op, sample, key, dtype = case
    first, second = (testing.draw(op, sample, dtype) for _ in range(2))
    for a in second:
        if a is not None and a.dtype == dtype:
            a[...] = np.abs(a[::-1])
    chosen, stream = op.fused[key], cupy.cuda.Stream(non_blocking=True)

    def step(arrays):
        y, _ = chosen.forward(cupy, *arrays, **sample.attrs)
        return y if isinstance(y, tuple) else (y,)

    with stream:
        placed = [None if a is None else cupy.asarray(a) for a in first]
        step(placed)  # loads the kernels
        stream.begin_capture()
        outputs = step(placed)
        graph = stream.end_capture()
        for a, value in zip(placed, second, strict=True):
            if a is not None:
                a[...] = cupy.asarray(value)
        graph.launch(stream)
        stream.synchronize()
        replayed = [out.get() for out in outputs]
        eager = step([None if a is None else cupy.asarray(a) for a in second])
        stream.synchronize()
    for a, b in zip(replayed, eager, strict=True):
        assert a.tobytes() == b.get().tobytes()


@pytest.mark.parametrize("case", SOFTMAX + [(2, 2, 4, 1024, 1024, 512, 128, bfloat16, 0, 0)])
def test_causal_softmax_equals_float64(backend, case):
    check_causal_softmax(backend.xp, backend.put, backend.get, *case)


@pytest.mark.parametrize("case", CROSS_ENTROPY + [(5, 50257, 50304, float32, bfloat16)])
def test_cross_entropy_rows_equal_float64(backend, case):
    check_cross_entropy(backend.xp, backend.put, backend.get, *case)


@pytest.mark.parametrize("copied", [False, True])
def test_adamw_equals_the_host_reference_bit_for_bit(backend, copied):
    op, sample = OPS["adamw"], LARGE["adamw"][0]
    expected = testing.draw(op, sample, float32)
    expected[5] = np.zeros(expected[0].size // 2, bfloat16) if copied else None
    placed = [None if a is None else backend.put(a) for a in expected]
    op.reference.forward(np, *expected, **sample.attrs)
    op.fused["cuda"].forward(backend.xp, *placed, **sample.attrs)
    for a, b in zip(placed, expected, strict=True):
        assert a is None or backend.get(a).tobytes() == b.tobytes()


def test_dropout_keeps_what_the_host_keeps(backend):
    op, attrs = OPS["dropout"], {"p": 0.3, "site": 9}
    x, key = np.ones((1000, 1280), np.float32), np.array([1, 2, 3, 4], np.uint32)
    expected, _ = op.reference.forward(np, x, key, **attrs)
    placed = backend.put(x), backend.put(key)
    actual, _ = op.fused["cuda"].forward(backend.xp, *placed, **attrs)
    assert backend.get(actual).tobytes() == expected.tobytes()


def test_vector_add_by_both_toolchains_equals_numpy_bit_for_bit(backend):
    from xtrain.cuda.kernels import vector_add

    a, b = np.random.default_rng(1).standard_normal((2, 1_000_003)).astype(np.float32)
    placed = backend.put(a), backend.put(b)
    for add in (vector_add.add, vector_add.add_nvrtc):
        assert backend.get(add(backend.xp, *placed)).tobytes() == (a + b).tobytes()


def test_tiled_product_is_exact_to_fp32(backend):
    from xtrain.cuda.kernels import matmul

    source = np.random.default_rng(2)
    for transpose_a, transpose_b in matmul.KERNELS:
        a = source.standard_normal((515, 259) if transpose_a else (259, 515)).astype(np.float32)
        b = source.standard_normal((133, 515) if transpose_b else (515, 133)).astype(np.float32)
        flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        c = matmul.multiply(backend.xp, backend.put(a), backend.put(b), **flags)
        left, right = (m.astype(np.float64) for m in (a, b))
        truth = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
        assert testing.relative_error(backend.get(c), truth) <= 1e-6
