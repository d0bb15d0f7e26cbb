"""T4: every op's backward is the derivative of its forward, and fan-out adds up.

Claim   Directional finite differences in float64 confirm every op to 1e-6; every kernel is within
        rounding of the float64 reference; a tensor used k times gets the sum of k gradients.
Why     A gradient that is nearly right still trains, only worse, and nothing else would tell.
Reads   Nothing.
Needs   A CPU, or one CUDA device for its kernels. About 5 seconds.
"""

import dataclasses
from unittest import mock

import numpy as np

import xtrain.engine.ops as ops
from gates.judging.gate import Defect, Gate
from xtrain.engine import device as devices
from xtrain.engine.op import OPS
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.engine.remat import remat
from xtrain.engine.tensor import Tensor, backward
from xtrain.engine.testing import UNITS, gradient_error, kernel_error_ratio, worst


def op_gradients(device: str) -> dict[str, float]:
    """The worst of all samples of all ops that have a backward."""
    devices.use(device)
    differentiable = [op for op in OPS.values() if op.reference.backward is not None]
    errors = [gradient_error(op, sample) for op in differentiable for sample in op.samples]
    return {"worst_op_fd_error": worst(errors)}


def kernel_errors(device: str) -> dict[str, float]:
    """The worst of all kernels of the device, in units of rounding: epsilon x sqrt(longest sum)."""
    devices.use(device)
    ratios = [
        kernel_error_ratio(op, sample, key)
        for op in OPS.values()
        for key in op.fused
        if key.partition(":")[0] == device
        for sample in op.samples
    ]
    return {"worst_kernel_error_units": worst(ratios) * UNITS}


def fan_out(device: str) -> dict[str, float]:
    """Leaf, intermediate, parameter and recomputed input, each used 1 to 5 times with factors."""
    here = devices.use(device)
    errors = []
    for k in range(1, 6):
        for use in (_leaf, _intermediate, _parameter, _recomputed):
            gradient = here.host(use(here, [float(i + 1) for i in range(k)]))
            errors.append(float(np.abs(gradient - k * (k + 1) / 2).max()))
    return {"fan_out_error": worst(errors)}


def _sum_of(x: Tensor, factors: list[float]) -> Tensor:
    y = ops.scale(x, factor=factors[0])
    for factor in factors[1:]:
        y = ops.add(y, ops.scale(x, factor=factor))
    return y


def _leaf(here, factors):
    x = Tensor(here.array(np.ones(3, np.float32)), requires_grad=True)
    ops.total(_sum_of(x, factors)).backward()
    return x.grad


def _intermediate(here, factors):
    """Several tensors to start from share one in the middle."""
    x = Tensor(here.array(np.ones(3, np.float32)), requires_grad=True)
    middle = ops.scale(x, factor=1.0)
    ends = [ops.scale(middle, factor=factor) for factor in factors]
    backward(ends, [here.array(np.ones(3, np.float32)) for _ in ends])
    return x.grad


def _parameter(here, factors):
    """A view of the flat gradient, added to in place."""
    p = Parameter((3, 1), std=None, decay=True)
    buffers = FlatBuffers([("p", p)], here)
    buffers.initialize(0, here)
    ops.total(_sum_of(p, factors)).backward()
    return buffers.view(buffers.grad, "p")


def _recomputed(here, factors):
    x = Tensor(here.array(np.ones(3, np.float32)), requires_grad=True)
    ops.total(remat(lambda a: _sum_of(a, factors), x)).backward()
    return x.grad


def _keeps_only_the_last_gradient():
    def overwrite(self, gradient):
        self.grad = gradient

    return mock.patch.object(Tensor, "accumulate_grad", overwrite)


def _leaves_out_a_term_of_swiglu():
    """d silu(g) / dg taken for sigmoid(g)."""

    def wrong(xp, dy, saved):
        half = saved.shape[-1] // 2
        gate, up = saved[..., :half], saved[..., half:]
        s = 1 / (1 + xp.exp(-gate))
        return (xp.concatenate([dy * up * s, dy * gate * s], axis=-1),)

    reference = dataclasses.replace(ops.swiglu.reference, backward=wrong)
    return mock.patch.object(ops.swiglu, "reference", reference)


def _kernel_of_the_norm_is_off_by_a_thousandth():
    fused = ops.global_norm.fused

    def inexact(chosen):
        def forward(xp, gradient):
            y, saved = chosen.forward(xp, gradient)
            return xp.asarray(y * 1.001), saved

        return dataclasses.replace(chosen, forward=forward)

    return mock.patch.dict(fused, {key: inexact(chosen) for key, chosen in fused.items()})


GATE = Gate(
    "T4",
    "Tape autograd",
    measures=(op_gradients, kernel_errors, fan_out),
    defects=(
        Defect("swiglu", "worst_op_fd_error", op_gradients, _leaves_out_a_term_of_swiglu),
        Defect(
            "norm kernel",
            "worst_kernel_error_units",
            kernel_errors,
            _kernel_of_the_norm_is_off_by_a_thousandth,
        ),
        Defect("dropped fan-out", "fan_out_error", fan_out, _keeps_only_the_last_gradient),
    ),
)
