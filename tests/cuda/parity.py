"""Checks that follow from an op's declaration, for kernels: on a GPU, or in the simulator."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xtrain.engine import testing
from xtrain.engine.dtype import FLOATS, float32, float64
from xtrain.engine.op import Implementation, Op, Sample


@dataclass(frozen=True)
class Backend:
    """An array module, and how to move arrays there and back."""

    xp: object
    put: Callable
    get: Callable


SIMULATOR = Backend(np, np.array, np.asarray)  # NumPy arrays: references, and simulated kernels


def gpu() -> Backend:
    import cupy

    return Backend(cupy, cupy.asarray, cupy.asnumpy)


def run(backend: Backend, chosen: Implementation, arrays: list, attrs: dict, dys=None):
    """Outputs and input gradients of an implementation, on the host; `arrays` are device arrays."""
    y, saved = chosen.forward(backend.xp, *arrays, **attrs)
    ys = y if isinstance(y, tuple) else (y,)
    if dys is None or chosen.backward is None:
        return [backend.get(out) for out in ys], []
    extra = {"into": tuple(None for _ in chosen.accumulates)} if chosen.accumulates else {}
    dxs = chosen.backward(backend.xp, dys if len(ys) > 1 else dys[0], saved, **extra, **attrs)
    return [backend.get(out) for out in ys], [None if d is None else backend.get(d) for d in dxs]


def place(backend: Backend, arrays) -> list:
    return [None if a is None else backend.put(a) for a in arrays]


def gradients_like(ys, dtype) -> tuple:
    """Output gradients as a tape would hand them over: scalars in float64, the rest in dtype."""
    return tuple(d if d.ndim == 0 else d.astype(dtype) for d in testing.draw_like(ys, float64))


def error_ratio(backend: Backend, op: Op, sample: Sample, key: str, dtype) -> float:
    """Worst error of a kernel against the float64 reference, over its tolerance.

    Outputs are poisoned before they are written; inputs must come out as they went in.
    """
    arrays = testing.draw(op, sample, dtype)
    wide = [a.astype(float64) if a is not None and a.dtype in FLOATS else a for a in arrays]
    shapes, _ = run(SIMULATOR, op.reference, [_copy(a) for a in wide], sample.attrs)
    dys = gradients_like(shapes, dtype)
    wide_dys = tuple(d.astype(float64) for d in dys)
    truth = run(SIMULATOR, op.reference, wide, sample.attrs, wide_dys)
    placed = place(backend, arrays)
    with poisoned(backend.xp):
        ys, dxs = run(backend, op.fused[key], placed, sample.attrs, tuple(place(backend, dys)))
    pairs = list(zip(ys, truth[0], strict=True))
    pairs += [(d, t) for d, t in zip(dxs, truth[1], strict=True) if t is not None]
    for i, (after, before) in enumerate(zip(placed, arrays, strict=True)):
        if i in op.mutates:
            pairs.append((backend.get(after), wide[i]))
        elif after is not None:
            assert backend.get(after).tobytes() == before.tobytes(), f"input {i} was modified"
    limit = testing.tolerance(dtype, sample.reduced)
    ratios = [testing.relative_error(value, true) / limit for value, true in pairs]
    return float("nan") if any(r != r for r in ratios) else max(ratios)


def bits(backend: Backend, op: Op, sample: Sample, key: str, dtype, arrange=lambda a: a) -> list:
    """Bytes of everything a kernel makes; `arrange` may lay the inputs out differently."""
    arrays = [arrange(a) for a in place(backend, testing.draw(op, sample, dtype))]
    y, _ = op.fused[key].forward(backend.xp, *[_copy(a) for a in arrays], **sample.attrs)
    shapes = y if isinstance(y, tuple) else (y,)
    dys = tuple(place(backend, gradients_like(shapes, dtype)))
    ys, dxs = run(backend, op.fused[key], arrays, sample.attrs, dys)
    changed = [backend.get(arrays[i]) for i in op.mutates]
    return [a.tobytes() for a in [*ys, *dxs, *changed] if a is not None]


def every_second(a):
    """The same values with a stride of two elements along the last axis."""
    if a is None or a.ndim == 0:
        return a
    wide = a.repeat(2, axis=-1)
    return wide[..., ::2]


@contextlib.contextmanager
def poisoned(xp):
    """Fill what `empty` hands out with NaN, so that an unwritten element shows."""
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


def _copy(a):
    return None if a is None else a.copy()


def cases(samples: dict[str, list], dtypes=(float32,), *, simulated: bool = False):
    """(op, sample, key, dtype) and an id, for kernels that are fused in this process."""
    from xtrain.engine.op import OPS

    return [
        (f"{name}-{sample.name}-{key}-{np.dtype(dtype).name}", (OPS[name], sample, key, dtype))
        for name, chosen in samples.items()
        for sample in chosen
        for key in OPS[name].fused
        if key.startswith("cuda") and (OPS[name].fused[key].simulated or not simulated)
        for dtype in dtypes
        if not (OPS[name].mutates and dtype != float32)
    ]
