"""How much better a completion was than the others of its group, and what each token weighs.

    grpo      A = (r - mean) / (std + 1e-6),  weight = 1 / (rows len(row))
    dr_grpo   A = r - mean,                   weight = 1 / (rows longest possible)
    dapo      A = (r - mean) / (std + 1e-6),  weight = 1 / tokens of the step

A group whose rewards are all equal says nothing: its advantages are exactly 0 and its weights too,
so that neither gain nor penalty moves anything; it still counts where rows or tokens are counted,
or a step of one informative group would be as loud as one of many.
Sources: arXiv:2402.03300 (GRPO), 2503.20783 (Dr. GRPO), 2503.14476 (DAPO).
"""

import numpy as np

from xtrain.errors import UsageError

LEAST_DEVIATION = 1e-6


def group_advantages(rewards: np.ndarray, algorithm: str) -> np.ndarray:
    """(prompts, group) float64 -> the same shape. Raises UsageError that names a NaN's place.

    Means are taken of differences from the group's first reward: equal rewards give exactly 0, also
    when their sum rounds.
    """
    rewards = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards).all():
        prompt, completion = map(int, np.argwhere(~np.isfinite(rewards))[0])
        value = rewards[prompt, completion]
        raise UsageError(f"reward {value} of completion {completion} of prompt {prompt}")
    moved = rewards - rewards[:, :1]
    centred = moved - moved.mean(1, keepdims=True)
    centred[is_uniform(rewards)] = 0.0
    if algorithm == "dr_grpo":
        return centred
    return centred / (centred.std(1, keepdims=True) + LEAST_DEVIATION)


def is_uniform(rewards: np.ndarray) -> np.ndarray:
    """(prompts,) whether a group's rewards are all equal."""
    return (rewards == rewards[:, :1]).all(1)


def token_weights(
    lengths: np.ndarray, informative: np.ndarray, tokens: int, algorithm: str
) -> np.ndarray:
    """(rows, tokens) float64: what each sampled token weighs in the loss of the step.

    lengths: (rows,) sampled tokens of each completion.  informative: (rows,) bool.  tokens: the
    longest that a completion can be.
    """
    rows = len(lengths)
    match algorithm:
        case "grpo":
            each = 1 / (rows * np.maximum(lengths, 1))
        case "dr_grpo":
            each = np.full(rows, 1 / (rows * tokens))
        case _:
            each = np.full(rows, 1 / max(int(lengths.sum()), 1))
    sampled = np.arange(tokens) < lengths[:, None]
    return np.where(sampled & informative[:, None], each[:, None], 0.0)
