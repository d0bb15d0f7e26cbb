"""Rewards by name: pure functions (prompt, completion) -> float. Add one by writing it here.

prompt: the user's last message. completion: what the model said, without its end token. A reward
that raises, or returns NaN or infinity, ends the run with a line that names the sample.
"""

import math
from collections.abc import Callable

from xtrain.errors import UsageError
from xtrain.tasks.arithmetic import is_correct, is_well_formed, parse_question


def correct(prompt: str, completion: str) -> float:
    """1 for the right answer, 0 for every other."""
    return float(is_correct(parse_question(prompt), completion))


def well_formed(prompt: str, completion: str) -> float:
    r"""1 for any integer in \boxed{}: what a model learns from it is the form alone."""
    return float(is_well_formed(completion))


def reward_named(name: str) -> Callable[[str, str], float]:
    """The function of this file. Raises UsageError with the names there are."""
    found = globals().get(name)
    named = [n for n, f in globals().items() if getattr(f, "__module__", "") == __name__]
    names = sorted(n for n in named if n not in ("reward_named", "rewarded"))
    if name not in names:
        raise UsageError(f"task.reward={name}: choose one of {', '.join(names)}")
    return found


def rewarded(reward: Callable[[str, str], float], prompt: str, completion: str) -> float:
    """One reward, checked. Raises UsageError that names the sample when it is no finite number."""
    sample = f"prompt {prompt!r}, completion {completion!r}"
    try:
        value = float(reward(prompt, completion))
    except Exception as error:  # a user's function may raise anything
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"reward {reward.__name__} failed on {sample}: {problem}") from error
    if not math.isfinite(value):
        raise UsageError(f"reward {reward.__name__} gave {value} for {sample}")
    return value
