"""How a policy is trained after pretraining: values only."""

from dataclasses import dataclass

ALGORITHMS = ("grpo", "dr_grpo", "dapo")


@dataclass(frozen=True)
class PreferenceConfig:
    """phase=dpo. beta: how far the policy may move from its reference for a margin."""

    beta: float = 0.1


@dataclass(frozen=True)
class PolicyConfig:
    """phase=grpo: what is sampled in a step, and how it is weighed.

    algorithm       grpo: advantages over the group's standard deviation, a mean over each
                    completion; dr_grpo: neither; dapo: a mean over all tokens of the step
    prompts         prompts a step
    group           completions a prompt
    max_new_tokens  of a completion
    temperature     of sampling, and of the log-probabilities that are trained
    clip_low, clip_high  of the ratio
    beta            weight of the KL penalty; 0 keeps no reference
    inner_steps     updates on one set of rollouts
    least_format    share of well-formed answers below which a start is refused
    least_headroom  pass@group - pass@1 below which a start is refused
    start_anyway    train all the same
    """

    algorithm: str = "dr_grpo"
    prompts: int = 32
    group: int = 16
    max_new_tokens: int = 16
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    inner_steps: int = 1
    least_format: float = 0.99
    least_headroom: float = 0.05
    start_anyway: bool = False
