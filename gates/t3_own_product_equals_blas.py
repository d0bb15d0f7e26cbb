"""T3: a matrix product of our own agrees with BLAS, forward and backward.

Claim   The blocked GEMM gives BLAS's result to 1e-6 in fp32 for every pair of transposes, ragged
        tiles included, on the CPU, in the CUDA simulator and on a GPU; backward is the derivative.
Why     A tile that forgets its rest is right for every size that a quick test tries.
Reads   Nothing.
Needs   A CPU; gemm_cuda_rel_error one CUDA device. About 5 seconds.
"""

import dataclasses
from unittest import mock

import numpy as np

from gates.instruments.simulated import simulated, spoilt
from gates.judging.gate import Defect, Gate
from xtrain.engine import device as devices
from xtrain.engine.ops.linear import linear, matmul
from xtrain.engine.tensor import Tensor, backward
from xtrain.engine.testing import gradient_error, relative_error, worst

# (M, K, N): one element, less than a tile, exact tiles, one past them, one long sum, and one
# both long (a CPU takes 512 steps of k at a time) and large enough for all cores (2^22 products).
SHAPES = (
    (1, 1, 1),
    (5, 3, 7),
    (64, 64, 64),
    (65, 129, 33),
    (3, 1_000, 17),
    (130, 66, 257),
    (131, 1_100, 67),
)
TRANSPOSES = ((False, False), (False, True), (True, False), (True, True))


def on_devices(device: str) -> dict[str, float]:
    """The variant `tiled` of matmul and linear against BLAS, and on a GPU against cuBLAS too;
    backward included."""
    found = {}
    for name in dict.fromkeys(("cpu", device)):
        here = devices.use(name)
        with mock.patch.dict(here.variants, linear="tiled", matmul="tiled"):
            found[f"gemm_{name}_rel_error"] = _worst_of_all(here)
    return found


def _worst_of_all(here) -> float:
    source = np.random.default_rng(5)
    errors = []
    for M, K, N in SHAPES:
        a, b, dy = (
            here.array(source.standard_normal(shape).astype(np.float32))
            for shape in ((M, K), (K, N), (M, N))
        )
        for transpose_a, transpose_b in TRANSPOSES:
            found = _matmul(a, b, dy, transpose_a, transpose_b)
            errors.append(_worst(found, _blas(a, b, dy)))
        errors.append(_worst(_linear(a, b, dy), _blas(a, b, dy)))
    return worst(errors)


def in_simulator(device: str) -> dict[str, float]:
    """The CUDA kernel against float64, one thread after the other."""
    return {"gemm_simulator_rel_error": simulated("matmul")["error"]}


def derivatives(device: str) -> dict[str, float]:
    """Backward against central differences of forward, in float64."""
    devices.use(device)
    errors = [gradient_error(op, sample) for op in (linear, matmul) for sample in op.samples]
    return {"gemm_backward_fd_error": worst(errors)}


def _matmul(a, b, dy, transpose_a: bool, transpose_b: bool) -> list:
    """a @ b, da and db by the op, its inputs stored transposed or not."""
    xp = devices.current().xp
    stored = (a.T if transpose_a else a, b.T if transpose_b else b)
    left, right = (Tensor(xp.ascontiguousarray(m), requires_grad=True) for m in stored)
    y = matmul(left, right, transpose_a=transpose_a, transpose_b=transpose_b)
    backward([y], [dy])
    da, db = left.grad, right.grad
    return [y.data, da.T if transpose_a else da, db.T if transpose_b else db]


def _linear(a, b, dy) -> list:
    """The same by `linear`, which holds b transposed and a with one more axis."""
    xp = devices.current().xp
    x = Tensor(a[None], requires_grad=True)
    weight = Tensor(xp.ascontiguousarray(b.T), requires_grad=True)
    y = linear(x, weight)
    backward([y], [dy[None]])
    return [y.data[0], x.grad[0], weight.grad.T]


def _blas(a, b, dy) -> list:
    xp = devices.current().xp
    return [xp.matmul(a, b), xp.matmul(dy, b.T), xp.matmul(a.T, dy)]


def _worst(found: list, truth: list) -> float:
    host = devices.current().host
    return worst(relative_error(host(f), host(t)) for f, t in zip(found, truth, strict=True))


def _forgets_the_rest_of_the_sum():
    """The blocked matmul leaves out what is beyond the last whole slab of 16."""
    spoilt = {}
    for key, chosen in matmul.fused.items():
        if key.endswith(":tiled"):
            spoilt[key] = dataclasses.replace(chosen, forward=_without_the_rest(chosen.forward))
    return mock.patch.dict(matmul.fused, spoilt)


def _without_the_rest(forward):
    def short(xp, a, b, *, transpose_a=False, transpose_b=False):
        K = a.shape[0 if transpose_a else 1]
        whole = slice(0, max(K // 16 * 16, 1))
        cut_a = a[whole] if transpose_a else a[:, whole]
        cut_b = b[:, whole] if transpose_b else b[whole]
        y, _ = forward(xp, cut_a, cut_b, transpose_a=transpose_a, transpose_b=transpose_b)
        return y, (a, b)

    return short


def _drops_a_transpose_in_backward():
    def wrong(xp, dy, saved, **attrs):
        da, db = matmul_backward(xp, dy, saved, **attrs)
        return da.reshape(-1)[::-1].reshape(da.shape), db

    matmul_backward = matmul.reference.backward
    reference = dataclasses.replace(matmul.reference, backward=wrong)
    return mock.patch.object(matmul, "reference", reference)


def _the_kernel_forgets_the_last_slab():
    """In the simulator the sum ends with the last whole slab."""
    return spoilt(
        "multiply = simulated_kernels.matmul.multiply\n"
        "def short(xp, a, b, *, transpose_a=False, transpose_b=False):\n"
        "    K = (a.shape[0] if transpose_a else a.shape[1]) // 16 * 16\n"
        "    a = a[:K].copy() if transpose_a else a[:, :K].copy()\n"
        "    b = b[:, :K].copy() if transpose_b else b[:K].copy()\n"
        "    return multiply(xp, a, b, transpose_a=transpose_a, transpose_b=transpose_b)\n"
        "simulated_kernels.matmul.multiply = short"
    )


GATE = Gate(
    "T3",
    "Tiled GEMM",
    measures=(on_devices, in_simulator, derivatives),
    defects=(
        Defect("ragged sum", "gemm_cpu_rel_error", on_devices, _forgets_the_rest_of_the_sum),
        Defect(
            "last slab", "gemm_simulator_rel_error", in_simulator, _the_kernel_forgets_the_last_slab
        ),
        Defect("gradient", "gemm_backward_fd_error", derivatives, _drops_a_transpose_in_backward),
    ),
)
