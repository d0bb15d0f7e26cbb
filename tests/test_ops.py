"""Every sample of every declared op: gradient, parity, hygiene, determinism. No op is named."""

import dataclasses

import numpy as np
import pytest

import xtrain.engine.ops  # noqa: F401  declares the ops
from xtrain.engine import device, testing
from xtrain.engine.dtype import float32
from xtrain.engine.op import OPS

device.use("cpu")
ALL = [pytest.param(op, s, id=f"{op.name}-{s.name}") for op in OPS.values() for s in op.samples]
DIFFERENTIABLE = [p for p in ALL if p.values[0].reference.backward is not None]
FUSED = [
    pytest.param(op, s, key, id=f"{op.name}-{s.name}-{key}")
    for op in OPS.values()
    for s in op.samples
    for key in op.fused
    if key.startswith("cpu")
]


def implementation(op, key):
    return op.reference if key == "reference" else op.fused[key]


EVERY = [pytest.param(*p.values, "reference", id=f"{p.id}-reference") for p in ALL] + FUSED


@pytest.mark.parametrize(("op", "sample"), DIFFERENTIABLE)
def test_gradient_equals_central_differences(op, sample):
    assert testing.gradient_error(op, sample) <= 1e-6


@pytest.mark.parametrize(("op", "sample", "key"), EVERY)
def test_every_implementation_equals_the_float64_reference(op, sample, key):
    assert testing.kernel_error_ratio(op, sample, key) <= 1


ACCUMULATING = [p for p in EVERY if implementation(p.values[0], p.values[2]).accumulates]


@pytest.mark.parametrize(("op", "sample", "key"), ACCUMULATING)
def test_a_gradient_that_replaces_what_a_buffer_held_is_seen(monkeypatch, op, sample, key):
    sound = implementation(op, key)

    def overwrites(xp, dy, saved, *, into, **attrs):
        for buffer in into:
            if buffer is not None:
                buffer[...] = 0
        return sound.backward(xp, dy, saved, into=into, **attrs)

    assert testing.kernel_error_ratio(op, sample, key) <= 1
    monkeypatch.setitem(op.fused, "spoilt", dataclasses.replace(sound, backward=overwrites))
    assert testing.kernel_error_ratio(op, sample, "spoilt") > 1


@pytest.mark.parametrize(("op", "sample", "key"), EVERY)
def test_inputs_are_unmodified_and_every_output_is_written(op, sample, key):
    arrays = testing.draw(op, sample, float32)
    before = [None if a is None else a.copy() for a in arrays]
    spare = [None if a is None else a.copy() for a in arrays]
    ys, _ = testing.run_pair(op, implementation(op, key), spare, sample.attrs)
    spare = [None if a is None else a.copy() for a in before]
    # Compiled first: Numba finds no function in a patched `empty`.
    testing.run_pair(
        op, implementation(op, key), spare, sample.attrs, testing.draw_like(ys, float32)
    )
    with testing.poisoned_allocations():
        ys, _ = testing.run_pair(op, implementation(op, key), arrays, sample.attrs)
        dys = testing.draw_like(ys, float32)
        arrays = [None if a is None else a.copy() for a in before]
        ys, dxs = testing.run_pair(op, implementation(op, key), arrays, sample.attrs, dys)
    for i, (a, b) in enumerate(zip(arrays, before, strict=True)):
        if a is not None and i not in op.mutates:
            np.testing.assert_array_equal(a, b)
    for out in [*ys, *[d for d in dxs or () if d is not None]]:
        assert np.isfinite(np.asarray(out)).all()


@pytest.mark.parametrize(("op", "sample", "key"), EVERY)
def test_two_runs_give_identical_bits(op, sample, key):
    def run():
        arrays = testing.draw(op, sample, float32)
        chosen = implementation(op, key)
        ys, _ = testing.run_pair(op, chosen, testing.draw(op, sample, float32), sample.attrs)
        ys, dxs = testing.run_pair(op, chosen, arrays, sample.attrs, testing.draw_like(ys, float32))
        kept = [arrays[i] for i in op.mutates]
        return [np.asarray(a).tobytes() for a in [*ys, *(dxs or ()), *kept] if a is not None]

    assert run() == run()


@pytest.mark.parametrize(("op", "sample", "key"), EVERY)
def test_strided_inputs_give_the_result_of_contiguous_ones(op, sample, key):
    plain = testing.draw(op, sample, float32)
    strided = [_strided(a) for a in testing.draw(op, sample, float32)]
    chosen = implementation(op, key)
    if op.mutates:
        pytest.skip("flat buffers are contiguous by construction")
    for a, b in zip(
        testing.run_pair(op, chosen, plain, sample.attrs)[0],
        testing.run_pair(op, chosen, strided, sample.attrs)[0],
        strict=True,
    ):
        assert testing.relative_error(b, a) <= testing.tolerance(float32, sample.reduced)


def _strided(a):
    if a is None or a.ndim == 0:
        return a
    wide = np.repeat(a, 2, axis=-1)
    return wide[..., ::2]
