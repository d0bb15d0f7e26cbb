"""Loss on a fixed held-out set: the mean over tokens, the same for every batch size.

Per-token log-probabilities are summed in float64, so that how rows are grouped into batches only
shows in the last bits.
"""

import math
from dataclasses import dataclass

import numpy as np

from xtrain.engine.device import Device
from xtrain.engine.tensor import no_tape


@dataclass(frozen=True)
class Evaluation:
    """loss: nats a token.  standard_error: of that mean over tokens.  tokens: how many."""

    loss: float
    standard_error: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def evaluate(model, source, *, batch_size: int, device: Device) -> Evaluation:
    """Evaluate on all batches of an evaluation source; dropout is off and no tape is kept."""
    total = squares = 0.0
    tokens = 0
    with no_tape():
        for batch in source.batches(batch_size):
            arrays = {name: device.array(a) for name, a in batch.items()}
            hidden = model(arrays["input_ids"], starts=arrays.get("starts"))
            logp = device.host(model.token_logprob(hidden, arrays["targets"]).data)
            valid = batch["targets"] >= 0
            values = -logp[valid].astype(np.float64)
            total += float(values.sum())
            squares += float((values * values).sum())
            tokens += int(valid.sum())
    if tokens == 0:
        raise ValueError("the evaluation set has no token to predict")
    mean = total / tokens
    variance = max(squares / tokens - mean * mean, 0.0)
    return Evaluation(mean, math.sqrt(variance / tokens), tokens)
