"""What T1 and T2 measure on a GPU alone, with a CPU in its place: each check can fail."""

import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from gates import t1_every_backend_adds_vectors as t1
from gates import t2_data_survive_a_tensor as t2
from gates.judging.gate import NotMeasured
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.tensor import Tensor
from xtrain.errors import OutOfDeviceMemory

REACH = 5_000  # elements that a defect's 32-bit index reaches, of the stand-in's 8,000


class AddsWrongly(np.ndarray):
    """An array whose sums are off in their last element."""

    def __add__(self, other):
        c = np.asarray(self) + np.asarray(other)
        c[-1] += 1
        return c


def sums(monkeypatch, wrong: str | None) -> dict[str, float]:
    """What T1 measures where one of the three toolchains of a GPU, or none, adds wrongly."""
    pytest.importorskip("numba.cuda")
    from xtrain.cuda.kernels import vector_add

    def add(xp, a, b):
        return np.asarray(a) + np.asarray(b)

    def add_wrongly(xp, a, b):
        return a.view(AddsWrongly) + b

    cupy = SimpleNamespace(asnumpy=np.asarray, asarray=np.asarray)
    if wrong == "cupy":
        cupy.asarray = lambda host: np.asarray(host).view(AddsWrongly)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(vector_add, "add", add_wrongly if wrong == "numba_cuda" else add)
    monkeypatch.setattr(vector_add, "add_nvrtc", add_wrongly if wrong == "nvrtc" else add)
    return t1.on_gpu("cuda")


@pytest.mark.parametrize("wrong", [None, "numba_cuda", "cupy", "nvrtc"])
def test_a_toolchain_that_adds_wrongly_is_seen_alone(monkeypatch, wrong):
    found = sums(monkeypatch, wrong)
    assert {name for name, error in found.items() if error != 0} == (
        {f"vector_add_{wrong}"} if wrong else set()
    )
    assert len(found) == 3


@pytest.fixture
def small(monkeypatch):
    """A CPU for T2's GPU, and an array of 8,000 elements for one of more than 2^31."""
    cpu = devices.use("cpu")
    monkeypatch.setattr(devices, "use", lambda name: cpu)
    monkeypatch.setattr(t2, "BEYOND", 8_000)
    return cpu


@pytest.mark.parametrize("op", ["scale", "add"])
def test_an_op_that_does_not_reach_the_end_of_a_large_array_is_seen(small, op):
    assert t2.beyond("cuda") == {"beyond_2_31": 0.0}
    sound = getattr(ops, op)

    def short(x, *others, **attrs):
        y = sound(x, *others, **attrs).data.copy()
        y[REACH:] = 0
        return Tensor(y)

    with mock.patch.object(ops, op, short):
        assert t2.beyond("cuda")["beyond_2_31"] > 0


def test_a_gpu_without_room_for_the_large_array_is_no_measurement(small, monkeypatch):
    full = mock.Mock(side_effect=OutOfDeviceMemory("GPU memory is full", 1 << 30))
    monkeypatch.setattr(small, "xp", SimpleNamespace(zeros=full))
    assert isinstance(t2.beyond("cuda")["beyond_2_31"], NotMeasured)
