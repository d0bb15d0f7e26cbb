"""Tensor, the tape, and the guard against reading values inside a step.

Legend for shapes: B batch, T tokens, S cached tokens, D hidden size, H query heads, Hk key-value
heads, Dh head dim, F feed-forward size, V vocabulary, N = B * T.

A Tensor is an array plus the node that made it. Nodes carry a number that grows as they are made;
backward visits the reachable ones in falling order, so no recursion is needed and the order, and
with it every bit of every gradient, is the same in each run.
"""

import heapq
import itertools
import threading
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np

_state = threading.local()
_numbers = itertools.count()


class HostReadError(RuntimeError):
    """A value was read on the host inside a step that must be capturable."""


@contextmanager
def no_tape():
    """Run without recording: nothing made inside can be differentiated."""
    before = is_recording()
    _state.recording = False
    try:
        yield
    finally:
        _state.recording = before


@contextmanager
def tape():
    """Record again inside `no_tape` (recomputation in a backward pass)."""
    before = is_recording()
    _state.recording = True
    try:
        yield
    finally:
        _state.recording = before


def is_recording() -> bool:
    """Whether ops record themselves in this thread."""
    return getattr(_state, "recording", True)


@contextmanager
def host_read_guard():
    """Forbid reading tensor values on the host (`item`, `float`, `bool`, comparison in an `if`)."""
    before = getattr(_state, "guarded", False)
    _state.guarded = True
    try:
        yield
    finally:
        _state.guarded = before


class Node:
    """One recorded op: who made which outputs from which inputs, and how to go back."""

    __slots__ = ("backward", "inputs", "n_outputs", "name", "number")

    def __init__(self, name: str, inputs: tuple, n_outputs: int, backward: Callable):
        self.name = name
        self.inputs = inputs
        self.n_outputs = n_outputs
        self.backward = backward  # (list of output gradients) -> tuple of input gradients
        self.number = next(_numbers)


class Tensor:
    """An array that may be differentiated. Arithmetic lives in the ops, not here."""

    __slots__ = ("data", "grad", "index", "node", "requires_grad")

    def __init__(self, data, *, requires_grad: bool = False, node: Node | None = None, index=0):
        self.data = data
        self.requires_grad = requires_grad
        self.grad = None
        self.node = node
        self.index = index  # which output of the node

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.data.strides

    @property
    def dtype(self):
        return self.data.dtype

    def edge(self) -> "Tensor":
        """What the tape keeps of an input: a leaf itself, of what an op made only its place.

        The array is held by whoever saved it for backward, and by nobody else.
        """
        if self.node is None:
            return self
        return Tensor(None, requires_grad=self.requires_grad, node=self.node, index=self.index)

    def detach(self) -> "Tensor":
        """The same array, cut from the tape."""
        return Tensor(self.data)

    def backward(self) -> None:
        """Add d(self)/d(leaf) to the gradient of every leaf; self must be one element."""
        if self.data.size != 1:
            raise ValueError(f"backward() starts from one element, this tensor has {self.shape}")
        backward([self], [SEED])

    def accumulate_grad(self, gradient) -> None:
        """Add to a leaf's gradient. Parameters override this: theirs is a view that stays put."""
        self.grad = gradient if self.grad is None else self.grad + gradient

    def host(self) -> np.ndarray:
        """The values on the host; an error inside a guarded step."""
        if getattr(_state, "guarded", False):
            raise HostReadError("a step reads a value on the host: it could not be captured")
        return np.asarray(self.data.get() if hasattr(self.data, "get") else self.data)

    def item(self) -> float:
        return self.host().item()

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        return f"Tensor{self.shape} {self.dtype}"


class _Seed:
    """Stands for the gradient 1 of the tensor that backward starts from.

    An op that already produced its gradients in its forward pass can tell by identity, without
    reading a value, that no factor has to be applied.
    """


SEED = _Seed()


def backward(outputs: list[Tensor], gradients: list) -> None:
    """Propagate gradients from outputs to all leaves that require one.

    A tensor used k times receives the sum of its k gradients. Arrays handed over by an op are never
    modified: two inputs may have been given the same one.
    """
    pending: dict[Node, list] = {}
    owned: set[tuple[int, int]] = set()  # sums made here, safe to add to in place
    queue: list[tuple[int, int, Node]] = []

    def receive(tensor: Tensor, gradient) -> None:
        node = tensor.node
        if node is None:
            if tensor.requires_grad:
                is_start = gradient is SEED
                tensor.accumulate_grad(np.ones_like(tensor.data) if is_start else gradient)
            return
        if node not in pending:
            pending[node] = [None] * node.n_outputs
            heapq.heappush(queue, (-node.number, id(node), node))
        slots, key = pending[node], (node.number, tensor.index)
        if slots[tensor.index] is None:
            slots[tensor.index] = gradient
        elif key in owned:
            slots[tensor.index] += gradient
        else:
            slots[tensor.index] = slots[tensor.index] + gradient
            owned.add(key)

    for tensor, gradient in zip(outputs, gradients, strict=True):
        receive(tensor, gradient)
    while queue:
        node = heapq.heappop(queue)[2]
        for tensor, gradient in zip(node.inputs, node.backward(pending.pop(node)), strict=True):
            if gradient is not None and isinstance(tensor, Tensor):
                receive(tensor, gradient)
