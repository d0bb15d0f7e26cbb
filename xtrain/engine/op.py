"""The op contract: one declaration, from which dispatch, differentiation and tests follow.

An op is declared once with a readable reference: a forward and a backward in array code that runs
on NumPy and CuPy alike. The reference is the specification, the fallback and the float64 oracle. A
fused kernel is an optional override, registered by a file of the same name under `xtrain/cpu` or
`xtrain/cuda/kernels`:

    rms_norm.fuse("cpu", forward, backward)

    forward(xp, *arrays, **attrs)          -> (y, saved)    y: array, or tuple for several outputs
    backward(xp, dy, saved, **attrs)       -> one gradient an input, None where there is none

`saved` is whatever the pair agrees on. A backward declared with `accumulates=(i, ...)` is also
given `into`: for each such input the gradient buffer to add to (then it returns None for it), or
None when there is no buffer (then it returns the gradient). Gradients of big matrices so never
exist twice.

Attributes are plain Python values known before the step runs, or a buffer whose address never moves
(the loss is handed the one that its weight gradient is added to); everything that changes from step
to step is an array input. `tests/test_ops.py` generates gradient, parity, hygiene and determinism
checks for every sample of every op in `OPS`, and `xtrain-bench ops` times what `bench` gives.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from xtrain.engine import device
from xtrain.engine.dtype import FLOATS
from xtrain.engine.tensor import SEED, Node, Tensor, is_recording

OPS: dict[str, "Op"] = {}


@dataclass(frozen=True)
class Implementation:
    """One forward and, for differentiable ops, one backward; see the module docstring."""

    forward: Callable
    backward: Callable | None = None
    accumulates: tuple[int, ...] = ()
    name: str = "reference"
    simulated: bool = True  # whether Numba's simulator can run it, which knows no CUDA C++


@dataclass(frozen=True)
class Spec:
    """How one input is drawn: normal numbers, integer ids, or a given constant array.

    dtype: "" for that of the drawing, or a name when it does not follow (a gain stays float32).
    """

    shape: tuple[int, ...]
    kind: str = "normal"  # normal | positive | ids | targets | starts | key | hyper | zeros | copy
    high: int = 0  # exclusive bound of ids
    scale: float = 1.0
    dtype: str = ""


def normal(*shape: int, scale: float = 1.0, dtype: str = "") -> Spec:
    return Spec(shape, scale=scale, dtype=dtype)


def positive(*shape: int) -> Spec:
    return Spec(shape, "positive")


def ids(high: int, *shape: int) -> Spec:
    return Spec(shape, "ids", high)


@dataclass(frozen=True)
class Sample:
    """A named set of inputs on which an op is tested or timed; an attribute may be a Spec too."""

    name: str
    inputs: tuple
    attrs: dict = field(default_factory=dict)
    reduced: int = 1  # length of the longest sum, by whose square root rounding grows


@dataclass(frozen=True)
class Sizes:
    """A training step's sizes, at which ops are timed; the letters of `xtrain.engine.tensor`.

    rows: of the embedding and the head, V and its padding. parameters: of the whole model.
    """

    B: int
    T: int
    D: int
    H: int
    Hk: int
    Dh: int
    F: int
    V: int
    rows: int
    parameters: int


class Op:
    """A declared op. Calling it runs the best implementation and records it on the tape."""

    def __init__(
        self,
        name: str,
        reference: Implementation,
        *,
        samples: tuple[Sample, ...],
        check: Callable | None = None,
        mutates: tuple[int, ...] = (),
        sees_seed: bool = False,
        bench: Callable[[Sizes], tuple[Sample, ...]] | None = None,
        flop: Callable[[tuple, dict, str], float] | None = None,
        moved: Callable[[str, tuple, object], float] | None = None,
    ):
        if name in OPS:
            raise ValueError(f"op {name} is declared twice")
        self.name = name
        self.reference = reference
        self.samples = samples
        self.check = check
        self.mutates = mutates  # inputs updated in place (optimizer ops, which are not recorded)
        self.sees_seed = sees_seed  # backward is handed SEED itself when it is the tape's start
        self.bench = bench  # the op's uses in a training step of these sizes
        self.flop = flop  # (inputs, attrs, direction) -> FLOP of its products; None: it has none
        # (direction, inputs, outputs) -> bytes; None: every array once. Backward: dy, gradients.
        self.moved = moved
        self.fused: dict[str, Implementation] = {}
        OPS[name] = self

    def fuse(
        self,
        backend: str,
        forward: Callable,
        backward: Callable | None = None,
        *,
        accumulates: tuple[int, ...] = (),
        variant: str | None = None,
        simulated: bool = True,
    ) -> None:
        """Register a kernel for a backend; a variant is used only where the device asks for it."""
        key = backend if variant is None else f"{backend}:{variant}"
        self.fused[key] = Implementation(forward, backward, accumulates, key, simulated)

    def implementation(self, arrays: tuple) -> Implementation:
        """The implementation that runs for these arrays on the current device.

        The reference where an array has a dtype that the device's kernels do not take.
        """
        here = device.current()
        if here.reference_only:
            return self.reference
        for array in arrays:
            if array is not None and array.dtype.num in here.foreign and array.ndim > 0:
                return self.reference
        variant = here.variants.get(self.name)
        if variant is not None:
            return self.fused[f"{here.name}:{variant}"]
        return self.fused.get(here.name, self.reference)

    def run(self, *arrays, **attrs):
        """Run on plain arrays without the tape; returns the output array or tuple of arrays."""
        here = device.current()
        y, _ = self.implementation(arrays).forward(here.xp, *arrays, **attrs)
        if here.op_sync:
            here.synchronize()
        return y

    def __call__(self, *inputs, **attrs):
        """Run on tensors (or plain arrays, or None for an absent input) and record the op."""
        arrays, wanted = [], False
        for given in inputs:
            if isinstance(given, Tensor):
                arrays.append(given.data)
                wanted = wanted or given.requires_grad
            else:
                arrays.append(given)
        if self.check is not None:
            self.check(*arrays, **attrs)
        chosen = self.implementation(arrays)
        here = device.current()
        xp = here.xp
        y, saved = chosen.forward(xp, *arrays, **attrs)
        if here.op_sync:
            here.synchronize()
        several = isinstance(y, tuple)
        if here.check_values:
            _require_finite(self.name, xp, y if several else (y,))
        if not (wanted and is_recording()):
            return tuple(map(Tensor, y)) if several else Tensor(y)
        outputs = y if several else (y,)
        like = [(out.shape, out.dtype) for out in outputs]
        edges = tuple([x.edge() if isinstance(x, Tensor) else None for x in inputs])
        back = partial(_run_backward, self, chosen, here, edges, like, saved, attrs)
        node = Node(self.name, edges, len(outputs), back)
        if not several:
            return Tensor(y, requires_grad=y.dtype in FLOATS, node=node)
        return tuple(
            [
                Tensor(out, requires_grad=out.dtype in FLOATS, node=node, index=k)
                for k, out in enumerate(outputs)
            ]
        )


def _run_backward(op, chosen, here, inputs, like, saved, attrs, gradients: list) -> tuple:
    """Gradients of the inputs from those of the outputs, whose shapes and dtypes are `like`."""
    xp = here.xp
    for k, gradient in enumerate(gradients):
        if gradient is None or gradient is SEED:
            gradients[k] = _materialize(xp, gradient, *like[k], keep_seed=op.sees_seed)
    dy = gradients[0] if len(gradients) == 1 else tuple(gradients)
    if chosen.accumulates:
        into = tuple([_buffer(inputs[i]) for i in chosen.accumulates])
        found = chosen.backward(xp, dy, saved, into=into, **attrs)
    else:
        found = chosen.backward(xp, dy, saved, **attrs)
    if here.op_sync:
        here.synchronize()
    return found


def _buffer(leaf):
    """Where the gradient of an input is added to, or None."""
    return leaf.grad if isinstance(leaf, Tensor) and leaf.node is None else None


def _materialize(xp, gradient, shape, dtype, *, keep_seed):
    """An output that nothing used has gradient zero; the start of the tape has gradient one."""
    if gradient is None:
        return xp.zeros(shape, dtype)
    if gradient is SEED and not keep_seed:
        return xp.ones(shape, dtype)
    return gradient


def _require_finite(name: str, xp, outputs: tuple) -> None:
    for k, out in enumerate(outputs):
        if out.dtype in FLOATS and not bool(xp.isfinite(out.astype("float32")).all()):
            raise FloatingPointError(f"{name}: output {k} {out.shape} has NaN or infinity")
