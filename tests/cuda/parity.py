"""Checks that follow from an op's declaration, for kernels: on a GPU, or in the simulator."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xtrain.engine import testing
from xtrain.engine.dtype import float32, float64
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


def run(backend: Backend, chosen: Implementation, arrays: list, attrs: dict, dys=None, into=None):
    """Outputs and input gradients of an implementation, on the host; `arrays` are device arrays.

    into: device arrays that gradients are added to, in the order of `accumulates`.
    """
    y, saved = chosen.forward(backend.xp, *arrays, **attrs)
    ys = y if isinstance(y, tuple) else (y,)
    if dys is None or chosen.backward is None:
        return [backend.get(out) for out in ys], []
    extra = {"into": into or (None,) * len(chosen.accumulates)} if chosen.accumulates else {}
    dxs = chosen.backward(backend.xp, dys if len(ys) > 1 else dys[0], saved, **extra, **attrs)
    return [backend.get(out) for out in ys], [None if d is None else backend.get(d) for d in dxs]


def place(backend: Backend, arrays) -> list:
    return [None if a is None else backend.put(a) for a in arrays]


def gradients_like(ys, dtype) -> tuple:
    """Output gradients as a tape would hand them over: scalars in float64, the rest in dtype."""
    return tuple(d if d.ndim == 0 else d.astype(dtype) for d in testing.draw_like(ys, float64))


def bits(backend: Backend, op: Op, sample: Sample, key: str, dtype, arrange=lambda a: a) -> list:
    """Bytes of everything a kernel makes, gradients that it adds to a buffer included; `arrange`
    may lay the inputs out differently."""
    arrays = [arrange(a) for a in place(backend, testing.draw(op, sample, dtype))]
    y, _ = op.fused[key].forward(backend.xp, *[_copy(a) for a in arrays], **sample.attrs)
    shapes = y if isinstance(y, tuple) else (y,)
    dys = tuple(place(backend, gradients_like(shapes, dtype)))
    ys, dxs = run(backend, op.fused[key], arrays, sample.attrs, dys)
    changed = [backend.get(arrays[i]) for i in op.mutates]
    accumulated = op.fused[key].accumulates if dxs else ()
    into = tuple(  # an input that is absent has no buffer
        None if arrays[i] is None else backend.put(np.ones(arrays[i].shape, float32))
        for i in accumulated
    )
    if into:
        run(backend, op.fused[key], arrays, sample.attrs, dys, into)
    added = [backend.get(buffer) for buffer in into if buffer is not None]
    return [a.tobytes() for a in [*ys, *dxs, *changed, *added] if a is not None]


def every_second(a):
    """The same values with a stride of two elements along the last axis."""
    if a is None or a.ndim == 0:
        return a
    wide = a.repeat(2, axis=-1)
    return wide[..., ::2]


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
