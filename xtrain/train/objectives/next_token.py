"""Next-token prediction: (model, micro-batch, scale, key) -> loss that backward starts from."""

import numpy as np

from xtrain.engine.tensor import Tensor


def next_token(model, batch: dict, scale, key) -> Tensor:
    """Cross-entropy of the next token.

    batch: input_ids, targets (B, T) int32, targets < 0 ignored, and optionally starts (B, T).
    scale: () fp32, one over the valid tokens of the whole step, so that every token of a step
    weighs the same however it is cut into micro-batches.
    """
    hidden = model(batch["input_ids"], starts=batch.get("starts"), key=key)
    return model.loss(hidden, batch["targets"], scale)


def next_token_batch(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens and the ones that follow them: ids (..., T + 1) int32 -> two arrays (..., T)."""
    return {
        "input_ids": np.ascontiguousarray(ids[..., :-1]),
        "targets": np.ascontiguousarray(ids[..., 1:]),
    }
