"""What a step minimizes: (model, micro-batch, scale, key) -> loss that backward starts from."""

from xtrain.engine.tensor import Tensor


def next_token(model, batch: dict, scale, key) -> Tensor:
    """Cross-entropy of the next token.

    batch: input_ids, targets (B, T) int32, targets < 0 ignored, and optionally starts (B, T).
    scale: () fp32, one over the valid tokens of the whole step, so that every token of a step
    weighs the same however it is cut into micro-batches.
    """
    hidden = model(batch["input_ids"], starts=batch.get("starts"), key=key)
    return model.loss(hidden, batch["targets"], scale)
