"""What learns: a model, its flat storage and its optimizer on a device, put together once.

learner = make_learner(config, optim, device, seed=0, precision="bf16")
step = learner.step(next_token, seed=0)
"""

from collections.abc import Callable
from dataclasses import dataclass

from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.models.config import Qwen3Config
from xtrain.models.qwen3 import Qwen3
from xtrain.train.config import OptimConfig
from xtrain.train.optimizer import AdamW
from xtrain.train.step import TrainingStep


@dataclass(frozen=True)
class Learner:
    """A model with its storage on a device, and its optimizer if it is to be trained."""

    model: Qwen3
    buffers: FlatBuffers
    optimizer: AdamW | None
    device: Device

    def keep_weights_(self) -> None:
        """Give the memory of all but the weights back: it is not trained any further."""
        self.buffers.keep_weights_()
        self.device.release_unused()

    def release_(self) -> None:
        """Give all of its memory back, whoever still holds the learner."""
        self.buffers.release_()
        self.device.release_unused()

    def step(self, objective: Callable, *, seed: int, dropout: float = 0.0) -> TrainingStep:
        """The step that minimises an objective, captured where the device captures."""
        return TrainingStep(
            self.model,
            self.optimizer,
            objective,
            seed=seed,
            device=self.device,
            dropout=dropout,
        )


def make_learner(
    config: Qwen3Config,
    optim: OptimConfig,
    device: Device,
    *,
    seed: int | None,
    precision: str = "fp32",
    remat: str = "none",
    dropout: float = 0.0,
    qk_norm: bool = True,
    training: bool = True,
) -> Learner:
    """A model of a configuration with initial weights of a seed; seed None leaves them at zero.

    training: False for the weights alone, without gradient, moments and optimizer.
    """
    model = Qwen3(config, qk_norm=qk_norm, remat_mode=remat, dropout=dropout)
    buffers = FlatBuffers(model.named_parameters(), device, precision, training=training)
    if seed is not None:
        buffers.initialize(seed, device)
    optimizer = AdamW(buffers, optim, device) if training else None
    return Learner(model, buffers, optimizer, device)
