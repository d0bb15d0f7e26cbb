"""Rollouts: what is trained is what was sampled, on policy, exactly; and DPO's first step."""

import dataclasses
import math

import numpy as np
import pytest
from byte_model import CHAT, MODEL

from xtrain.data.packing import IGNORED
from xtrain.engine import device as devices
from xtrain.engine.tensor import no_tape
from xtrain.errors import UsageError
from xtrain.rl.config import PolicyConfig
from xtrain.rl.rollout import Rollouts
from xtrain.train.config import OptimConfig
from xtrain.train.learner import make_learner
from xtrain.train.objectives.policy_gradient import PolicyGradient
from xtrain.train.objectives.preference import dpo, sequence_logprob

CPU = devices.use("cpu")
POLICY = PolicyConfig(prompts=2, group=4, max_new_tokens=6, temperature=0.7)
QUESTIONS = ["1 + 1 = ?", "12 x 3 = ?", "7 - 9 = ?"]


def even(prompt: str, completion: str) -> float:
    """Something that a model of random weights does about half of the time."""
    return float(len(completion) % 2 == 0 and sum(map(ord, completion)) % 2 == 0)


def learner_and_source(config=POLICY, reward=even, *, rows=4, dropout=0.0, **options):
    learner = make_learner(MODEL, OptimConfig(lr=1e-3), CPU, seed=4, dropout=dropout)
    source = Rollouts(
        learner.model,
        CPU,
        CHAT,
        QUESTIONS,
        reward,
        config=config,
        seed=3,
        rows=rows,
        seq_len=40,
        **options,
    )
    return learner, source


def objective(config=POLICY):
    return PolicyGradient(config.clip_low, config.clip_high, config.beta, config.temperature)


def test_the_ratio_of_the_first_inner_step_is_exactly_1_with_dropout_and_a_temperature():
    learner, source = learner_and_source(dropout=0.3)
    step = learner.step(objective(), seed=1, dropout=0.3)
    step.load(source.batch(0), 0, 1e-3)
    step.run()
    assert float(step.seen["ratio_off_max"]) == 0.0
    assert float(step.seen["sampled_tokens_sum"]) == (source.batch(0)["targets"] != IGNORED).sum()


def test_a_second_inner_step_trains_the_same_rollouts_and_has_moved():
    config = dataclasses.replace(POLICY, inner_steps=2, temperature=1.0)
    learner, source = learner_and_source(config)
    step = learner.step(objective(config), seed=1)
    for number in range(2):
        step.load(source.batch(number), number, 1e-2)
        step.run()
    assert source.batch(0) is source.batch(1)
    assert float(step.seen["ratio_off_max"]) > 0


def test_what_is_trained_are_the_ids_that_were_sampled_behind_their_own_prompt():
    _, source = learner_and_source()
    made, batch = source.sample(0), source.batch(0)
    ids, targets = (batch[name].reshape(8, -1) for name in ("input_ids", "targets"))
    for row, (prompt, said) in enumerate(zip(made.prompts, made.ids, strict=True)):
        place = np.flatnonzero(targets[row] != IGNORED)
        assert targets[row, place].tolist() == said
        assert place[0] == len(prompt) - 1
        assert ids[row, : len(prompt)].tolist() == prompt
    groups = [made.prompts[i : i + 4] for i in (0, 4)]
    assert all(prompt == group[0] for group in groups for prompt in group)
    assert groups[0][0] != groups[1][0]


def test_the_same_step_of_the_same_weights_gives_the_same_rollouts():
    one, other = learner_and_source()[1], learner_and_source()[1]
    other.batch(5)  # a run that was killed elsewhere
    for name, array in one.batch(2).items():
        assert array.tobytes() == other.batch(2)[name].tobytes()


def test_rollouts_in_other_micro_batches_are_the_same_tokens():
    whole, halves = learner_and_source(rows=8)[1].batch(0), learner_and_source(rows=4)[1].batch(0)
    assert whole["targets"].tobytes() == halves["targets"].tobytes()
    assert whole["weights"].tobytes() == halves["weights"].tobytes()


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_equal_rewards_of_a_whole_step_update_nothing_penalty_included(beta):
    config = dataclasses.replace(POLICY, beta=beta)

    def elsewhere(ids, targets):
        return np.where(targets >= 0, -3.0, 0.0).astype(np.float32)

    reference = elsewhere if beta else None
    learner, source = learner_and_source(config, lambda p, c: 1 / 3, reference=reference)
    step = learner.step(objective(config), seed=1)
    step.load(source.batch(0), 0, 1e-3)
    loss, norm = step.run()
    assert float(loss) == 0.0 and float(norm) == 0.0
    assert source.seen()["informative_share"] == 0.0


def test_a_penalty_towards_the_policy_itself_is_nothing():
    config = dataclasses.replace(POLICY, beta=0.5)
    learner, source = learner_and_source(config)
    source.reference = source._logprob
    step = learner.step(objective(config), seed=1)
    step.load(source.batch(0), 0, 1e-3)
    step.run()
    assert float(step.seen["kl_sum"]) == 0.0


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"max_new_tokens": 60}, {}, "policy.max_new_tokens=60 do not fit"),
        ({}, {"rows": 3}, "train.batch_size=3 does not divide the 8 rollouts"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(change, options, said):
    with pytest.raises(UsageError, match=said):
        learner_and_source(dataclasses.replace(POLICY, **change), **options)


def test_a_reward_of_nan_names_the_sample_and_nothing_is_trained():
    _, source = learner_and_source(reward=lambda p, c: math.nan)
    with pytest.raises(UsageError, match="gave nan for prompt"):
        source.batch(0)


def test_dpo_of_a_model_that_is_its_own_reference_is_log_2():
    learner, source = learner_and_source()
    batch = {name: source.batch(0)[name] for name in ("input_ids", "targets")}
    with no_tape():
        pairs = zip(batch["input_ids"], batch["targets"], strict=True)
        rows = [{"input_ids": ids, "targets": targets} for ids, targets in pairs]
        batch["reference"] = np.stack([sequence_logprob(learner.model, row).data for row in rows])
    batch["scale"] = np.full(2, 1 / 4, np.float32)
    step = learner.step(dpo(0.1), seed=0)
    step.load(batch, 0, 1e-3)
    assert float(step.run()[0]) == pytest.approx(math.log(2), abs=1e-12)
    assert float(step.run()[0]) < math.log(2)
