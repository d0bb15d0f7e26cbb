"""The training step of a run at its full size, on random words: for gates of memory and of speed.

    learner = build(run)
    step = loaded_step(run, learner)        its batch is there
    three_steps(run, learner)               two eager steps and, where steps are captured, a replay

Only the words are made up: model, optimizer and step are those that the run trains with.
"""

from dataclasses import replace

import numpy as np

from xtrain.assemble.learner import Learner, training_step
from xtrain.config.rules import resolve_features
from xtrain.config.schema import RunConfig
from xtrain.train.objectives.next_token import next_token_batch
from xtrain.train.step import TrainingStep


def on(device: str, run: RunConfig, **features) -> RunConfig:
    """The run on a device, with these features and what the device makes of the others."""
    run = replace(run, device=device, features=replace(run.features, **features))
    return replace(run, features=resolve_features(run, device))


def loaded_step(run: RunConfig, learner: Learner) -> TrainingStep:
    """The run's step, with a batch; device and features of the run are resolved."""
    step = training_step(run, learner)
    step.load(_batch(run), 0, run.optim.lr)
    return step


def three_steps(run: RunConfig, learner: Learner) -> TrainingStep:
    """The run's step after three: a captured one replays from the third on."""
    step = loaded_step(run, learner)
    for number in range(3):
        step.load(_batch(run), number, run.optim.lr)
        step.run()
    return step


def _batch(run: RunConfig) -> dict[str, np.ndarray]:
    """Random words and those that follow them, in the run's micro-batches: (A, B, T) int32."""
    micro_batches, rows = run.train.accumulation, run.train.batch_size
    if not run.features.batched:  # one sequence at a time
        micro_batches, rows = micro_batches * rows, 1
    shape = (micro_batches, rows, run.train.seq_len + 1)
    ids = np.random.default_rng(0).integers(0, run.model.vocab_size, shape).astype(np.int32)
    return next_token_batch(ids)
