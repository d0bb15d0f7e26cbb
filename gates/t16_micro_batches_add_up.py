"""T16: micro-batches add up to the large batch.

Claim   One micro-batch is the step without accumulation bit for bit; 2, 4 or 8 give the loss and
        the gradient of one large batch to rounding, also when they have unequal numbers of valid
        tokens, or none; a step has one update; four micro-batches need at most 0.3 of the memory.
Why     Micro-batches weighted by their own means give the wrong gradient as soon as they differ.
Reads   conf/run/v0 on a CPU and v9 on a GPU, for the sizes of the memory.
Needs   A CPU or one CUDA device; there at v9's size. About 5 seconds on a CPU.
"""

from dataclasses import replace
from unittest import mock

import numpy as np

from gates.instruments import tiny_run
from gates.instruments.bits import differing_bits
from gates.instruments.real_step import on, three_steps
from gates.judging.gate import Defect, Gate
from xtrain.assemble.learner import build
from xtrain.config.bars import official
from xtrain.config.schema import RunConfig
from xtrain.engine import device as devices
from xtrain.engine.testing import worst
from xtrain.train.learner import Learner
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW
from xtrain.train.step import TrainingStep

ROWS, T = 8, 12
SPLITS = (2, 4, 8)
# Valid targets of each row: one row has one, one none, so that a micro-batch of it has none.
UNEQUAL = (12, 1, 0, 12, 3, 12, 7, 12)


class KeepsGradient(AdamW):
    """AdamW that keeps each gradient it is given, before clipping, and counts its updates."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept: list[np.ndarray] = []

    def update(self):
        self.kept.append(self.xp.array(self.buffers.grad))
        return super().update()


def one_micro_batch(device: str) -> dict[str, float]:
    """Values of loss and gradient that differ from the objective's own, called once."""
    here = devices.use(device)
    batch = _batch((T,) * ROWS)
    loss, gradient, _ = _step(device, batch, 1)
    tiny = tiny_run.build(here)
    whole = {name: here.array(array) for name, array in batch.items()}
    alone = next_token(tiny.model, whole, here.array(np.float32(1 / (ROWS * T))), None)
    alone.backward()
    pairs = ((loss, here.host(alone.data)), (gradient, here.host(tiny.buffers.grad)))
    return {"accumulation_1_differing_values": float(sum(differing_bits(*p) for p in pairs))}


def several(device: str) -> dict[str, float]:
    """The worst relative distance from one large batch, over the splits."""
    equal, unequal = (_distances(device, valid) for valid in ((T,) * ROWS, UNEQUAL))
    return {
        "accumulation_loss_rel": equal[0],
        "accumulation_grads_rel": equal[1],
        "unequal_counts_loss_rel": unequal[0],
        "unequal_counts_grads_rel": unequal[1],
    }


def updates(device: str) -> dict[str, float]:
    """How often a step applies its gradient, at most; what ranks reduce there is T8's."""
    counts = [_step(device, _batch(UNEQUAL), split)[2] for split in (1, *SPLITS)]
    return {"updates_per_step": float(max(counts, key=lambda n: abs(n - 1)))}


def memory(device: str) -> dict[str, float]:
    """Peak activations of a step of 4 micro-batches over that of one of four times the rows."""
    run = _sized(device)
    rows = run.train.batch_size
    peaks = [
        _peak(replace(run, train=replace(run.train, batch_size=each, accumulation=micro)))
        for each, micro in ((4 * rows, 1), (rows, 4))
    ]
    return {"accumulation_memory_ratio": peaks[1] / peaks[0]}


def _distances(device: str, valid) -> tuple[float, float]:
    batch = _batch(valid)
    loss, gradient, _ = _step(device, batch, 1)
    found = [_step(device, batch, split) for split in SPLITS]
    return (
        worst(_relative(each[0], loss) for each in found),
        worst(_relative(each[1], gradient) for each in found),
    )


def _batch(valid) -> dict[str, np.ndarray]:
    """Rows of random words, of which the first valid[row] targets count: (ROWS, T) int32."""
    ids = np.random.default_rng(1).integers(0, tiny_run.MODEL.vocab_size, (ROWS, T + 1))
    ignored = np.arange(T) >= np.array(valid)[:, None]
    targets = np.where(ignored, -100, ids[:, 1:])
    return {"input_ids": ids[:, :-1].astype(np.int32), "targets": targets.astype(np.int32)}


