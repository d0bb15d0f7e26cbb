"""Which of two completions is the better one: DPO, and the scores of a reward model.

batch: input_ids, targets (B, T) int32, rows chosen, rejected, chosen, ...; targets >= 0 where the
completion is.  scale: () fp32, one over the pairs of the whole step.
"""

from collections.abc import Callable

from xtrain.engine import ops
from xtrain.engine.tensor import Tensor


def dpo(beta: float) -> Callable:
    """The objective of direct preference optimization: arXiv:2305.18290, eq. 7.

    batch also has reference (B,) fp32: log-probabilities of the completions by the frozen model.
    """

    def objective(model, batch: dict, scale, key) -> Tensor:
        logp = sequence_logprob(model, batch, key)
        return ops.preference_loss(logp, batch["reference"], batch["scale"], beta=beta)

    return objective


def sequence_logprob(model, batch: dict, key=None) -> Tensor:
    """log p of each row's completion, (B,) fp32."""
    hidden = model(batch["input_ids"], key=key)
    return ops.row_sum(model.token_logprob(hidden, batch["targets"]))


def bradley_terry(model, batch: dict, scale, key) -> Tensor:
    """The objective of a reward model: the chosen completion should score higher.

    batch also has last (B, T) fp32: 1 at the token whose hidden state is scored.
    """
    scores = model.scores(batch["input_ids"], batch["last"], key=key)
    return ops.preference_loss(scores, None, batch["scale"], beta=1.0)
