"""Checks that follow from an op's declaration: gradient, parity, hygiene, determinism.

Tolerances: rounding of a sum of n terms grows like sqrt(n) times the dtype's epsilon. A result may
be off by 8 such units, relative to its L2 norm; 8 covers the handful of roundings an element sees
besides the longest sum. fp32 kernels are compared with the float64 reference on the same inputs.
Samples are drawn on the host and run on the current device.
"""

import contextlib
import zlib

import numpy as np

from xtrain.engine import device, rng
from xtrain.engine.dtype import FLOATS, float32, float64
from xtrain.engine.op import Op, Sample, Spec
from xtrain.engine.tensor import Tensor, backward

UNITS = 8
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
STEP = 1e-6  # of central differences in float64: truncation ~ STEP**2, rounding ~ 1e-16 / STEP


def tolerance(dtype, reduced: int) -> float:
    """Allowed relative L2 error of a result whose longest sum has `reduced` terms."""
    return UNITS * EPSILON[np.dtype(dtype).name] * max(reduced, 1) ** 0.5


def draw(op: Op, sample: Sample, dtype) -> list:
    """The sample's inputs as NumPy arrays: fixed by the op's and the sample's names."""
    seed = zlib.crc32(f"{op.name}/{sample.name}".encode())
    return [
        None if spec is None else draw_spec(spec, np.random.default_rng([seed, i]), dtype)
        for i, spec in enumerate(sample.inputs)
    ]


def draw_spec(spec: Spec, source, dtype):
    """One input as a NumPy array, drawn from a NumPy generator."""
    dtype = np.dtype(spec.dtype) if spec.dtype else dtype
    match spec.kind:
        case "normal":
            return np.asarray(spec.scale * source.standard_normal(spec.shape)).astype(dtype)
        case "positive":
            return np.asarray(0.1 + source.random(spec.shape)).astype(dtype)
        case "ids":
            return source.integers(0, spec.high, spec.shape).astype(np.int32)
        case "targets":
            drawn = source.integers(0, spec.high, spec.shape).astype(np.int32)
            drawn[source.random(spec.shape) < 0.25] = -100
            return drawn
        case "starts":
            steps = source.random(spec.shape) < 0.3
            index = np.where(steps, np.arange(spec.shape[1]), 0)
            return np.maximum.accumulate(index, axis=1).astype(np.int32)
        case "key":
            return rng.key_array(np, 7, 3, 1)
        case "hyper":
            return np.array([1e-3, 0.19, 0.3, 0.7, spec.high]).astype(dtype)
    raise ValueError(f"unknown kind of input {spec.kind!r}")


def worst(*values: float) -> float:
    """The largest of one iterable or of several numbers, NaN when any is: max() passes over a NaN
    that does not stand first, and a gate that asked it took a model of NaNs for exact."""
    found = [float(each) for each in (values[0] if len(values) == 1 else values)]
    return next((each for each in found if each != each), None) or max(found)


def relative_error(value, truth) -> float:
    """L2 distance over the truth's L2 norm, in float64; not finite if the value is not."""
    value, truth = (np.asarray(a).astype(np.float64) for a in (value, truth))
    scale = float(np.abs(truth).max(initial=0.0))
    if scale == 0:
        return float(np.linalg.norm(value))
    return float(np.linalg.norm((value - truth) / scale) / np.linalg.norm(truth / scale))


def run_pair(op: Op, implementation, arrays: list, attrs: dict, dys=None, *, into=None, here=None):
    """Outputs and input gradients of one implementation, all on the host.

    arrays: on the host; what the implementation does to its inputs is done to them. into: gradient
    buffers by number of the input, added to in place; others are returned. here: the device, by
    default the current one.
    """
    here = device.current() if here is None else here
    placed = [_place(here, a) for a in arrays]
    y, saved = implementation.forward(here.xp, *placed, **attrs)
    ys = y if isinstance(y, tuple) else (y,)
    if dys is None or implementation.backward is None:
        _bring_all_back(here, placed, arrays)
        return tuple(here.host(y) for y in ys), None
    extra, buffers = {}, {i: _place(here, b) for i, b in (into or {}).items()}
    if implementation.accumulates:
        extra["into"] = tuple(buffers.get(i) for i in implementation.accumulates)
    dy = tuple(_place(here, d) for d in dys)
    dxs = implementation.backward(here.xp, dy if len(ys) > 1 else dy[0], saved, **extra, **attrs)
    _bring_all_back(here, placed, arrays)
    for i, buffer in buffers.items():
        _bring_back(here, buffer, into[i])
    return tuple(map(here.host, ys)), tuple(None if d is None else here.host(d) for d in dxs)


def _place(here, a):
    """The array on the device; on the CPU the array itself, so that its strides are tested too."""
    return a if a is None or here.xp is np else here.array(a)


def _bring_all_back(here, placed: list, arrays: list) -> None:
    for array, host in zip(placed, arrays, strict=True):
        _bring_back(here, array, host)


def _bring_back(here, array, host) -> None:
    if host is not None and array is not host:
        host[...] = here.host(array)


def draw_like(ys, dtype) -> list:
    """Output gradients for the given outputs; scalars of the tape stay float64."""
    source = np.random.default_rng(5)
    return [
        np.asarray(source.standard_normal(y.shape)).astype(float64 if y.ndim == 0 else dtype)
        for y in ys
    ]


