"""What a model answers to the held-out problems, and whether it has become better at them.

Standard errors are of means over problems; a gain is of the same problems before and after, so its
error is that of the paired differences (Miller, "Adding Error Bars to Evals", arXiv:2411.00640).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xtrain.data.chat import ChatFormat
from xtrain.infer.generate import generate
from xtrain.models.qwen3 import Qwen3
from xtrain.tasks.arithmetic import Problem, is_correct, is_well_formed

ROWS = 256  # answered together; the answers do not depend on it


@dataclass(frozen=True)
class Answers:
    """One greedy answer a problem: its text, whether it is right, whether it has the form."""

    texts: tuple[str, ...]
    correct: np.ndarray  # (n,) bool
    well_formed: np.ndarray  # (n,) bool

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.correct.mean())

    @property
    def format_share(self) -> float:
        """Share of answers in the form."""
        return float(self.well_formed.mean())

    @property
    def standard_error(self) -> float:
        """Of the accuracy, over problems."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / len(self.correct))


@dataclass(frozen=True)
class Gain:
    """How much more of the same problems is right: the difference, and its paired error."""

    difference: float
    standard_error: float

    @property
    def in_standard_errors(self) -> float:
        """The difference in units of its error; 0 when nothing changed."""
        return self.difference / self.standard_error if self.difference else 0.0


def answer(
    model: Qwen3, chat: ChatFormat, problems: Sequence[Problem], *, max_new_tokens: int
) -> Answers:
    """Answer every problem greedily."""
    prompts = [chat.prompt([{"role": "user", "content": p.question}]) for p in problems]
    texts: list[str] = []
    for start in range(0, len(prompts), ROWS):
        found = generate(
            model,
            prompts[start : start + ROWS],
            max_new_tokens=max_new_tokens,
            stop_id=chat.end,
        )
        texts += [chat.said(ids) for ids in found]
    pairs = list(zip(problems, texts, strict=True))
    return Answers(
        tuple(texts),
        np.array([is_correct(problem, text) for problem, text in pairs]),
        np.array([is_well_formed(text) for text in texts]),
    )


def gain(after: np.ndarray, before: np.ndarray) -> Gain:
    """The gain in accuracy from (n,) right answers before to those after, problem by problem."""
    difference = after.astype(np.float64) - before.astype(np.float64)
    return Gain(float(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(after)))


def pass_at_k(model: Qwen3, chat: ChatFormat, problems, *, k: int, max_new_tokens: int, seed: int):
    """(pass@1, pass@k): of k answers sampled at temperature 1, their mean and whether any is right.

    What group-relative training can still teach is bounded by the second (arXiv:2505.22756).
    """
    prompts = [chat.prompt([{"role": "user", "content": p.question}]) for p in problems]
    right = []
    for start in range(0, len(prompts), max(ROWS // k, 1)):
        some = range(start, min(start + max(ROWS // k, 1), len(prompts)))
        found = generate(
            model,
            [prompts[i] for i in some for _ in range(k)],
            max_new_tokens=max_new_tokens,
            temperature=1.0,
            seed=seed,
            stop_id=chat.end,
            streams=[i * k + j for i in some for j in range(k)],
        )
        texts = [chat.said(ids) for ids in found]
        right += [[is_correct(problems[i], texts.pop(0)) for _ in range(k)] for i in some]
    grid = np.array(right)
    return float(grid.mean()), float(grid.any(1).mean())
