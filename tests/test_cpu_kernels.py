"""CPU kernels: what the checks generated from the ops' declarations do not see."""

import numba
import numpy as np
import pytest

import xtrain.cpu  # noqa: F401 (plugs the kernels in)
from xtrain.cpu import adamw, attention, embedding, gemm, global_norm, linear, rms_norm, swiglu
from xtrain.cpu import linear_cross_entropy as head
from xtrain.engine.ops import adamw as adamw_op
from xtrain.engine.ops.linear_cross_entropy import loss_backward, loss_forward
from xtrain.engine.tensor import SEED

VOCAB, PADDED, D = 1003, 1024, 20


def drawn(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def head_inputs(n=70, scale=1.0):
    """x, weight, targets and the loss scale of a head with padding and ignored targets."""
    targets = np.random.default_rng(3).integers(0, VOCAB, n).astype(np.int32)
    targets[::5] = -100
    loss_scale = np.full((), 1 / n, np.float32)
    return drawn(n, D), drawn(PADDED, D, scale=scale), targets, loss_scale


def loss_and_gradients(x, weight, targets, scale, vocab_size=VOCAB):
    """Loss, dx, dweight as a training step gets them."""
    dweight = np.zeros_like(weight)
    attrs = {"vocab_size": vocab_size, "dweight_into": dweight}
    loss, saved = head.loss_forward(np, x, weight, targets, scale, **attrs)
    dx, *_ = head.loss_backward(np, SEED, saved, into=(dweight,), **attrs)
    return loss, dx, dweight


def assert_agrees_with_float64(x, weight, targets, scale, vocab_size=VOCAB, tolerance=2e-6):
    """Relative L2 distance of loss, dx and dweight from the reference's."""
    wide = (x.astype(float), weight.astype(float), targets, scale.astype(float))
    loss, saved = loss_forward(np, *wide, vocab_size=vocab_size)
    dx, dweight, *_ = loss_backward(np, SEED, saved, vocab_size=vocab_size, into=(None,))
    for value, truth in zip(
        loss_and_gradients(x, weight, targets, scale, vocab_size), (loss, dx, dweight), strict=True
    ):
        assert np.linalg.norm(value - truth) <= tolerance * np.linalg.norm(truth)


@pytest.fixture
def with_threads():
    """Run a function with a number of Numba threads."""
    before = numba.get_num_threads()

    def run(threads, function):
        numba.set_num_threads(threads)
        return function()

    yield run
    numba.set_num_threads(before)


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_loss_does_not_depend_on_the_number_of_threads(with_threads):
    inputs = head_inputs()
    one, two = (with_threads(n, lambda: loss_and_gradients(*inputs)) for n in (1, 2))
    assert_same_bits(one, two)


def test_large_kernels_do_not_depend_on_the_number_of_threads(with_threads):
    x, dy, weight = drawn(1100, 64), drawn(1100, 64, seed=1), drawn(64)
    q, k = drawn(2, 4, 96, 16), drawn(2, 2, 96, 16)
    ids = np.random.default_rng(0).integers(0, 9, 1100).astype(np.int32)

    def all_kernels():
        y, saved = rms_norm.forward(np, x, weight, eps=1e-6)
        z, gated = swiglu.forward(np, x)
        a, scores = attention.forward(np, q, k, k, None, None)
        return (
            y,
            *rms_norm.backward(np, dy, saved, eps=1e-6),
            z,
            *swiglu.backward(np, z, gated),
            a,
            *attention.backward(np, a, scores)[:3],
            embedding.backward(np, x, (ids, (9, 64), x.dtype), into=(None,))[0],
            gemm.multiply(x, dy, transpose_b=True),
            global_norm.forward(np, drawn(200_000))[0],
        )

    one, two = (with_threads(n, all_kernels) for n in (1, 2))
    assert_same_bits(one, two)


def test_loss_agrees_with_float64_on_ragged_sizes():
    assert_agrees_with_float64(*head_inputs())


def test_loss_agrees_with_float64_when_logits_are_large():
    # Logits of several hundred carry an absolute error of 1e-5 in fp32, and so do probabilities.
    assert_agrees_with_float64(*head_inputs(scale=30.0), tolerance=2e-5)


def test_logits_that_keep_growing_raise_the_shift():
    vocab_size, n = 5050, 33  # several chunks a part; the last one raises the shift again
    x = np.ones((n, 4), np.float32)
    weight = np.linspace(-750, 750, 5056, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    targets = np.full(n, vocab_size - 2, np.int32)
    scale = np.full((), 1 / n, np.float32)
    assert_agrees_with_float64(x, weight, targets, scale, vocab_size, tolerance=1e-3)


def test_padding_words_have_no_probability_and_no_gradient():
    x, weight, targets, scale = head_inputs()
    poisoned = weight.copy()
    poisoned[VOCAB:] = np.nan
    clean, dirty = (loss_and_gradients(x, w, targets, scale) for w in (weight, poisoned))
    assert_same_bits(clean, dirty)
    assert not dirty[2][VOCAB:].any()


def test_ignored_tokens_change_nothing_whatever_they_hold():
    x, weight, targets, scale = head_inputs()
    poisoned = x.copy()
    poisoned[targets < 0] = np.nan
    clean, dirty = (loss_and_gradients(a, weight, targets, scale) for a in (x, poisoned))
    assert_same_bits(clean, dirty)
    assert not dirty[1][targets < 0].any()


def test_a_target_beyond_the_vocabulary_is_refused():
    x, weight, targets, scale = head_inputs()
    targets[2] = VOCAB
    with pytest.raises(ValueError, match="target 1003 of 1003 words"):
        loss_and_gradients(x, weight, targets, scale)


def test_all_targets_ignored_gives_loss_zero_and_gradient_zero():
    x, weight, targets, scale = head_inputs()
    loss, dx, dweight = loss_and_gradients(x, weight, np.full_like(targets, -100), scale)
    assert loss == 0
    assert not dx.any() and not dweight.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_hidden_state_that_is_not_finite_gives_a_loss_that_is_not_finite(bad):
    x, weight, targets, scale = head_inputs()
    x[33, 7] = bad  # token 33 has a target
    loss, _, _ = loss_and_gradients(x, weight, targets, scale)
    assert not np.isfinite(loss)


def test_a_weight_that_is_not_finite_gives_a_loss_that_is_not_finite():
    x, weight, targets, scale = head_inputs()
    weight[517, 3] = np.nan
    loss, _, _ = loss_and_gradients(x, weight, targets, scale)
    assert np.isnan(loss)


def test_weight_gradient_is_added_to_the_buffer():
    x, weight, targets, scale = head_inputs()
    buffer = np.ones_like(weight)
    head.loss_forward(np, x, weight, targets, scale, vocab_size=VOCAB, dweight_into=buffer)
    np.testing.assert_allclose(
        buffer, 1 + loss_and_gradients(x, weight, targets, scale)[2], rtol=0, atol=2e-7
    )


def test_token_logprob_does_not_depend_on_its_batch():
    x, weight, targets, _ = head_inputs()
    together, _ = head.logprob_forward(np, x, weight, targets, vocab_size=VOCAB)
    alone = [
        head.logprob_forward(np, x[i : i + 1], weight, targets[i : i + 1], vocab_size=VOCAB)[0][0]
        for i in range(0, 70, 9)
    ]
    np.testing.assert_array_equal(together[::9], alone)


def test_evaluation_and_training_give_the_same_loss():
    x, weight, targets, scale = head_inputs()
    evaluated, _ = head.loss_forward(np, x, weight, targets, scale, vocab_size=VOCAB)
    assert evaluated == loss_and_gradients(x, weight, targets, scale)[0]


@pytest.mark.parametrize("apply", [1, 0])
@pytest.mark.parametrize("decayed", [0, 20_001, 40_000])
def test_adamw_equals_its_numpy_reference_bit_for_bit(apply, decayed):
    n = 40_000
    p, g, m = (drawn(n, seed=s) for s in range(3))
    v = drawn(n, seed=3) ** 2
    hyper = np.array([1e-3, 0.19, 0.3, 0.7, apply], np.float32)
    attrs = {"decayed": decayed, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    expected = [a.copy() for a in (p, g, m, v)]
    adamw_op.reference.forward(np, *expected, hyper, None, **attrs)
    adamw.forward(np, p, g, m, v, hyper, None, **attrs)
    assert_same_bits((p, g, m, v), expected)
    assert not g.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_norm_of_a_gradient_that_is_not_finite_is_not_finite(bad):
    gradient = drawn(100_000)
    gradient[70_001] = bad
    norm, _ = global_norm.forward(np, gradient)
    assert not np.isfinite(norm)


# None, one and three pieces of k; on one thread and, the last two, on several: with more blocks of
# rows than threads, and with one block that threads share.
SIZES = [(9, 0, 5), (1, 1, 1), (7, 3, 5), (64, 40, 32), (65, 1, 97), (130, 70, 33), (70, 1100, 40)]
SIZES += [(330, 1100, 40), (40, 1100, 200)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_own_gemm_agrees_with_blas(shape, transpose_a, transpose_b):
    M, K, N = shape
    a = drawn(K, M) if transpose_a else drawn(M, K)
    b = drawn(N, K) if transpose_b else drawn(K, N)
    c = gemm.multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    truth = np.matmul(a.T if transpose_a else a, b.T if transpose_b else b)
    assert np.linalg.norm(c - truth) <= 1e-6 * np.linalg.norm(truth)
    before = drawn(M, N, seed=1)
    kept = before.copy()
    added = gemm.multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b, into=kept)
    assert added is kept
    assert K > gemm.DEPTH or added.tobytes() == (before + c).tobytes()
    assert np.linalg.norm(added - before - truth) <= 1e-6 * np.linalg.norm(before + truth)


def test_a_step_of_32_tokens_or_more_wakes_no_threads_of_blas(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("BLAS was called")

    monkeypatch.setattr(np, "matmul", refuse)
    x, weight = drawn(32, 200), drawn(300, 200)
    forward, backward = linear.linear_functions(linear.by_size)
    y, saved = forward(np, x, weight)
    backward(np, y, saved, into=(np.zeros_like(weight),))
    with pytest.raises(AssertionError):
        linear.by_size(x[:2], weight, transpose_b=True)


def test_attention_shows_a_score_that_is_not_a_number():
    q, k, v = drawn(1, 2, 9, 4), drawn(1, 1, 9, 4), drawn(1, 1, 9, 4)
    k[0, 0, 4, 1] = np.nan
    y, _ = attention.forward(np, q, k, v, None, None)
    assert np.isfinite(y[:, :, :4]).all()
    assert np.isnan(y[:, :, 4:]).all()
