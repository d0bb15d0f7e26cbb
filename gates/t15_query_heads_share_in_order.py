"""T15: query heads share key-value heads in order, and their gradients add without atomics.

Claim   Head h of H reads key-value head h // (H / Hk), from Hk = H down to Hk = 1: with a group of
        one it is multi-head attention bit for bit, with larger groups multi-head attention over
        repeated keys and values, whose gradients are summed over the group. Twice the same input
        gives the same bits. Grouped models agree with PyTorch's Qwen3.
Why     A wrong order of heads trains as well, and shows only when somebody else reads the weights.
Reads   gates/golden/*.npz, made once with torch and transformers.
Needs   A CPU or one CUDA device; transformers for one value. About 5 seconds, 15 with it.
"""

import dataclasses
from unittest import mock

import numpy as np

from gates.instruments.bits import differing_bits
from gates.instruments.golden.compare import can_ask, closed_loop, golden_greedy, golden_values
from gates.instruments.golden.reference import MODELS
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.testing import worst

HEADS = 6
GROUPED = (3, 2, 1)  # key-value heads: groups of 2, 3 and, for MQA, 6
B, T, Dh = 2, 37, 16
GOLDEN = ("golden_loss_rel", "golden_logits_max_abs", "golden_worst_grad_rel_l2")


def group_of_one(device: str) -> dict[str, float]:
    """Values that differ from attention over each head alone, forward and backward."""
    here = devices.use(device)
    q, k, v, dy = _inputs(HEADS)
    whole = _attend(here, q, k, v, dy)
    alone = [_attend(here, *(_head(x, h) for x in (q, k, v, dy))) for h in range(HEADS)]
    joined = (np.concatenate(parts, axis=1) for parts in zip(*alone, strict=True))
    return {"group_1_differing_values": _differing(whole, joined)}


def order_of_heads(device: str) -> dict[str, float]:
    """Against multi-head attention over repeated keys and values.

    head_order_differing_values: of the output and of the gradient of q.  kv_gradient_rel: worst
    relative L2 distance of the gradients of k and v from the sum over each group, in float64.
    """
    here = devices.use(device)
    differing, errors = 0.0, []
    for kv_heads in GROUPED:
        q, k, v, dy = _inputs(kv_heads)
        group = HEADS // kv_heads
        repeated = (np.repeat(x, group, axis=1) for x in (k, v))
        y, dq, *dkv = _attend(here, q, *repeated, dy)
        ours = _attend(here, q, k, v, dy)
        differing += _differing(ours[:2], (y, dq))
        for found, parts in zip(ours[2:], dkv, strict=True):
            parts = parts.reshape(B, kv_heads, group, T, Dh).astype(np.float64)
            truth = parts.sum(2)
            errors.append(float(np.linalg.norm(found - truth) / np.linalg.norm(truth)))
    return {"head_order_differing_values": differing, "kv_gradient_rel": worst(errors)}


def run_to_run(device: str) -> dict[str, float]:
    here = devices.use(device)
    inputs = [_inputs(kv_heads) for kv_heads in GROUPED]
    pairs = [(_attend(here, *x), _attend(here, *x)) for x in inputs]
    return {"gqa_run_to_run_differing_values": sum(_differing(*pair) for pair in pairs)}


def against_pytorch(device: str) -> dict[str, float]:
    """Two heads on one of four, and three on one: the worse of the two models."""
    values = golden_values(device)
    found = {f"gqa_{name}": values[name] for name in GOLDEN}
    greedy = golden_greedy(device)["golden_greedy_mismatches"]
    return found | {"gqa_golden_greedy_differing_tokens": greedy}


def in_transformers(device: str) -> dict[str, float | NotMeasured]:
    """Greedy tokens of exported grouped models that transformers continues otherwise."""
    name = "gqa_greedy_differing_tokens"
    if not can_ask():
        return {name: NotMeasured("torch and transformers are not installed (xtrain[peers])")}
    found = [closed_loop(device, golden.config) for golden in MODELS]
    return {name: sum(each["closed_loop_greedy_mismatches"] for each in found)}


def _inputs(kv_heads: int) -> tuple[np.ndarray, ...]:
    source = np.random.default_rng(kv_heads)
    shapes = ((B, HEADS, T, Dh), (B, kv_heads, T, Dh), (B, kv_heads, T, Dh), (B, HEADS, T, Dh))
    return tuple(source.standard_normal(shape).astype(np.float32) for shape in shapes)


