r"""Verifiable arithmetic: two operands, + - x, the answer in \boxed{}.

    problem     12 + 7 = ?
    completion  \boxed{19}

A level bounds the operands; what is held out is held out by its pair of operands, whatever their
order and whatever the operation, so that no held-out problem is a trained one turned round. One
spec serves the text that a base learns from, demonstrations, preference pairs, checker and reward.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from xtrain.errors import UsageError
from xtrain.tasks.boxed import parse_boxed, parse_integer

LEVELS = {"easy": 20, "hard": 99}  # the largest operand
OPERATIONS = ("+", "-", "x")
HELD_OUT = 8  # one pair of operands in so many


@dataclass(frozen=True)
class TaskConfig:
    """Which problems, and how many.

    name            the task's file in xtrain/tasks
    level           easy (operands up to 20) or hard (up to 99)
    seed            of the draw; what is held out does not depend on it
    demonstrations  conversations to learn from (SFT), pairs (DPO, reward)
    held_out        problems that are measured on; all that there are when fewer
    reward          a name of xtrain/tasks/rewards.py
    """

    name: str = "arithmetic"
    level: str = "hard"
    seed: int = 0
    demonstrations: int = 20_000
    held_out: int = 2_000
    reward: str = "correct"


@dataclass(frozen=True)
class Problem:
    """Two operands and an operation."""

    left: int
    operation: str
    right: int

    @property
    def answer(self) -> int:
        """The integer that is right."""
        match self.operation:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
        return self.left * self.right

    @property
    def question(self) -> str:
        """What the user says."""
        return f"{self.left} {self.operation} {self.right} = ?"

    @property
    def held_out(self) -> bool:
        """Whether it is only ever measured on."""
        pair = f"{min(self.left, self.right)} {max(self.left, self.right)}"
        return hashlib.sha256(pair.encode()).digest()[0] % HELD_OUT == 0

    def completion(self, answer: int | None = None) -> str:
        r"""What the assistant should say, or another answer in the same form."""
        return rf"\boxed{{{self.answer if answer is None else answer}}}"


def parse_question(text: str) -> Problem:
    """The problem that a question asks. Raises UsageError when it is none of this task's."""
    parts = text.replace("= ?", "").split()
    is_problem = len(parts) == 3 and parts[1] in OPERATIONS
    if not is_problem or not all(p.isascii() and p.isdigit() for p in (parts[0], parts[2])):
        raise UsageError(f"{text!r} is no problem of the task; write 12 + 7 = ?")
    return Problem(int(parts[0]), parts[1], int(parts[2]))


def answer_of(completion: str) -> int | None:
    r"""The integer in a completion's last \boxed{}, None when it has none."""
    return parse_integer(parse_boxed(completion))


def is_well_formed(completion: str) -> bool:
    r"""Whether a completion ends in an integer in \boxed{}."""
    return answer_of(completion) is not None


def is_correct(problem: Problem, completion: str) -> bool:
    """Whether a completion gives the right answer."""
    return answer_of(completion) == problem.answer


@lru_cache(maxsize=8)
def problems(level: str, *, held_out: bool) -> tuple[Problem, ...]:
    """Every problem of a level, in order. Raises UsageError for an unknown level."""
    if level not in LEVELS:
        raise UsageError(f"task.level={level}: choose one of {', '.join(LEVELS)}")
    operands = range(LEVELS[level] + 1)
    every = (Problem(a, op, b) for a in operands for b in operands for op in OPERATIONS)
    return tuple(p for p in every if p.held_out == held_out)


def draw(level: str, count: int, seed: int) -> list[Problem]:
    """`count` problems to train on, drawn with replacement; the first n of them for any n."""
    pool = problems(level, held_out=False)
    chosen = np.random.default_rng([seed, 1]).integers(0, len(pool), count)
    return [pool[i] for i in chosen]


def measured(level: str, count: int) -> list[Problem]:
    """The held-out problems that are measured on: a fixed choice, the same for every seed."""
    pool = problems(level, held_out=True)
    order = sorted(pool, key=lambda p: hashlib.sha256(p.question.encode()).digest())
    return order[:count]


def near_miss(problem: Problem, source: np.random.Generator) -> int:
    """A wrong answer that a careless pupil would give: off by one, by ten, or digits swapped."""
    digits = str(abs(problem.answer))
    swapped = int(digits[::-1]) * (-1 if problem.answer < 0 else 1)
    steps = [problem.answer + step for step in (-10, -1, 1, 10)]
    wrong = [each for each in (*steps, swapped) if each != problem.answer]
    return wrong[int(source.integers(len(wrong)))]


def documents(level: str, count: int, seed: int, *, lines: int = 16) -> Iterator[str]:
    """Plain text for a base: worked sums, a few to a document, none of them held out."""
    drawn = draw(level, count * lines, seed)
    for start in range(0, len(drawn), lines):
        yield "".join(
            f"{p.left} {p.operation} {p.right} = {p.answer}\n" for p in drawn[start : start + lines]
        )
