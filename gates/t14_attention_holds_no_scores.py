"""T14: attention without a T x S matrix of scores, forward and backward.

Claim   With fp32 inputs the device's attention gives what composed attention gives, to 1e-4
        forward and 5e-5 in the gradients, with grouped heads, ragged lengths and documents; in
        bf16 it is no further from float64. A training step of v9 holds less beside its weights,
        gradients and moments. Forward and backward are at least as fast as PyTorch's flash
        attention at head dims 32, 64 and 128, and as cuDNN's at 32.
Why     Tiles hide errors: at an edge, in one head of a group, in one row's sum, in one tile.
Reads   conf/run/v9 on a GPU, for the sizes of the memory.
Needs   A CPU, where the device's attention is the CPU's own kernel and bf16 runs composed, or one
        CUDA device; torch for the speeds. About 5 seconds on a CPU.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from unittest import mock

import numpy as np

from gates.instruments import attention_peer, paired
from gates.instruments.real_step import on, three_steps
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.assemble.learner import build
from xtrain.config.bars import official
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.device import Device
from xtrain.engine.dtype import bfloat16, float32, float64

T, TILE = 333, 64  # no multiple of any tile; the shortest tile of keys
# Sequences, query and key-value heads, head dim, whether documents are kept apart.
SHAPES = ((2, 4, 2, 32, False), (1, 6, 2, 64, True), (1, 2, 1, 128, False), (2, 4, 1, 16, True))
MEMORY = {1024: 32, 2048: 16}  # sequences of so many tokens


def against_composed(device: str) -> dict[str, float]:
    """Worst absolute differences from composed attention, fp32 in."""
    here = devices.use(device)
    forward, gradients = 0.0, 0.0
    for inputs in _problems(float32):
        y, *found = _attend(here, "flash", *inputs)
        true_y, *truth = _attend(here, "composed", *inputs)
        forward = _worst(forward, y, true_y)
        gradients = functools.reduce(_worst_of, zip(found, truth, strict=True), gradients)
    return {"flash_forward_max_abs": forward, "flash_grads_max_abs": gradients}


def rounding(device: str) -> dict[str, float]:
    """Relative L2 distance from float64 of y and the gradients in bf16, over composed's."""
    here = devices.use(device)
    errors = {"flash": 0.0, "composed": 0.0}
    for inputs in _problems(bfloat16):
        truth = _truth(inputs)
        for name in errors:
            found = _attend(here, name, *inputs)
            errors[name] += sum(map(_relative, found, truth))
    return {"flash_bf16_error_ratio": errors["flash"] / errors["composed"]}


def memory(device: str) -> dict[str, float]:
    """Change of the peak of a step of v9 with remat=block beside its state, of composed's."""
    if device != "cuda":
        return {}
    return {f"flash_memory_change_{seq}": _memory_change(device, seq) for seq in MEMORY}


def speed(device: str) -> Mapping[str, float | NotMeasured]:
    """How many times as fast as PyTorch's flash attention and as cuDNN's, forward and backward."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    names = {
        (peer, head_dim): f"flash_vs_{peer}_hd{head_dim}"
        for head_dim in attention_peer.HEADS
        for peer in attention_peer.PEERS
    }
    declined = attention_peer.why_absent() or paired.busy(here)
    if declined:
        return dict.fromkeys(names.values(), declined)
    found = {}
    for head_dim in attention_peer.HEADS:
        with _attention(here, "flash"):
            ratios = attention_peer.ratios(here, head_dim)
        found |= {names[peer, head_dim]: ratio for peer, ratio in ratios.items()}
    return found


def _problems(dtype) -> Iterator[tuple]:
    """q, k, v, dy and starts, on the host."""
    for number, (B, H, Hk, Dh, documents) in enumerate(SHAPES):
        source = np.random.default_rng(number)
        heads = [source.standard_normal((B, n, T, Dh)).astype(dtype) for n in (H, Hk, Hk, H)]
        starts = None
        if documents:
            begins = np.where(source.random((B, T)) < 0.02, np.arange(T), 0)
            starts = np.maximum.accumulate(begins, axis=1).astype(np.int32)
        yield *heads, starts


def _attention(here: Device, name: str):
    """The device's attention of this name; on a CPU flash is its own kernel, composed is none."""
    if here.name == "cuda":
        others = {op: variant for op, variant in here.variants.items() if op != "attention"}
        chosen = {"attention": "flash"} if name == "flash" else {}
        return mock.patch.object(here, "variants", others | chosen)
    return mock.patch.object(here, "reference_only", name == "composed")


def _attend(here: Device, name: str, q, k, v, dy, starts) -> list[np.ndarray]:
    """y, dq, dk, dv on the host."""
    arrays = [here.array(x) for x in (q, k, v)]
    placed = None if starts is None else here.array(starts)
    with _attention(here, name):
        chosen = ops.attention.implementation(tuple(arrays))
    if name == "flash":
        chosen = _seeded(chosen)
    y, saved = chosen.forward(here.xp, *arrays, placed, None)
    gradients = chosen.backward(here.xp, here.array(dy), saved)
    return [here.host(x).copy() for x in (y, *gradients[:3])]


def _truth(inputs) -> tuple[np.ndarray, ...]:
    *heads, starts = inputs
    q, k, v, dy = (x.astype(float64) for x in heads)
    y, saved = ops.attention.reference.forward(np, q, k, v, starts, None)
    return y, *ops.attention.reference.backward(np, dy, saved)[:3]