def _attend(here, q, k, v, dy) -> tuple[np.ndarray, ...]:
    """y, dq, dk, dv on the host."""
    arrays = [here.array(np.ascontiguousarray(x)) for x in (q, k, v)]
    chosen = ops.attention.implementation(tuple(arrays))
    y, saved = chosen.forward(here.xp, *arrays, None, None)
    gradients = chosen.backward(here.xp, here.array(np.ascontiguousarray(dy)), saved)
    return tuple(here.host(x).copy() for x in (y, *gradients[:3]))


def _head(x: np.ndarray, h: int) -> np.ndarray:
    return x[:, h : h + 1]


def _differing(one, other) -> float:
    return float(sum(differing_bits(a, b) for a, b in zip(one, other, strict=True)))


def _patched(change, *, only_groups: bool = False):
    """Attention whose (forward, backward) is change(implementation)."""
    choose = ops.attention.implementation

    def chosen_wrongly(arrays):
        sound = choose(arrays)
        if only_groups and arrays[0].shape[1] == arrays[1].shape[1]:
            return sound
        forward, backward = change(sound)
        return dataclasses.replace(sound, forward=forward, backward=backward)

    return mock.patch.object(ops.attention, "implementation", chosen_wrongly)


def _heads_are_shared_by_remainder():
    """Head h reads key-value head h % Hk."""

    def change(sound):
        def forward(xp, q, k, v, *rest):
            y, saved = sound.forward(xp, _swapped(xp, q, k.shape[1]), k, v, *rest)
            return _swapped_back(xp, y, k.shape[1]), (k.shape[1], saved)

        def backward(xp, dy, saved):
            kv_heads, saved = saved
            dq, *others = sound.backward(xp, _swapped(xp, dy, kv_heads), saved)
            return _swapped_back(xp, dq, kv_heads), *others

        return forward, backward

    return _patched(change)


def _swapped(xp, x, kv_heads: int):
    """Heads (group, kv) to (kv, group)."""
    heads = x.shape[1]
    order = xp.arange(heads).reshape(heads // kv_heads, kv_heads).T.reshape(-1)
    return xp.ascontiguousarray(x[:, order])


def _swapped_back(xp, x, kv_heads: int):
    return _swapped(xp, x, x.shape[1] // kv_heads)


def _a_group_of_one_reads_its_neighbour():
    def change(sound):
        def forward(xp, q, k, v, *rest):
            if q.shape[1] == k.shape[1]:
                v = xp.roll(v, 1, axis=1)
            return sound.forward(xp, q, k, v, *rest)

        return forward, sound.backward

    return _patched(change)


def _gradients_are_added_in_any_order():
    """As atomic additions do: another order each time."""
    source = np.random.default_rng(0)

    def change(sound):
        def backward(xp, dy, saved):
            dq, dk, dv, *none = sound.backward(xp, dy, saved)
            jitter = 1 + 1e-7 * float(source.integers(0, 9))
            return dq, dk * xp.float32(jitter), dv * xp.float32(jitter), *none

        return sound.forward, backward

    return _patched(change)


def _the_last_head_gives_no_gradient():
    def change(sound):
        def backward(xp, dy, saved):
            less = dy.copy()
            less[:, -1] = 0
            dq, *_ = sound.backward(xp, dy, saved)
            return dq, *sound.backward(xp, less, saved)[1:]

        return sound.forward, backward

    return _patched(change, only_groups=True)


GATE = Gate(
    "T15",
    "Grouped-query attention",
    measures=(group_of_one, order_of_heads, run_to_run, against_pytorch, in_transformers),
    defects=(
        Defect(
            "group of one",
            "group_1_differing_values",
            group_of_one,
            _a_group_of_one_reads_its_neighbour,
        ),
        Defect(
            "head order",
            "head_order_differing_values",
            order_of_heads,
            _heads_are_shared_by_remainder,
        ),
        Defect(
            "head order in a model",
            "gqa_golden_logits_max_abs",
            against_pytorch,
            _heads_are_shared_by_remainder,
        ),
        Defect(
            "head order elsewhere",
            "gqa_greedy_differing_tokens",
            in_transformers,
            _heads_are_shared_by_remainder,
        ),
        Defect(
            "any order of sums",
            "gqa_run_to_run_differing_values",
            run_to_run,
            _gradients_are_added_in_any_order,
        ),
        Defect(
            "lost gradient",
            "kv_gradient_rel",
            order_of_heads,
            _the_last_head_gives_no_gradient,
        ),
        Defect(
            "lost gradient in a model",
            "gqa_golden_worst_grad_rel_l2",
            against_pytorch,
            _the_last_head_gives_no_gradient,
        ),
    ),
)
