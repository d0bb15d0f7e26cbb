"""T2: data survive every way in and out of a Tensor.

Claim   Copies to a device and back, and through a safetensors file, keep every bit of fp32, bf16,
        int32 and uint16; views, empty and strided arrays and, on a GPU, arrays of more than 2^31
        elements give what the plain array gives.
Why     A cast or a wrong stride in a copy changes weights without any error.
Reads   Nothing.
Needs   A CPU; the last value one CUDA device with 30 GB. About 2 seconds.
"""

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.engine.tensor import Tensor
from xtrain.errors import OutOfDeviceMemory

BEYOND = 2**31 + 1_000


def round_trips(device: str) -> dict[str, float]:
    """Every 16-bit pattern and many 32-bit ones: NaN payloads, subnormals, infinities, -0."""
    here = devices.use(device)
    words = np.random.default_rng(2).integers(0, 2**32, 4_099, np.uint32)
    words[:6] = (0, 1 << 31, 0x7F800000, 0xFF800001, 0x7FC00001, 1)
    halves = np.arange(2**16, dtype=np.uint16)
    samples = {
        "fp32": words.view(np.float32),
        "bf16": halves.view(ml_dtypes.bfloat16),
        "int32": words.view(np.int32),
        "uint16": halves,
    }
    wrong = dict.fromkeys(samples, 0)
    for name, sample in samples.items():
        copied = here.array(sample)
        wrong[name] += differing_bits(here.host(copied), sample)
        wrong[name] += differing_bits(Tensor(copied).host(), sample)
        wrong[name] += differing_bits(here.array(sample[::-1]), here.array(sample)[::-1])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "samples.safetensors")
        save_file(samples, file)
        with safe_open(file, "np") as stored:
            for name, sample in samples.items():
                wrong[name] += differing_bits(stored.get_tensor(name), sample)
    return {f"roundtrip_mismatches_{name}": float(count) for name, count in wrong.items()}


def views(device: str) -> dict[str, float]:
    """Parameters as views of one buffer, slices, and the ops that only move data."""
    here = devices.use(device)
    shapes = {"a": (5, 7), "b": (3, 2), "c": (64, 2)}
    parameters = {n: Parameter(s, std=None, decay=n != "b") for n, s in shapes.items()}
    buffers = FlatBuffers(parameters.items(), here)
    wrong = 0
    for name, p in parameters.items():
        values = np.random.default_rng(3).standard_normal(p.shape).astype(np.float32)
        p.data[...] = here.array(values)
        at = buffers.offsets[name]
        wrong += differing_bits(here.host(buffers.master)[at : at + p.size], values.reshape(-1))
        buffers.master[at] = 7.0
        values[0, 0] = 7.0
        wrong += differing_bits(here.host(p.data), values)
        wrong += differing_bits(here.host(p.data[1:, ::2]), values[1:, ::2])
    host = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    x = Tensor(here.array(host))
    moved = ops.transpose(x, axes=(0, 2, 1, 3))
    wrong += differing_bits(moved.host(), host.transpose(0, 2, 1, 3))
    flat = ops.reshape(moved, shape=(8, 15))
    wrong += differing_bits(flat.host(), host.transpose(0, 2, 1, 3).reshape(8, 15))
    wrong += (x.shape, x.strides) != (host.shape, host.strides)
    return {"views_mismatches": float(wrong)}


def zero_size(device: str) -> dict[str, float]:
    """Empty arrays through copies, elementwise ops, sums, products and lookups, and backward."""
    here = devices.use(device)
    ids = here.array(np.zeros((2, 0), np.int32))
    wrong = 0
    for shape in ((0,), (0, 6), (3, 0), (2, 0, 6)):
        empty = np.zeros(shape, np.float32)
        wrong += differing_bits(here.host(here.array(empty)), empty)
        x = Tensor(here.array(empty), requires_grad=True)
        total = ops.total(ops.add(ops.multiply(x, x), ops.scale(x, factor=2.0)))
        total.backward()
        wrong += float(total) != 0
        wrong += differing_bits(here.host(x.grad), empty)
        turned = ops.transpose(x, axes=tuple(reversed(range(len(shape)))))
        wrong += differing_bits(turned.host(), empty.T)
    rows, weight, gain = (
        here.array(a.astype(np.float32)) for a in (np.ones((2, 0, 6)), np.ones((4, 6)), np.ones(6))
    )
    for run, shape in (
        (lambda x, w, g: ops.linear(x, w), (2, 0, 4)),
        (lambda x, w, g: ops.embedding(w, ids), (2, 0, 6)),
        (lambda x, w, g: ops.swiglu(x), (2, 0, 3)),
        (lambda x, w, g: ops.rms_norm(x, g, eps=1e-6), (2, 0, 6)),
    ):
        leaves = [Tensor(a, requires_grad=True) for a in (rows, weight, gain)]
        y = run(*leaves)
        wrong += differing_bits(y.host(), np.zeros(shape, np.float32))
        ops.total(y).backward()
        for leaf in leaves:
            if leaf.grad is not None:
                wrong += differing_bits(here.host(leaf.grad), np.zeros(leaf.shape, np.float32))
    return {"zero_size_mismatches": float(wrong)}