def _worst(so_far: float, value, true) -> float:
    difference = np.abs(value.astype(float64) - true.astype(float64)).max()
    return float(np.maximum(so_far, difference))  # unlike max, keeps what is not a number


def _worst_of(so_far: float, pair) -> float:
    return _worst(so_far, *pair)


def _relative(value, true) -> float:
    return float(np.linalg.norm(value.astype(float64) - true) / np.linalg.norm(true))


def _memory_change(device: str, seq_len: int) -> float:
    peaks = {}
    for name in ("composed", "flash"):
        run = official("v9")
        run = replace(
            run,
            model=replace(run.model, max_position_embeddings=max(MEMORY)),
            train=replace(run.train, batch_size=MEMORY[seq_len], seq_len=seq_len, accumulation=1),
        )
        peaks[name] = _peak(on(device, run, attention=_memory_attention(name), remat="block"))
    return peaks["flash"] / peaks["composed"] - 1


def _peak(run) -> int:
    """Bytes that a step takes beside the weights, gradients and moments."""
    learner = build(run, initialize=False)
    return learner.device.peak_of(lambda: three_steps(run, learner))


def _memory_attention(name: str) -> str:
    return name


def _seeded(implementation):
    """What a defect changes."""
    return implementation


def _defect(change):
    """Attention whose (forward, backward) is change(implementation)."""

    def seeded(sound):
        forward, backward = change(sound)
        return dataclasses.replace(sound, forward=forward, backward=backward)

    return mock.patch(f"{__name__}._seeded", seeded)


def _a_mask_is_off_by_one_at_a_tiles_edge():
    """The first query of each tile does not see its own key, the tile's first."""

    def change(sound):
        def forward(xp, q, k, v, starts, offsets):
            y, saved = sound.forward(xp, q, k, v, starts, offsets)
            edges = slice(TILE, None, TILE)
            less = sound.forward(xp, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], None, None)[0]
            moved = xp.concatenate([less[:, :, :1], less], axis=2)
            y = y.copy()
            y[:, :, edges] = moved[:, :, edges]
            return y, saved

        return forward, sound.backward

    return _defect(change)


def _a_group_reads_its_heads_in_another_order():
    def change(sound):
        def forward(xp, q, k, v, starts, offsets):
            order = xp.arange(q.shape[1]).reshape(-1, k.shape[1]).T.reshape(-1)
            y, saved = sound.forward(xp, q[:, order].copy(), k, v, starts, offsets)
            return y[:, xp.argsort(order)], saved

        return forward, sound.backward

    return _defect(change)


def _a_tile_of_dk_is_missing():
    def change(sound):
        def backward(xp, dy, saved):
            dq, dk, *rest = sound.backward(xp, dy, saved)
            dk = dk.copy()
            dk[:, :, TILE : 2 * TILE] = 0
            return dq, dk, *rest

        return sound.forward, backward

    return _defect(change)


def _probabilities_are_of_the_row_before():
    """Backward reads the log-sum-exp, or where they are kept the probabilities, of another row."""

    def change(sound):
        def backward(xp, dy, saved):
            return sound.backward(xp, dy, _with_rows_rolled(xp, saved, dy.shape))

        return sound.forward, backward

    return _defect(change)


def _with_rows_rolled(xp, saved, shape):
    """`saved` with what it holds of each row, and of rows alone, rolled by one row."""
    if isinstance(saved, tuple):
        return tuple(_with_rows_rolled(xp, each, shape) for each in saved)
    if not hasattr(saved, "shape"):
        return saved
    if saved.shape == shape[:3]:  # log-sum-exp: batch, head, query
        return xp.roll(saved, 1, axis=2)
    of_keys = saved.ndim >= 3 and saved.shape[-2:] == (shape[2], shape[2])
    return xp.roll(saved, 1, axis=-2) if of_keys else saved


def _probabilities_are_rounded_twice():
    """The values lose three bits before they are read."""

    def change(sound):
        def forward(xp, q, k, v, starts, offsets):
            coarse = (v.astype(float32) * 16).round() / 16
            return sound.forward(xp, q, k, coarse.astype(v.dtype), starts, offsets)

        return forward, sound.backward

    return _defect(change)


def _scores_are_kept():
    return mock.patch(f"{__name__}._memory_attention", lambda name: "composed")


def _composed_runs_instead():
    sound = _attention
    return mock.patch(f"{__name__}._attention", lambda here, _: sound(here, "composed"))


GATE = Gate(
    "T14",
    "Flash attention",
    measures=(against_composed, rounding, memory, speed),
    defects=(
        Defect(
            "mask off by one at a tile's edge",
            "flash_forward_max_abs",
            against_composed,
            _a_mask_is_off_by_one_at_a_tiles_edge,
        ),
        Defect(
            "order of a group's heads",
            "flash_forward_max_abs",
            against_composed,
            _a_group_reads_its_heads_in_another_order,
        ),
        Defect(
            "a tile of dK is missing",
            "flash_grads_max_abs",
            against_composed,
            _a_tile_of_dk_is_missing,
        ),
        Defect(
            "log-sum-exp of another row",
            "flash_grads_max_abs",
            against_composed,
            _probabilities_are_of_the_row_before,
        ),
        Defect(
            "coarse values", "flash_bf16_error_ratio", rounding, _probabilities_are_rounded_twice
        ),
        Defect("kept scores", "flash_memory_change_1024", memory, _scores_are_kept),
        Defect("composed", "flash_vs_sdpa_hd32", speed, _composed_runs_instead),
    ),
    composes=("run/v9", "model/v9"),
)
