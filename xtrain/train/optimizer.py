"""AdamW over the flat buffers, and the learning-rate schedule as a function of the step.

Everything that changes from step to step (learning rate, number of updates, clip factor, whether
the gradient is finite) lives in device arrays, so that the update can be captured.
"""

import math

import numpy as np

from xtrain.engine import ops
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.train.config import OptimConfig

LARGEST_NORM = 1.8e19  # of a gradient that is applied: its square still fits fp32


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of update `step` (0-based) of `total_steps`.

    Rises linearly over the warm-up (the first update already moves), then follows the schedule down
    to lr * min_lr_ratio at the last update. A pure function: a resumed run cannot be off by one.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    match config.schedule:
        case "constant":
            share = 1.0
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"optim.schedule={config.schedule}: cosine, linear or constant")
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


class AdamW:
    """The optimizer's device state and its one update.

    lr: () fp32, written by the host before a step.  updates, skipped: () int64 counts of gradients
    that were applied and of ones that were not finite.
    """

    def __init__(self, buffers: FlatBuffers, config: OptimConfig, device: Device):
        xp = device.xp
        self.buffers, self.config, self.xp = buffers, config, xp
        self.lr = xp.zeros((), np.float32)
        self.updates = xp.zeros((), np.int64)
        self.skipped = xp.zeros((), np.int64)

    def update(self):
        """Clip and apply the gradient in the buffers, and zero it; returns its norm, () float64.

        A gradient with NaN or infinity, or too large for an fp32 second moment after clipping,
        changes neither weights nor moments; it is counted.
        """
        xp, c, b = self.xp, self.config, self.buffers
        norm = ops.global_norm.run(b.grad)
        applied = xp.minimum(norm, c.clip_norm) if c.clip_norm > 0 else norm
        finite = xp.isfinite(norm) & (applied < LARGEST_NORM)
        self.updates += finite
        self.skipped += ~finite
        # The first finite gradient is update 1; before it the corrections would divide by zero.
        count = xp.maximum(self.updates, 1).astype(np.float64)
        clip = xp.minimum(c.clip_norm / (norm + 1e-6), 1.0) if c.clip_norm > 0 else xp.ones(())
        hyper = xp.stack(
            [
                self.lr.astype(np.float64),
                1.0 - c.beta1**count,
                xp.sqrt(1.0 - c.beta2**count),
                xp.where(finite, clip, 0.0),
                finite.astype(np.float64),
            ]
        ).astype(np.float32)
        ops.adamw.run(
            b.master,
            b.grad,
            b.moment1,
            b.moment2,
            hyper,
            b.copy,
            decayed=b.decayed,
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            weight_decay=c.weight_decay,
        )
        return norm
