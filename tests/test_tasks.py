"""The arithmetic task: problems, what is held out, the parser's golden table, rewards."""

import math

import numpy as np
import pytest

from xtrain.errors import UsageError
from xtrain.tasks import arithmetic, rewards
from xtrain.tasks.boxed import parse_boxed, parse_integer

GOLDEN = [
    (r"\boxed{42}", "42", 42),
    (r"it is \boxed{1} or \boxed{2}", "2", 2),
    (r"\boxed{ -7 }", "-7", -7),
    (r"\boxed{+7}", "+7", 7),
    (r"\boxed{- 7}", "- 7", -7),
    ("\\boxed{\u22127}", "\u22127", -7),
    (r"\boxed{1,234,567}", "1,234,567", 1234567),
    (r"\boxed{12,34}", "12,34", None),
    (r"\boxed{007}", "007", 7),
    (r"\boxed{\text{4}}", r"\text{4}", None),
    (r"\boxed{{5}}", "{5}", None),
    (r"\boxed{3.0}", "3.0", None),
    (r"\boxed{}", "", None),
    (r"\boxed{12", None, None),
    (r"\boxed{8} and \boxed{9", "8", 8),
    (r"boxed{3}", None, None),
    ("", None, None),
    (r"\boxed{12\boxed{3}}", "3", 3),
    ("\\boxed{\u0664\u0662}", "\u0664\u0662", None),
    (r"\boxed{1 2}", "1 2", None),
    (r"\boxed{--1}", "--1", None),
]


@pytest.mark.parametrize(("text", "inside", "value"), GOLDEN)
def test_the_parser_agrees_with_its_golden_table(text, inside, value):
    assert parse_boxed(text) == inside
    assert parse_integer(parse_boxed(text)) == value


def test_two_thousand_demonstrations_are_right_by_the_checker():
    for problem in arithmetic.draw("hard", 2000, seed=3):
        assert arithmetic.is_correct(problem, problem.completion())
        assert arithmetic.parse_question(problem.question) == problem
        wrong = arithmetic.near_miss(problem, np.random.default_rng(problem.left))
        assert not arithmetic.is_correct(problem, problem.completion(wrong))
        assert arithmetic.is_well_formed(problem.completion(wrong))


@pytest.mark.parametrize("level", arithmetic.LEVELS)
def test_no_operands_of_a_held_out_problem_are_trained_on_in_either_order(level):
    def pairs(held_out):
        every = arithmetic.problems(level, held_out=held_out)
        return {frozenset((p.left, p.right)) for p in every}

    assert not pairs(True) & pairs(False)
    assert len(arithmetic.measured("hard", 2000)) == 2000


def test_the_text_of_a_base_holds_no_held_out_problem():
    for document in arithmetic.documents("easy", 50, seed=1):
        for line in document.splitlines():
            assert not arithmetic.parse_question(line.partition("=")[0]).held_out


def test_the_first_problems_of_a_longer_draw_are_those_of_a_shorter_one():
    assert arithmetic.draw("easy", 50, seed=1)[:20] == arithmetic.draw("easy", 20, seed=1)


def test_an_unknown_level_and_a_foreign_question_are_one_line():
    with pytest.raises(UsageError, match=r"task.level=huge: choose one of easy, hard"):
        arithmetic.problems("huge", held_out=True)
    with pytest.raises(UsageError, match="no problem of the task"):
        arithmetic.parse_question("2 plus 2")


def test_an_unknown_reward_names_those_that_there_are():
    with pytest.raises(UsageError, match="choose one of correct, well_formed"):
        rewards.reward_named("kind")
    assert rewards.reward_named("correct")("2 + 2 = ?", r"\boxed{4}") == 1.0


def raises(prompt, completion):
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (raises, "ZeroDivisionError: division by zero"),
        (lambda p, c: math.nan, "gave nan"),
        (lambda p, c: math.inf, "gave inf"),
    ],
)
def test_a_reward_that_fails_or_is_no_number_names_the_sample(reward, said):
    with pytest.raises(UsageError, match=said) as error:
        rewards.rewarded(reward, "1 + 1 = ?", r"\boxed{2}")
    assert "'1 + 1 = ?'" in str(error.value)
