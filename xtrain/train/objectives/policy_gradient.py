"""The clipped policy gradient on sampled completions, and what it saw on the way.

batch: input_ids, targets (B, T) int32; old, weights (B, T) fp32; advantages (B,) fp32; with a
penalty also reference (B, T) fp32: see `xtrain.engine.ops.policy_loss`. The weights hold the whole
normalisation, so that micro-batches add up to the step however it is cut.
"""

from dataclasses import dataclass

from xtrain.engine import device, ops
from xtrain.engine.tensor import Tensor


@dataclass(frozen=True)
class PolicyGradient:
    """Clip range, weight of the KL penalty, and the temperature at which was sampled."""

    clip_low: float
    clip_high: float
    beta: float
    temperature: float

    def __call__(self, model, batch: dict, scale, key) -> tuple[Tensor, dict]:
        """The loss, and sums and maxima by name, () float64 each; dropout is off."""
        logp = token_logprob(model, batch["input_ids"], batch["targets"], self.temperature)
        loss = ops.policy_loss(
            logp,
            batch["old"],
            batch["advantages"],
            batch["weights"],
            batch.get("reference"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            beta=self.beta,
        )
        return loss, self._seen(logp.data, batch)

    def _seen(self, logp, batch: dict) -> dict:
        xp = device.current().xp
        sampled = batch["targets"] >= 0
        ratio = xp.where(sampled, xp.exp((logp - batch["old"]).astype(xp.float64)), 1.0)
        outside = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        seen = {
            "ratio_off_max": xp.abs(ratio - 1).max(),
            "clipped_tokens_sum": (outside & sampled).sum().astype(xp.float64),
            "sampled_tokens_sum": sampled.sum().astype(xp.float64),
        }
        if self.beta > 0:
            log_u = xp.where(sampled, batch["reference"] - logp, 0).astype(xp.float64)
            seen["kl_sum"] = (xp.exp(log_u) - 1 - log_u).sum()
        return seen


def token_logprob(model, input_ids, targets, temperature: float) -> Tensor:
    """log p of each target at a temperature, (B, T) fp32, 0 where it is ignored."""
    hidden: Tensor = model(input_ids)
    if temperature != 1:
        hidden = ops.scale(hidden, factor=1 / temperature)
    return model.token_logprob(hidden, targets)
