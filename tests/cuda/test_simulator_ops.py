"""Every Numba kernel of an op against the float64 reference, in Numba's CUDA simulator."""

import pytest
from parity import SIMULATOR, bits, cases, every_second
from samples import WHOLE_VECTORS

from xtrain.cuda import import_kernels
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.op import OPS
from xtrain.engine.testing import kernel_error_ratio

pytestmark = pytest.mark.simulator

import_kernels()

# A block a token: 150 blocks of 256 threads; and more than a CPU sums at a time.
TOO_SLOW = {("embedding", "repeats"), ("global_norm", "blocks")}
OWN = {
    name: [s for s in op.samples if (name, s.name) not in TOO_SLOW]
    for name, op in OPS.items()
    if any(key.startswith("cuda") for key in op.fused)
}
FP32 = cases(OWN, simulated=True) + cases(WHOLE_VECTORS, simulated=True)
TWO_WARPS_ONCE = {n: [s for s in c if s.name != "two_warps"] for n, c in WHOLE_VECTORS.items()}
BF16 = cases(
    {**TWO_WARPS_ONCE, "rms_norm": [*TWO_WARPS_ONCE["rms_norm"], *OPS["rms_norm"].samples]},
    [bfloat16],
    simulated=True,
)


def parametrized(chosen):
    return pytest.mark.parametrize("case", [c for _, c in chosen], ids=[i for i, _ in chosen])


@parametrized(FP32)
def test_fp32_kernel_equals_the_float64_reference(case):
    assert kernel_error_ratio(*case) <= 1


@parametrized(BF16)
def test_bf16_kernel_equals_the_float64_reference(case):
    assert kernel_error_ratio(*case) <= 1


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "softmax"])
def test_strided_inputs_give_the_bits_of_contiguous_ones(name):
    case = OPS[name], OPS[name].samples[0], "cuda", float32
    assert bits(SIMULATOR, *case, arrange=every_second) == bits(SIMULATOR, *case)
