"""A training step of any model of conf/model, batch and precision, on random words.

What gates and benchmarks time: the real `TrainingStep` over the flat buffers, whose batch is copied
from the host in every step.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from xtrain.config.files import choices, conf_dir
from xtrain.engine import rng
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.train.config import OptimConfig
from xtrain.train.learner import make_learner
from xtrain.train.objectives.next_token import next_token, next_token_batch

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Work:
    """One training step: a model of conf/model and the batch it takes."""

    model: str
    batch: int  # sequences in a micro-batch
    seq: int  # tokens in a sequence
    precision: str = "fp32"  # fp32 | bf16
    accumulation: int = 1  # micro-batches in a step
    remat: str = "none"  # none | mlp | block

    @property
    def tokens(self) -> int:
        return self.batch * self.seq * self.accumulation


def load_config(name: str, seq: int, conf: Path | None = None) -> Qwen3Config:
    """The shape named in conf/model, with room for `seq` positions; UsageError when unknown.

    conf: the directory of the files, by default conf_dir().
    """
    path = (conf or conf_dir()) / "model" / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"--model {name}: choose one of {', '.join(choices('model'))}")
    values = yaml.safe_load(path.read_text())
    known = {k: v for k, v in values.items() if k in Qwen3Config.__dataclass_fields__}
    known["max_position_embeddings"] = max(known["max_position_embeddings"], seq)
    return Qwen3Config(**known)


def random_batch(config: Qwen3Config, work: Work) -> dict[str, np.ndarray]:
    """Random tokens (A, B, T) and the ones that follow them: no step is cheaper than another."""
    shape = (work.accumulation, work.batch, work.seq + 1)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    return next_token_batch(ids)


class SizedStep:
    """Model, optimizer and step on the current device, ready to be called again and again."""

    def __init__(self, config: Qwen3Config, work: Work, device: Device):
        self.config, self.device = config, device
        optim = OptimConfig(lr=LEARNING_RATE)
        learner = make_learner(
            config, optim, device, seed=None, precision=work.precision, remat=work.remat
        )
        self.model, self.buffers = learner.model, learner.buffers
        _draw_weights(self.buffers, device)
        self.step = learner.step(next_token, seed=0)
        self.batch = random_batch(config, work)
        self.number = 0

    @property
    def parameters(self) -> int:
        return sum(p.count for p in self.buffers.parameters.values())

    def __call__(self):
        """Queue one step; returns (loss, grad_norm) on the device."""
        self.step.load(self.batch, self.number, LEARNING_RATE)
        self.number += 1
        return self.step.run()

    def loss(self) -> float:
        return float(self.device.host(self()[0]))


def _draw_weights(buffers: FlatBuffers, device: Device) -> None:
    """Random weights drawn on the device, where that takes no time; on the host v9's take 13 s."""
    xp = device.xp
    key = rng.key_array(xp, 0, 0)
    for name, p in buffers.parameters.items():
        weights = buffers.view(buffers.master, name)
        weights[...] = 1 if p.std is None else 0
        if p.std is not None:
            drawn = rng.standard_normal(xp, p.count, key, rng.site_of(name))
            weights[: p.rows] = p.std * drawn.reshape(p.rows, *p.declared[1:])
    buffers.refresh_copy()
