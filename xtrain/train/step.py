"""The one training step: micro-batches, gradient, clip, update.

`TrainingStep.run` is a plain function of device arrays that stay where they are. It obeys the rules
of a capturable step (no host read, nothing that changes but through arrays), so `device.capture`
may replay it; a guard enforces the main rule on the CPU too.
"""

from collections.abc import Callable

import numpy as np

from xtrain.engine import rng
from xtrain.engine.device import Device
from xtrain.engine.tensor import host_read_guard
from xtrain.train.optimizer import AdamW


class TrainingStep:
    """Fixed inputs and outputs of a step, and the step.

    Inputs, written by `load`: the batch (A, B, T) int32 arrays, the dropout keys (A, 4) uint32 and
    the optimizer's learning rate. Outputs: loss () float64, grad_norm () float64; and in `seen`
    what an objective returned beside its loss, over the micro-batches: names ending in `_sum` are
    added, those in `_max` compared.
    """

    def __init__(
        self,
        model,
        optimizer: AdamW,
        objective: Callable,
        *,
        seed: int,
        device: Device,
        dropout: float,
    ):
        self.model, self.optimizer, self.objective = model, optimizer, objective
        self.seed, self.device, self.dropout = seed, device, dropout
        self.batch: dict | None = None
        self.keys = None
        self.seen: dict = {}  # what the objective saw in the last step, by name, () float64
        self.run = device.capture(self._run, self._inputs)

    def load(self, batch: dict[str, np.ndarray], step: int, lr: float) -> None:
        """Write a step's inputs into the fixed arrays; shapes must stay those of the first."""
        micro_batches = batch["input_ids"].shape[0]
        keys = np.stack([rng.key_array(np, self.seed, step, a) for a in range(micro_batches)])
        if self.batch is None:
            self.batch = {name: self.device.array(a) for name, a in batch.items()}
            self.keys = self.device.array(keys)
        for name, array in batch.items():
            if self.batch[name].shape != array.shape:
                raise ValueError(
                    f"batch[{name!r}] is {array.shape}, "
                    f"the step was made for {self.batch[name].shape}"
                )
            self.device.write(self.batch[name], array)
        self.device.write(self.keys, keys)
        self.device.write(self.optimizer.lr, np.array(lr, np.float32))

    def _inputs(self) -> dict:
        """The arrays that a captured step goes on reading and writing, by name."""
        buffers = self.optimizer.buffers
        state = {"weights": buffers.master, "gradients": buffers.grad, "lr": self.optimizer.lr}
        return {**self.batch, "dropout keys": self.keys, **state}

    def _run(self) -> tuple:
        """Accumulate the gradient over the micro-batches and update; returns (loss, grad_norm)."""
        xp = self.device.xp
        with host_read_guard():
            # One divisor for all micro-batches: tokens weigh alike, and none at all gives loss 0.
            valid = (self.batch["targets"] >= 0).sum()
            scale = (1.0 / xp.maximum(valid, 1)).astype(np.float32)
            loss = xp.zeros((), np.float64)
            for a in range(self.keys.shape[0]):
                micro = {name: array[a] for name, array in self.batch.items()}
                key = self.keys[a] if self.dropout > 0 else None
                term = self.objective(self.model, micro, scale, key)
                if isinstance(term, tuple):
                    term, seen = term
                    self.seen = _gathered(xp, self.seen if a else {}, seen)
                term.backward()
                loss = loss + term.data
                del term  # its tape holds the activations; the next micro-batch needs their room
            return loss, self.optimizer.update()


def _gathered(xp, before: dict, seen: dict) -> dict:
    """Sums and maxima of one more micro-batch."""
    if not before:
        return seen
    join = {"sum": xp.add, "max": xp.maximum}
    return {name: join[name.rpartition("_")[2]](before[name], seen[name]) for name in seen}
