"""Tensor, tape, host-read guard, recomputation, and what a loss may be used for."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gates.instruments import tiny_run
from xtrain.engine import device, ops, rng
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.engine.remat import remat
from xtrain.engine.tensor import (
    SEED,
    HostReadError,
    Tensor,
    backward,
    host_read_guard,
    no_tape,
    tape,
)
from xtrain.errors import UsageError
from xtrain.train.objectives.next_token import next_token

CPU = device.use("cpu")


def leaf(values, dtype=np.float64):
    return Tensor(np.asarray(values, dtype), requires_grad=True)


def words(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 97, shape).astype(np.int32)


def shifted(ids):
    """Targets of the next token; the last one of each row is ignored."""
    targets = np.roll(ids, -1, axis=-1)
    targets[..., -1] = -100
    return targets


# Tensor


def test_a_tensor_shows_shape_strides_and_dtype_of_its_array():
    array = np.zeros((4, 6), np.float32)[:, ::2]
    x = Tensor(array)
    assert (x.shape, x.strides, x.dtype) == (array.shape, array.strides, array.dtype)


def test_item_and_float_read_one_element():
    x = Tensor(np.asarray(2.5, np.float32))
    assert x.item() == float(x) == 2.5


def test_detach_shares_the_array_and_cuts_the_tape():
    x = leaf([1.0, 2.0])
    y = ops.scale(x, factor=3.0)
    cut = y.detach()
    assert cut.data is y.data
    assert not cut.requires_grad
    assert cut.node is None


# Tape


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_a_leaf_used_k_times_gets_the_sum_of_k_gradients(k):
    x = leaf([1.0, -2.0, 0.5])
    y = x
    for _ in range(k - 1):
        y = ops.add(y, x)
    ops.total(y).backward()
    np.testing.assert_array_equal(x.grad, np.full(3, float(k)))


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_an_intermediate_used_k_times_gets_the_sum_of_k_gradients(k):
    x = leaf([1.0, -2.0, 0.5])
    middle = ops.scale(x, factor=2.0)
    backward([ops.scale(middle, factor=float(i + 1)) for i in range(k)], [np.ones(3)] * k)
    np.testing.assert_array_equal(x.grad, np.full(3, 2.0 * k * (k + 1) / 2))


def test_the_two_inputs_of_one_op_may_be_the_same_tensor():
    x = leaf([3.0, -4.0])
    ops.total(ops.multiply(x, x)).backward()
    np.testing.assert_array_equal(x.grad, [6.0, -8.0])


def test_backward_twice_adds_to_the_gradient():
    x = leaf([1.0, 2.0])
    for _ in range(2):
        ops.total(ops.scale(x, factor=5.0)).backward()
    np.testing.assert_array_equal(x.grad, [10.0, 10.0])


def test_gradients_handed_to_backward_are_not_modified():
    x = leaf([1.0, 2.0])
    y = ops.add(x, x)  # both inputs are given the very same array
    given = np.array([1.0, 10.0])
    backward([y, ops.scale(x, factor=1.0)], [given, given])
    np.testing.assert_array_equal(given, [1.0, 10.0])
    np.testing.assert_array_equal(x.grad, [3.0, 30.0])


def test_an_output_that_nothing_used_counts_as_gradient_zero():
    x, residual, weight = leaf([[1.0, 2.0]]), leaf([[0.5, -1.0]]), leaf([1.0, 1.0])
    _, total = ops.add_rms_norm(x, residual, weight, eps=1e-6)
    ops.total(total).backward()
    np.testing.assert_array_equal(x.grad, [[1.0, 1.0]])
    np.testing.assert_array_equal(weight.grad, [0.0, 0.0])


def test_backward_from_a_leaf_gives_it_gradient_one():
    x = leaf(2.0)
    x.backward()
    np.testing.assert_array_equal(x.grad, 1.0)


def test_backward_must_start_from_one_element():
    with pytest.raises(ValueError, match=r"one element, this tensor has \(2,\)"):
        leaf([1.0, 2.0]).backward()


def test_a_long_tape_needs_no_recursion():
    x = leaf(1.0)
    y = x
    for _ in range(3000):
        y = ops.add(y, x)
    y.backward()
    assert x.grad == 3001


def test_an_op_without_a_differentiable_input_is_not_recorded():
    assert ops.scale(Tensor(np.ones(2)), factor=2.0).node is None


def test_nothing_is_recorded_inside_no_tape():
    x = leaf([1.0])
    with no_tape():
        assert ops.scale(x, factor=2.0).node is None
        with tape():
            assert ops.scale(x, factor=2.0).node is not None
        assert ops.scale(x, factor=2.0).node is None
    assert ops.scale(x, factor=2.0).node is not None


def test_recording_goes_on_after_an_error_inside_no_tape():
    with pytest.raises(KeyError), no_tape():
        raise KeyError
    assert ops.scale(leaf([1.0]), factor=2.0).node is not None


def test_two_backward_passes_give_identical_bits():
    def gradient():
        tiny = tiny_run.build(CPU)
        ids = words((3, 17))
        hidden = tiny.model(ids)
        tiny.model.loss(hidden, shifted(ids), np.asarray(0.02, np.float32)).backward()
        return tiny.buffers.grad.tobytes()

    assert gradient() == gradient()


def test_an_op_names_the_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"linear: .*\(2, 3\).*\(5, 4\)"):
        ops.linear(leaf(np.ones((2, 3))), leaf(np.ones((5, 4))))


def test_a_new_thread_computes_on_the_cpu_until_it_chooses_a_device():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(device.current).result().name == "cpu"


# Host-read guard


@pytest.mark.parametrize("read", [float, bool, Tensor.item, Tensor.host], ids=lambda f: f.__name__)
def test_reading_a_value_inside_a_guarded_step_is_an_error(read):
    x = Tensor(np.asarray(1.0))
    with host_read_guard(), pytest.raises(HostReadError, match="could not be captured"):
        read(x)
    read(x)


def test_the_guard_of_an_outer_step_survives_an_inner_one():
    x = Tensor(np.asarray(1.0))
    with host_read_guard():
        with host_read_guard():
            pass
        with pytest.raises(HostReadError):
            x.item()


def test_an_objective_that_reads_its_loss_is_refused_on_the_cpu_too():
    def reads(model, batch, scale, key):
        loss = next_token(model, batch, scale, key)
        return Tensor(loss.data * 2) if float(loss) < 0 else loss

    tiny = tiny_run.build(CPU, objective=reads)
    ids = words((1, 2, 8))
    tiny.step.load({"input_ids": ids, "targets": shifted(ids)}, 0, 1e-3)
    with pytest.raises(HostReadError):
        tiny.step.run()


# Recomputation


def model_gradient(mode, dropout):
    tiny = tiny_run.build(CPU, remat=mode, dropout=dropout)
    ids = words((3, 17))
    key = rng.key_array(np, 5, 3, 1) if dropout else None
    hidden = tiny.model(ids, key=key)
    tiny.model.loss(hidden, shifted(ids), np.asarray(0.02, np.float32)).backward()
    return tiny.buffers.grad


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["mlp", "block"])
def test_recomputation_gives_bitwise_the_same_gradients(mode, dropout):
    expected = model_gradient("none", dropout)
    assert np.abs(expected).max() > 0
    assert model_gradient(mode, dropout).tobytes() == expected.tobytes()


def test_recomputation_keeps_nothing_of_what_it_made_on_the_way():
    made = []

    def fn(x):
        made.append(ops.scale(x, factor=2.0))
        return ops.scale(made[-1], factor=3.0)

    y = remat(fn, leaf([1.0]))
    assert made[0].node is None
    assert y.node.name == "remat"


def test_recomputation_handles_tuples_repeated_inputs_and_unused_outputs():
    x = leaf([1.0, 2.0])

    def fn(a, b):
        return ops.multiply(a, b), ops.scale(a, factor=100.0)

    used, _ = remat(fn, x, x)
    ops.total(used).backward()
    np.testing.assert_array_equal(x.grad, [2.0, 4.0])


def test_recomputation_may_pass_an_input_through():
    x = leaf([1.0, 2.0])
    same, doubled = remat(lambda a: (a, ops.scale(a, factor=2.0)), x)
    ops.total(ops.add(same, doubled)).backward()
    np.testing.assert_array_equal(x.grad, [3.0, 3.0])


def test_recomputation_nests():
    x = leaf([1.0, 2.0])

    def inner(a):
        return ops.multiply(a, a)

    ops.total(remat(lambda a: ops.multiply(remat(inner, a), a), x)).backward()
    np.testing.assert_array_equal(x.grad, [3.0, 12.0])


def test_recomputation_is_a_plain_call_without_the_tape():
    with no_tape():
        assert remat(lambda a: ops.scale(a, factor=2.0), leaf([1.0])).node is None


# The loss that makes its gradients in its forward pass


def head(dtype=np.float32):
    source = np.random.default_rng(3)
    weight = Parameter((128, 8), std=1.0, decay=True, rows=97)
    buffers = FlatBuffers([("lm_head.weight", weight)], CPU)
    buffers.initialize(1, CPU)
    x = leaf(source.standard_normal((5, 8)), dtype)
    targets = np.array([3, -100, 96, 0, 3], np.int32)
    return x, weight, targets, np.asarray(0.25, dtype)


def test_the_loss_with_a_gradient_buffer_equals_the_one_without():
    x, weight, targets, scale = head()
    loss = ops.linear_cross_entropy(x, weight, targets, scale, vocab_size=97)
    loss.backward()
    expected_dx, expected_dw = x.grad, weight.grad.copy()
    x, weight, targets, scale = head()
    fused = ops.linear_cross_entropy(
        x, weight, targets, scale, vocab_size=97, dweight_into=weight.grad
    )
    fused.backward()
    assert fused.item() == pytest.approx(loss.item(), rel=1e-7)
    np.testing.assert_allclose(x.grad, expected_dx, rtol=0, atol=1e-6)
    np.testing.assert_allclose(weight.grad, expected_dw, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "use",
    [lambda loss: ops.scale(loss, factor=2.0), lambda loss: ops.add(loss, loss)],
    ids=["scaled", "added to itself"],
)
def test_a_loss_that_made_its_gradients_must_be_where_backward_starts(use):
    x, weight, targets, scale = head()
    loss = ops.linear_cross_entropy(
        x, weight, targets, scale, vocab_size=97, dweight_into=weight.grad
    )
    with pytest.raises(ValueError, match="must be the tensor that backward"):
        use(loss).backward()


def test_a_loss_without_a_gradient_buffer_may_be_scaled():
    x, weight, targets, scale = head()
    ops.linear_cross_entropy(x, weight, targets, scale, vocab_size=97).backward()
    once_dx, once_dw = x.grad, weight.grad.copy()
    x, weight, targets, scale = head()
    loss = ops.linear_cross_entropy(x, weight, targets, scale, vocab_size=97)
    ops.scale(loss, factor=4.0).backward()
    np.testing.assert_allclose(x.grad, 4 * once_dx, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(weight.grad, 4 * once_dw, rtol=1e-6, atol=1e-7)


def test_two_losses_add_to_one_gradient_buffer():
    x, weight, targets, scale = head()
    for _ in range(2):
        loss = ops.linear_cross_entropy(
            x, weight, targets, scale, vocab_size=97, dweight_into=weight.grad
        )
        backward([loss], [SEED])
    twice = weight.grad.copy()
    x, weight, targets, scale = head()
    ops.linear_cross_entropy(
        x, weight, targets, scale, vocab_size=97, dweight_into=weight.grad
    ).backward()
    np.testing.assert_allclose(twice, 2 * weight.grad, rtol=1e-6)


def test_padding_words_get_no_gradient():
    x, weight, targets, scale = head()
    weight.data[97:] = 50.0  # would take all the probability mass if it were seen
    ops.linear_cross_entropy(
        x, weight, targets, scale, vocab_size=97, dweight_into=weight.grad
    ).backward()
    assert np.abs(weight.grad[:97]).max() > 0
    assert (weight.grad[97:] == 0).all()


# Devices


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="device=gpu: choose one of auto, cpu, cuda"):
        device.resolve("gpu")


def test_the_debug_level_that_checks_values_names_the_op():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XTRAIN_DEBUG", "1")
        device.use("cpu")
    with pytest.raises(FloatingPointError, match="scale: output 0"):
        ops.scale(Tensor(np.array([np.inf])), factor=1.0)
    device.use("cpu")
    ops.scale(Tensor(np.array([np.inf])), factor=1.0)


def test_what_no_backward_needs_is_let_go():
    x = Tensor(np.ones(3), requires_grad=True)
    between = ops.scale(x, factor=2.0)
    held = weakref.ref(between.data)
    y = ops.total(ops.scale(between, factor=3.0))
    del between
    assert held() is None
    y.backward()
    np.testing.assert_array_equal(x.grad, np.full(3, 6.0))