def _step(device: str, batch: dict, micro_batches: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(loss, gradient, updates) of one step of the batch cut into micro-batches."""
    here = devices.use(device)
    tiny = tiny_run.build(here)
    optimizer = KeepsGradient(tiny.buffers, tiny_run.OPTIM, here)
    step = Learner(tiny.model, tiny.buffers, optimizer, here).step(next_token, seed=0)
    cut = {n: a.reshape(micro_batches, ROWS // micro_batches, T) for n, a in batch.items()}
    step.load(cut, 0, 1e-3)
    loss = here.host(step.run()[0]).copy()
    return loss, here.host(optimizer.kept[-1]), len(optimizer.kept)


def _sized(device: str) -> RunConfig:
    run = official("v9" if device == "cuda" else "v0")
    if device != "cuda":
        shape = replace(tiny_run.MODEL, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
        run = replace(
            run,
            model=replace(shape, max_position_embeddings=256),
            train=replace(run.train, batch_size=4, seq_len=128),
        )
    else:
        run = replace(run, train=replace(run.train, batch_size=16))
    return on(device, run)


def _peak(run: RunConfig) -> int:
    """Bytes that a step takes beside the weights, gradients and moments."""
    learner = build(run)
    return learner.device.peak_of(lambda: three_steps(run, learner))


def _relative(value, truth) -> float:
    value, truth = (np.asarray(a, np.float64) for a in (value, truth))
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def _micro_batches_weigh_alike():
    """Each micro-batch's own mean, averaged."""
    sound = next_token

    def wrong(model, batch, scale, key):
        rows = batch["targets"].shape[0]
        valid = (batch["targets"] >= 0).sum()
        own = np.float32(rows / ROWS) / np.maximum(valid, 1)
        return sound(model, batch, own.astype(np.float32), key)

    return mock.patch(f"{__name__}.next_token", wrong)


def _gradient_starts_anew_in_each_micro_batch():
    sound = tiny_run.Qwen3.__call__

    def wrong(self, *arguments, **options):
        self.head_weight.grad[...] = 0
        return sound(self, *arguments, **options)

    return mock.patch.object(tiny_run.Qwen3, "__call__", wrong)


def _each_micro_batch_updates():
    sound = TrainingStep._run

    def wrong(self):
        batch, keys = self.batch, self.keys
        for a in range(keys.shape[0]):
            self.batch = {name: array[a : a + 1] for name, array in batch.items()}
            self.keys = keys[a : a + 1]
            result = sound(self)
        self.batch, self.keys = batch, keys
        return result

    return mock.patch.object(TrainingStep, "_run", wrong)


def _a_sum_is_kept_apart():
    """The gradient goes through another sum, in half precision, on its way into the step."""
    sound = KeepsGradient.update

    def wrong(self):
        self.buffers.grad[...] = self.buffers.grad.astype(np.float16)
        return sound(self)

    return mock.patch.object(KeepsGradient, "update", wrong)


def _tapes_are_kept():
    """The activations of every micro-batch stay until the step has ended."""
    kept, sound = [], TrainingStep._run

    def wrong(self):
        objective = self.objective
        self.objective = lambda *arguments: kept.append(objective(*arguments)) or kept[-1]
        try:
            return sound(self)
        finally:
            self.objective = objective
            kept.clear()

    return mock.patch.object(TrainingStep, "_run", wrong)


GATE = Gate(
    "T16",
    "Gradient accumulation",
    measures=(one_micro_batch, several, updates, memory),
    defects=(
        Defect(
            "another sum", "accumulation_1_differing_values", one_micro_batch, _a_sum_is_kept_apart
        ),
        Defect(
            "head starts anew",
            "accumulation_grads_rel",
            several,
            _gradient_starts_anew_in_each_micro_batch,
        ),
        Defect("own means", "unequal_counts_loss_rel", several, _micro_batches_weigh_alike),
        Defect("own means", "unequal_counts_grads_rel", several, _micro_batches_weigh_alike),
        Defect("update each", "updates_per_step", updates, _each_micro_batch_updates),
        Defect("kept tapes", "accumulation_memory_ratio", memory, _tapes_are_kept),
    ),
    composes=("run/v0", "run/v9", "model/v9"),
)
