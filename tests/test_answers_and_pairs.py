"""Held-out answers and their errors; preference pairs as batches."""

import numpy as np
import pytest
from byte_model import CHAT, MODEL

from xtrain.data.packing import IGNORED
from xtrain.engine import device as devices
from xtrain.errors import UsageError
from xtrain.rl import answers
from xtrain.rl.pairs import PreferencePairs
from xtrain.tasks import arithmetic
from xtrain.train.config import OptimConfig
from xtrain.train.learner import make_learner

CPU = devices.use("cpu")


def model():
    return make_learner(MODEL, OptimConfig(lr=1e-3), CPU, seed=2).model


def test_answers_do_not_depend_on_how_many_are_asked_at_once(monkeypatch):
    problems = arithmetic.measured("easy", 7)
    at_once = answers.answer(model(), CHAT, problems, max_new_tokens=4)
    monkeypatch.setattr(answers, "ROWS", 3)
    in_parts = answers.answer(model(), CHAT, problems, max_new_tokens=4)
    assert at_once.texts == in_parts.texts
    assert at_once.accuracy == at_once.correct.mean() and len(at_once.texts) == 7


def test_a_gain_is_of_the_same_problems_and_its_error_of_paired_differences():
    before, after = np.array([0, 0, 1, 1], bool), np.array([1, 1, 1, 0], bool)
    gain = answers.gain(after, before)
    difference = np.array([1, 1, 0, -1])
    assert gain.difference == 0.25
    assert gain.standard_error == pytest.approx(difference.std(ddof=1) / 2)
    assert answers.gain(before, before).in_standard_errors == 0.0


def test_pass_at_k_is_at_least_pass_at_1_and_its_samples_do_not_depend_on_the_rows(monkeypatch):
    def ask():
        problems = arithmetic.measured("easy", 4)
        return answers.pass_at_k(model(), CHAT, problems, k=3, max_new_tokens=3, seed=1)

    monkeypatch.setattr(answers, "is_correct", lambda problem, text: len(text) % 2 == 0)
    at_once = ask()
    monkeypatch.setattr(answers, "ROWS", 3)
    assert ask() == at_once and 0 <= at_once[0] <= at_once[1] <= 1


def pairs(count=5, **options):
    def talk(problem, answer):
        return CHAT.render(
            [
                {"role": "user", "content": problem.question},
                {"role": "assistant", "content": problem.completion(answer)},
            ]
        )

    problems = arithmetic.draw("easy", count, seed=1)
    rows = [(talk(p, None), talk(p, p.answer + 1)) for p in problems]
    options = {"seed": 0, "batch_size": 4, "seq_len": 48} | options
    return rows, PreferencePairs(rows, **options)


def test_a_pair_is_never_cut_and_each_comes_once_an_epoch():
    rows, source = pairs(batch_size=2)
    source.reference = np.arange(10, dtype=np.float32)
    seen = []
    for step in range(5):
        batch = source.batch(step)
        chosen, rejected = batch["reference"][0]
        assert rejected == chosen + 1 and chosen % 2 == 0
        seen.append(int(chosen) // 2)
        learned = batch["targets"][0, 0] != IGNORED
        said = [
            i for i, on in zip(rows[seen[-1]][0].ids, rows[seen[-1]][0].learned, strict=True) if on
        ]
        assert batch["targets"][0, 0][learned].tolist() == said
    assert sorted(seen) == list(range(5)) and source.epoch(5) == 1.0


def test_every_row_comes_in_order_and_the_last_micro_batch_is_filled_up():
    rows, source = pairs()
    batches = list(source.every_row())
    assert [len(b["input_ids"]) for b in batches] == [4, 4, 4]
    found = np.concatenate([b["input_ids"] for b in batches])[:10]
    flat = [row for pair in rows for row in pair]
    assert all(found[i, : len(r.ids) - 1].tolist() == r.ids[:-1] for i, r in enumerate(flat))


def test_the_pairs_of_a_step_weigh_one_together():
    _, source = pairs(accumulation=2)
    source.reference = np.zeros(10, np.float32)
    batch = source.batch(0)
    assert batch["scale"].tolist() == [0.25, 0.25] and source.pairs_per_step == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [({"batch_size": 3}, "is odd: rows come in pairs"), ({"seq_len": 8}, "the longest row has")],
)
def test_what_does_not_fit_is_one_line(options, said):
    with pytest.raises(UsageError, match=said):
        pairs(**options)


def test_a_pair_that_says_the_same_twice_is_refused():
    rows, _ = pairs(1)
    with pytest.raises(UsageError, match="pair 1: what is chosen is what is rejected"):
        PreferencePairs([(rows[0][0], rows[0][0])], seed=0, batch_size=2, seq_len=48)
