"""DPO, Bradley-Terry and the policy gradient against the published formulas, in float64."""

import math

import numpy as np
import pytest

from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.tensor import Tensor
from xtrain.errors import UsageError
from xtrain.rl.advantages import group_advantages, is_uniform, token_weights

devices.use("cpu")
RANDOM = np.random.default_rng(5)


def gradient(op, x, *rest, **attrs):
    leaf = Tensor(x, requires_grad=True)
    loss = op(leaf, *rest, **attrs)
    loss.backward()
    return float(loss.data), leaf.grad


def test_dpo_is_the_published_formula():
    policy, reference = RANDOM.normal(size=(2, 10))
    loss, _ = gradient(ops.preference_loss, policy, reference, np.float64(0.2), beta=0.3)
    moved = policy - reference
    margin = 0.3 * (moved[0::2] - moved[1::2])
    assert loss == pytest.approx(0.2 * -np.log(1 / (1 + np.exp(-margin))).sum(), rel=1e-12)


def test_dpo_of_a_policy_that_has_not_moved_is_log_2():
    policy = RANDOM.normal(size=8) * 100
    loss, _ = gradient(ops.preference_loss, policy, policy.copy(), np.float64(1 / 4), beta=0.1)
    assert loss == math.log(2)


def test_dpo_without_beta_moves_nothing():
    loss, dx = gradient(
        ops.preference_loss, RANDOM.normal(size=6), RANDOM.normal(size=6), np.float64(1), beta=0.0
    )
    assert loss == pytest.approx(3 * math.log(2)) and not dx.any()


def test_bradley_terry_is_the_logistic_of_the_difference():
    scores = RANDOM.normal(size=6)
    loss, _ = gradient(ops.preference_loss, scores, None, np.float64(1), beta=1.0)
    assert loss == pytest.approx(-np.log(1 / (1 + np.exp(scores[1::2] - scores[0::2]))).sum())


def test_a_margin_that_overflows_an_exponential_is_finite():
    loss, dx = gradient(ops.preference_loss, np.array([-1e4, 1e4]), None, np.float64(1), beta=1.0)
    assert loss == 2e4 and np.array_equal(dx, [-1.0, 1.0])


def policy_inputs(rows=4, tokens=6, reference=False):
    logp, old = RANDOM.normal(size=(2, rows, tokens)) * 0.3
    weights = (RANDOM.random((rows, tokens)) < 0.7) / 7
    ref = RANDOM.normal(size=(rows, tokens)) * 0.3 if reference else None
    return logp, old, RANDOM.normal(size=rows), weights, ref


def test_the_policy_loss_is_the_published_formula():
    logp, old, A, w, ref = policy_inputs(reference=True)
    attrs = {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.04}
    loss, _ = gradient(ops.policy_loss, logp, old, A, w, ref, **attrs)
    expected = 0.0
    for i in range(logp.shape[0]):
        for t in range(logp.shape[1]):
            r, u = math.exp(logp[i, t] - old[i, t]), math.exp(ref[i, t] - logp[i, t])
            gain = min(r * A[i], min(max(r, 0.8), 1.28) * A[i])
            expected += w[i, t] * (0.04 * r * (u - 1 - math.log(u)) - gain)
    assert loss == pytest.approx(expected, rel=1e-12)


def test_without_a_clip_on_the_policy_it_is_reinforce():
    logp, _, A, w, _ = policy_inputs()
    free = {"clip_low": math.inf, "clip_high": math.inf, "beta": 0.0}
    loss, dx = gradient(ops.policy_loss, logp, logp.copy(), A, w, None, **free)
    np.testing.assert_allclose(dx, -w * A[:, None], rtol=1e-12)
    assert loss == pytest.approx(-(w * A[:, None]).sum())


def test_the_penalty_s_gradient_is_that_of_the_kl_divergence():
    """Over all words of a small vocabulary, expectations are sums: no sampling error."""
    logits, ref_logits = RANDOM.normal(size=(2, 5))

    def log_softmax(z):
        return z - np.log(np.exp(z).sum())

    logp, ref = log_softmax(logits), log_softmax(ref_logits)
    p = np.exp(logp)
    # As if each word had been sampled as often as it is likely: row per word, weight p.
    _, d = gradient(
        ops.policy_loss,
        logp[:, None],
        logp[:, None].copy(),
        np.zeros(5),
        p[:, None],
        ref[:, None],
        clip_low=math.inf,
        clip_high=math.inf,
        beta=1.0,
    )
    through = d[:, 0] - p * d[:, 0].sum()  # d log p[k] / d logits
    kl = (p * (logp - ref)).sum()
    exact = p * ((logp - ref) - kl)
    np.testing.assert_allclose(through, exact, atol=1e-12)


def test_a_token_that_was_not_sampled_counts_for_nothing_whatever_stands_there():
    logp, old, A, w, _ = policy_inputs()
    attrs = {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.0}
    before = gradient(ops.policy_loss, logp, old, A, w, None, **attrs)
    poisoned = np.where(w == 0, np.nan, logp)
    after = gradient(ops.policy_loss, poisoned, old, A, w, None, **attrs)
    assert after[0] == before[0] and np.array_equal(after[1], before[1])


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1 / 3] * 3, [0.0, 0.0], [5.0]])
def test_equal_rewards_give_advantage_exactly_zero(algorithm, rewards):
    assert not group_advantages([rewards], algorithm).any()
    assert is_uniform(np.array([rewards])).all()


def test_advantages_at_the_edges_are_finite_and_bounded():
    one = group_advantages([[1, 0, 0, 0]], "grpo")
    np.testing.assert_allclose(one, [[np.sqrt(3), *[-1 / np.sqrt(3)] * 3]], rtol=1e-4)
    odd = group_advantages([[0.1] * 7 + [0.1 + 1e-17]], "grpo")
    assert np.isfinite(odd).all() and np.abs(odd).max() <= np.sqrt(8)
    near = group_advantages([[0.1] * 7 + [0.1 + 1e-9]], "grpo")
    assert np.isfinite(near).all() and np.abs(near).max() < 1e-2


def test_a_nan_reward_is_named():
    with pytest.raises(UsageError, match="reward nan of completion 1 of prompt 2"):
        group_advantages([[1, 0], [0, 0], [1, math.nan]], "grpo")


def test_weights_normalise_as_each_paper_says():
    lengths, informative = np.array([2, 4]), np.array([True, True])
    grpo = token_weights(lengths, informative, 4, "grpo")
    np.testing.assert_allclose(grpo, [[1 / 4, 1 / 4, 0, 0], [1 / 8] * 4])
    np.testing.assert_allclose(token_weights(lengths, informative, 4, "dr_grpo").max(), 1 / 8)
    np.testing.assert_allclose(token_weights(lengths, informative, 4, "dapo").max(), 1 / 6)


def test_a_group_that_says_nothing_has_no_weight_and_still_counts():
    lengths = np.array([3, 3])
    alone = token_weights(lengths, np.array([True, False]), 3, "dapo")
    assert not alone[1].any() and alone[0].max() == 1 / 6
