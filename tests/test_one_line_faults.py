"""Faults of one line that one generated test alone would see: each has a second place here."""

import numpy as np
import pytest

from xtrain.engine import device, ops, rng
from xtrain.engine.tensor import Tensor


def loss_of(targets, logits):
    """The mean loss of rows whose logits are given, through the op that training uses."""
    hidden = Tensor(logits.astype(np.float32), requires_grad=True)
    weight = Tensor(np.eye(logits.shape[1], dtype=np.float32), requires_grad=True)
    ids, scale = np.asarray(targets, np.int32), np.asarray(1 / len(targets), np.float32)
    loss = ops.linear_cross_entropy(hidden, weight, ids, scale, vocab_size=logits.shape[1])
    loss.backward()
    return float(loss), hidden.grad


@pytest.mark.parametrize("word", [0, 1, 4])
def test_every_word_counts_in_the_loss_the_first_one_too(word):
    device.use("cpu")
    logits = np.random.default_rng(2).standard_normal((3, 5))
    wanted = np.log(np.exp(logits).sum(axis=1)).mean() - logits[:, word].mean()
    loss, gradient = loss_of([word] * 3, logits)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert (gradient[:, word] < 0).all()


def test_an_ignored_target_and_word_0_are_not_the_same():
    device.use("cpu")
    logits = np.random.default_rng(3).standard_normal((2, 5))
    assert loss_of([0, -100], logits)[0] != loss_of([-100, -100], logits)[0] == 0


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_what_dropout_keeps_is_scaled_up_by_what_it_drops(p):
    device.use("cpu")
    key = rng.key_array(np, 7, 3, 0)
    y = ops.dropout(Tensor(np.ones((40, 50), np.float32)), key, p=p, site=1).data
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(1 - p)}
    assert abs(y.mean() - 1) < 4 * np.sqrt(p / (1 - p) / y.size)