def gradient_error(op: Op, sample: Sample) -> float:
    """Reference backward against central differences along random directions, float64.

    Every differentiable input gets its own direction, and then all move together. Returns the worst
    |analytic - numeric| / max(|analytic|, |numeric|, 1).
    """
    here = device.current()
    arrays = [_place(here, a) for a in draw(op, sample, np.float64)]
    leaves = [Tensor(a, requires_grad=True) if _is_float(a) else a for a in arrays]
    source = np.random.default_rng(11)

    def random(shape):
        return here.array(np.asarray(source.standard_normal(shape)))

    def outputs(values):
        y = op(*values, **sample.attrs)
        return y if isinstance(y, tuple) else (y,)

    ys = outputs(leaves)
    dys = [random(y.shape) for y in ys]
    backward(list(ys), dys)
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _has_grad(leaf)]
    directions = {i: random(arrays[i].shape) for i in chosen}
    off = []
    for group in [[i] for i in chosen] + [chosen]:
        analytic = sum(float((leaves[i].grad * directions[i]).sum()) for i in group)

        def along(t, group=group):
            moved = [a + t * directions[i] if i in group else a for i, a in enumerate(arrays)]
            return sum(float((y.data * d).sum()) for y, d in zip(outputs(moved), dys, strict=True))

        numeric = (along(STEP) - along(-STEP)) / (2 * STEP)
        off.append(abs(analytic - numeric) / max(abs(analytic), abs(numeric), 1.0))
    return worst(off)


def _is_float(a) -> bool:
    return a is not None and a.dtype in FLOATS


def _has_grad(leaf: Tensor) -> bool:
    return leaf.grad is not None


def kernel_error_ratio(op: Op, sample: Sample, name: str, dtype=float32) -> float:
    """Worst error of an implementation on the current device, over its tolerance; <= 1 is within.

    name: of a fused one, or `reference`. Against the reference in float64 on the host, with the
    same inputs. Outputs are poisoned before they are written; inputs must come out as they went in
    (AssertionError). Gradients that it can add to a buffer, as in training, are also checked that
    way: in fp32, on a buffer that holds as much already. NaN when any value is.
    """
    chosen = op.reference if name == "reference" else op.fused[name]
    host = device.Device()
    shapes, _ = run_pair(op, op.reference, _widened(op, sample, dtype), sample.attrs, here=host)
    dys = [d if d.ndim == 0 else d.astype(dtype) for d in draw_like(shapes, float64)]
    wide, wide_dys = _widened(op, sample, dtype), [d.astype(float64) for d in dys]
    truth_y, truth_dx = run_pair(op, op.reference, wide, sample.attrs, wide_dys, here=host)
    arrays = draw(op, sample, dtype)
    compiles = not name.startswith(("reference", "cuda"))
    if compiles:  # at the first call, which finds no function in a patched `empty`
        run_pair(op, chosen, draw(op, sample, dtype), sample.attrs, dys)
    with poisoned_allocations():
        ys, dxs = run_pair(op, chosen, arrays, sample.attrs, dys)
    _require_unmodified(op, arrays, draw(op, sample, dtype))
    pairs = list(zip(ys, truth_y, strict=True))
    pairs += [(arrays[i], wide[i]) for i in op.mutates]
    if dxs is not None:
        pairs += [(d, t) for d, t in zip(dxs, truth_dx, strict=True) if t is not None]
    accumulated = chosen.accumulates if truth_dx is not None else ()
    into = {i: _as_much(truth_dx[i]) for i in accumulated if truth_dx[i] is not None}
    if into:
        held = {i: buffer.astype(float64) for i, buffer in into.items()}
        if compiles:
            spare = {i: buffer.copy() for i, buffer in into.items()}
            run_pair(op, chosen, draw(op, sample, dtype), sample.attrs, dys, into=spare)
        with poisoned_allocations():
            run_pair(op, chosen, draw(op, sample, dtype), sample.attrs, dys, into=into)
        pairs += [(into[i], held[i] + truth_dx[i]) for i in into]
    limit = tolerance(dtype, sample.reduced)
    ratios = [relative_error(value, truth) / limit for value, truth in pairs]
    return worst(ratios)


def _as_much(gradient):
    """A buffer that holds as much as the gradient that is added, in fp32; ones if that is zero."""
    return (gradient if gradient.any() else np.ones_like(gradient)).astype(float32)


def _widened(op: Op, sample: Sample, dtype) -> list:
    return [a.astype(float64) if _is_float(a) else a for a in draw(op, sample, dtype)]


def _require_unmodified(op: Op, after: list, before: list) -> None:
    for i, (a, b) in enumerate(zip(after, before, strict=True)):
        if a is not None and i not in op.mutates:
            assert a.tobytes() == b.tobytes(), f"{op.name}: input {i} was modified"


@contextlib.contextmanager
def poisoned_allocations():
    """Fill what `empty` of the current device hands out with NaN: an unwritten element shows."""
    xp = device.current().xp
    empty, empty_like = xp.empty, xp.empty_like

    def poison(array):
        if array.dtype in FLOATS:
            array.reshape(-1).view(np.uint8).fill(0xFF)  # a NaN in every float format
        return array

    xp.empty = lambda *a, **k: poison(empty(*a, **k))
    xp.empty_like = lambda *a, **k: poison(empty_like(*a, **k))
    try:
        yield
    finally:
        xp.empty, xp.empty_like = empty, empty_like
