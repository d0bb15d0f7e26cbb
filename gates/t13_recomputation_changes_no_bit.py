"""T13: recomputing blocks in backward changes memory and time, and no bit.

Claim   With remat=mlp and remat=block the loss and every gradient are those of remat=none bit for
        bit, with dropout and grouped heads, over three training steps; the peak memory of a step
        with remat=block is at most half, and on a GPU it takes at most 1.4 times as long.
Why     A recomputation that draws another dropout mask, or adds a gradient twice, still trains.
Reads   conf/run/v0 on a CPU and v8 on a GPU, for the sizes.
Needs   A CPU or one CUDA device; there at v8's size. About 15 seconds on a CPU.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import numpy as np

from gates.instruments import paired, tiny_run
from gates.instruments.bits import differing_bits
from gates.instruments.real_step import on, three_steps
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.assemble.learner import build
from xtrain.config.bars import official
from xtrain.config.schema import RunConfig
from xtrain.engine import device as devices
from xtrain.engine import ops, rng
from xtrain.engine import remat as remat_module
from xtrain.engine.tensor import Tensor
from xtrain.models import qwen3
from xtrain.train.objectives.next_token import next_token, next_token_batch
from xtrain.train.step import TrainingStep

MODES = ("mlp", "block")
DROPOUT = 0.1
ROUNDS = 5


def bits(device: str) -> dict[str, float]:
    """Values of loss, gradient and weights that differ from those without recomputation."""
    none = _three_steps(device, "none")
    differing = 0
    for mode in MODES:
        pairs = zip(none, _three_steps(device, mode), strict=True)
        differing += sum(differing_bits(*pair) for pair in pairs)
    return {"remat_differing_values": float(differing)}


def _three_steps(device: str, mode: str) -> list[np.ndarray]:
    """One gradient, then losses, weights and moments of three steps."""
    here = devices.use(device)
    tiny = tiny_run.build(here, dropout=DROPOUT, remat=mode)
    ids = tiny_run.token_stream(3 * 4 * 9).reshape(3, 2, 2, 9).astype(np.int32)
    batches = [next_token_batch(each) for each in ids]
    micro = {name: here.array(array[0]) for name, array in batches[0].items()}
    key = here.array(rng.key_array(np, 7, 0))
    loss = next_token(tiny.model, micro, here.array(np.float32(1 / 16)), key)
    loss.backward()
    values = [here.host(loss.data).copy(), here.host(tiny.buffers.grad).copy()]
    tiny.buffers.grad[...] = 0
    for step, batch in enumerate(batches):
        tiny.step.load(batch, step, 1e-2)
        values.append(here.host(tiny.step.run()[0]).copy())
    b = tiny.buffers
    return values + [here.host(x).copy() for x in (b.master, b.moment1, b.moment2)]


def memory(device: str) -> dict[str, float]:
    """Peak of a training step with remat=block over that without, weights and all."""
    peaks = {}
    for mode in ("none", "block"):
        run = _deep(device, mode)
        peaks[mode] = devices.use(device).peak_of(lambda run=run: _stepped(run, drawn=False))
    return {"remat_memory_ratio": peaks["block"] / peaks["none"]}


def speed(device: str) -> Mapping[str, float | NotMeasured]:
    """Time of v8's step with remat=block over that without."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    declined = paired.busy(here)
    if declined:
        return {"remat_slowdown": declined}
    runs = {mode: on(device, official("v8"), remat=mode) for mode in ("none", "block")}
    ways = {
        mode: paired.Way(_stepped(run, drawn=True).run, run.features) for mode, run in runs.items()
    }
    return paired.ratios(here, ways, {"remat_slowdown": ("block", "none")}, rounds=ROUNDS)


def _deep(device: str, mode: str) -> RunConfig:
    """v8, or on a CPU a small model of as many blocks a word, where activations are most of it."""
    if device == "cuda":
        return on(device, official("v8"), remat=mode)
    shape = replace(tiny_run.MODEL, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    return on(device, _sized(shape), remat=mode)


def _stepped(run: RunConfig, *, drawn: bool) -> TrainingStep:
    """The step after three. drawn: initial weights, not zeros; only a time depends on that."""
    return three_steps(run, build(run, initialize=drawn))


def _sized(model) -> RunConfig:
    run = official("v0")
    model = replace(model, max_position_embeddings=256)
    return replace(run, model=model, train=replace(run.train, batch_size=4, seq_len=128))


def _masks_are_drawn_anew():
    """Dropout whose site moves on with every use, as a library's own generator does."""
    sound, count = ops.dropout, itertools.count()
    return mock.patch.object(
        ops, "dropout", lambda x, key, *, p, site: sound(x, key, p=p, site=site + next(count))
    )


def _parameters_get_their_gradient_twice():
    """The recomputed graph is differentiated once more."""
    sound = remat_module.backward

    def twice(outputs, gradients):
        sound(outputs, gradients)
        sound(outputs, gradients)

    return mock.patch.object(remat_module, "backward", twice)


def _nothing_is_recomputed():
    return mock.patch.object(qwen3, "remat", lambda fn, *inputs: fn(*inputs))


def _blocks_are_recomputed_four_times():
    sound = qwen3.remat

    def again(fn, *inputs):
        def repeated(*given):
            for _ in range(3):
                fn(*(Tensor(x.data) for x in given))
            return fn(*given)

        return sound(repeated, *inputs)

    return mock.patch.object(qwen3, "remat", again)


GATE = Gate(
    "T13",
    "Activation recomputation",
    measures=(bits, memory, speed),
    defects=(
        Defect("new masks", "remat_differing_values", bits, _masks_are_drawn_anew),
        Defect(
            "gradient twice", "remat_differing_values", bits, _parameters_get_their_gradient_twice
        ),
        Defect("no recomputation", "remat_memory_ratio", memory, _nothing_is_recomputed),
        Defect("four times", "remat_slowdown", speed, _blocks_are_recomputed_four_times),
    ),
    composes=("run/v0", "run/v8", "model/v8"),
)