def noncontiguous(device: str) -> dict[str, float]:
    """Strided, reversed, transposed, repeated and shifted arrays against contiguous ones."""
    here = devices.use(device)
    source = np.random.default_rng(4).standard_normal((24, 36)).astype(np.float32)
    wrong = 0
    for cut in (
        lambda a: a[::2, ::3],
        lambda a: a[::-1, ::-1],
        lambda a: a.T,
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: a[1:, 5:],
    ):
        expected = np.ascontiguousarray(cut(source))
        view = cut(here.array(source))
        wrong += differing_bits(here.host(view), expected)
        wrong += differing_bits(here.host(here.array(cut(source))), expected)
        for op, want in (
            (lambda x: ops.add(x, x), expected + expected),
            (lambda x: ops.multiply(x, x), expected * expected),
            (lambda x: ops.scale(x, factor=0.5), expected * np.float32(0.5)),
            (lambda x: ops.reshape(x, shape=(-1,)), expected.reshape(-1)),
        ):
            wrong += differing_bits(op(Tensor(view)).host(), want)
    return {"noncontiguous_mismatches": float(wrong)}


def beyond(device: str) -> dict[str, float | NotMeasured]:
    """Elementwise ops on an array whose last elements a 32-bit index does not reach."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    ends = np.arange(2_000).astype(ml_dtypes.bfloat16)
    zeros = np.zeros_like(ends)
    try:
        x = here.xp.zeros(BEYOND, ml_dtypes.bfloat16)
        x[-2_000:] = here.array(ends)
        doubled = ops.scale(Tensor(x), factor=2.0).data
        wrong = differing_bits(doubled[-2_000:], ends + ends)
        wrong += differing_bits(doubled[:2_000], zeros)
        added = ops.add(Tensor(doubled), Tensor(doubled)).data
        wrong += differing_bits(added[-2_000:], (ends + ends) + (ends + ends))
    except (MemoryError, OutOfDeviceMemory) as error:
        return {"beyond_2_31": NotMeasured(f"not enough device memory: {error}")}
    return {"beyond_2_31": float(wrong)}


def differing_bits(value, truth) -> int:
    """Elements that differ in any bit; all of them (and one) when shape or dtype do."""
    value, truth = (
        np.ascontiguousarray(a if isinstance(a, np.ndarray) else devices.current().host(a))
        for a in (value, truth)
    )
    if value.shape != truth.shape or value.dtype != truth.dtype:
        return truth.size + 1
    unsigned = f"u{truth.dtype.itemsize}"
    return int((value.view(unsigned) != truth.view(unsigned)).sum())


@contextlib.contextmanager
def _copying(spoil):
    """Copies to the device are of spoil(host array)."""
    use = devices.use

    def use_spoilt(name):
        here = use(name)
        array = here.array
        here.array = lambda host: array(spoil(host))
        return here

    with mock.patch.object(devices, "use", use_spoilt):
        yield


def _makes_all_nans_equal():
    def spoil(a):
        return np.where(np.isnan(a), np.float32(np.nan), a) if a.dtype == np.float32 else a

    return _copying(spoil)


def _goes_through_half_precision():
    return _copying(lambda a: a.astype(np.float16).astype(a.dtype) if a.dtype.kind == "V" else a)


def _ignores_strides():
    return _copying(lambda a: a.ravel(order="K").reshape(a.shape))


def _forgets_the_offset_of_a_view():
    def view(self, buffer, name):
        p = self.parameters[name]
        return buffer[: p.size].reshape(p.declared)

    return mock.patch.object(FlatBuffers, "view", view)


def _sums_by_way_of_a_mean():
    """The sum is the mean times the number of elements: of none it is NaN."""
    total = ops.total

    def by_mean(x):
        count = np.float32(x.data.size)
        with np.errstate(invalid="ignore"):
            return ops.scale(total(x), factor=float(count / count))

    return mock.patch.object(ops, "total", by_mean)


GATE = Gate(
    "T2",
    "Tensor",
    measures=(round_trips, views, zero_size, noncontiguous, beyond),
    defects=(
        Defect("NaN payloads", "roundtrip_mismatches_fp32", round_trips, _makes_all_nans_equal),
        Defect("half", "roundtrip_mismatches_bf16", round_trips, _goes_through_half_precision),
        Defect("sum of none", "zero_size_mismatches", zero_size, _sums_by_way_of_a_mean),
        Defect("strides", "noncontiguous_mismatches", noncontiguous, _ignores_strides),
        Defect("offsets", "views_mismatches", views, _forgets_the_offset_of_a_view),
    ),
)
