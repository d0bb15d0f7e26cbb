"""Recomputation of activations: keep a function's inputs, not what it makes on the way.

`remat(fn, *inputs)` runs `fn` unrecorded; its backward runs `fn` again, recorded, and
differentiates that. Because randomness is counter-based, the second run makes the same bits, so
gradients are bitwise those without recomputation.

Source: Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174.
"""

from collections.abc import Callable

from xtrain.engine.tensor import Node, Tensor, backward, is_recording, no_tape, tape


def remat(fn: Callable, *inputs: Tensor):
    """`fn(*inputs)` whose intermediate tensors are recomputed in backward.

    fn takes and returns tensors (one, or a tuple); parameters it uses get their gradients directly.
    """
    if not is_recording():
        return fn(*inputs)
    with no_tape():
        result = fn(*inputs)
    several = isinstance(result, tuple)
    outputs = result if several else (result,)

    def run_backward(gradients: list) -> tuple:
        leaves = [Tensor(i.data, requires_grad=i.requires_grad) for i in inputs]
        with tape():
            again = fn(*leaves)
        again = again if several else (again,)
        used = [(t, g) for t, g in zip(again, gradients, strict=True) if g is not None]
        backward([t for t, _ in used], [g for _, g in used])
        return tuple(leaf.grad for leaf in leaves)

    node = Node("remat", inputs, len(outputs), run_backward)
    tensors = tuple(
        Tensor(out.data, requires_grad=True, node=node, index=k) for k, out in enumerate(outputs)
    )
    return tensors if several else tensors[0]
