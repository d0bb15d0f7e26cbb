"""Faults that users of such systems have met, each as its smallest case.

Others of the kind stand with what they are about: loss over nothing, clipping, epsilon, unequal
micro-batches and evaluation batches in test_train, torn checkpoints in test_checkpoint, dropout
under recomputation in test_engine, NaN through a gate in test_gates_framework.
"""

import math

import ml_dtypes
import numpy as np
import pytest

from gates.instruments import tiny_run
from xtrain.data.packing import PackedWindows
from xtrain.engine import device, ops
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.engine.tensor import Tensor, backward
from xtrain.train import loop
from xtrain.train.objectives.next_token import next_token_batch

CPU = device.use("cpu")
THETA = 10_000.0
# 15,962 and 15,968 are one bf16 number, and so are their angles if a low precision makes them.
POSITIONS = np.array([[4_095, 15_962, 15_968]], np.int32)


# Positions in low precision


def rotated(x, positions):
    """x (B, T, Dh) as the query of one head, rotated and nothing else: (B, T, Dh) float64."""
    qkv = Tensor(np.concatenate([x, x, x], axis=-1))
    q, _, _ = ops.qk_norm_rope(
        qkv, None, None, positions, heads=1, kv_heads=1, eps=1e-6, theta=THETA
    )
    return q.data.astype(np.float64)[:, 0]


def rotated_exactly(x, positions):
    half = x.shape[-1] // 2
    angle = positions[..., None] / THETA ** (np.arange(half) / half)
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize(
    ("dtype", "bar"),
    # fp32: an angle of 16,000 is off by up to 2**-11; bf16: and outputs are rounded to 2**-9.
    [(np.float32, 2e-3), (ml_dtypes.bfloat16, 6e-3)],
)
def test_rotations_far_into_a_text_are_those_of_float64(dtype, bar):
    x = np.ones((1, 3, 64), dtype)
    assert np.abs(rotated(x, POSITIONS) - rotated_exactly(x, POSITIONS)).max() < bar


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_positions_that_differ_are_rotated_differently(dtype):
    q = rotated(np.ones((1, 3, 64), dtype), POSITIONS)[0]
    assert np.abs(q[1] - q[2]).max() > 0.1


def test_attention_scores_depend_on_the_distance_alone_far_into_a_text():
    x = np.random.default_rng(1).standard_normal((1, 2, 64)).astype(np.float32)
    near, far = (rotated(x, np.array([[start, start + 5]], np.int32))[0] for start in (0, 15_962))
    assert near[0] @ near[1] == pytest.approx(far[0] @ far[1], abs=0.02)


# Grouped queries


def test_query_head_h_reads_key_value_head_h_over_group():
    B, H, Hk, T, Dh = 1, 4, 2, 3, 8
    q = Tensor(np.zeros((B, H, T, Dh), np.float32))  # uniform attention: y is a mean of values
    k = Tensor(np.zeros((B, Hk, T, Dh), np.float32))
    v = np.zeros((B, Hk, T, Dh), np.float32)
    v[:, 0], v[:, 1] = 10.0, 20.0
    y = ops.attention(q, k, Tensor(v), None, None).data
    for h in range(H):
        np.testing.assert_allclose(y[0, h], 10.0 * (1 + h // 2), rtol=1e-6)


def test_a_key_value_head_gets_the_gradient_of_its_own_group():
    q = Tensor(np.zeros((1, 4, 1, 8), np.float32), requires_grad=True)
    k = Tensor(np.zeros((1, 2, 1, 8), np.float32), requires_grad=True)
    v = Tensor(np.zeros((1, 2, 1, 8), np.float32), requires_grad=True)
    y = ops.attention(q, k, v, None, None)
    dy = np.zeros((1, 4, 1, 8), np.float32)
    dy[0, 0], dy[0, 1], dy[0, 3] = 1.0, 2.0, 40.0
    backward([y], [dy])
    np.testing.assert_allclose(v.grad[0, 0], 3.0, rtol=1e-6)
    np.testing.assert_allclose(v.grad[0, 1], 40.0, rtol=1e-6)


# Resume and go on


def starts_seen(directory, stops):
    """First token of every window trained on, run after run, each one left at a step."""
    seen = []
    batch = PackedWindows.batch

    def noting(self, step):
        made = batch(self, step)
        seen.append((step, made["input_ids"][..., 0].ravel().tolist()))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWindows, "batch", noting)
        for stop in stops:
            tiny_run.run(directory, CPU, until=stop)
    return dict(seen)  # a step that was made again counts once: its first making was lost


def test_a_run_left_twice_near_an_epochs_end_trains_on_every_window_as_if_it_had_not(tmp_path):
    assert starts_seen(tmp_path / "a", [9, 18, None]) == starts_seen(tmp_path / "b", [None])


def test_every_window_comes_once_an_epoch_in_a_resumed_run(tmp_path):
    starts = starts_seen(tmp_path, [9, 18, None])
    order = [s for step in range(tiny_run.TRAIN.total_steps) for s in starts[step]]
    stream = tiny_run.token_stream(tiny_run.WINDOWS * tiny_run.TRAIN.seq_len)
    once = sorted(stream[:: tiny_run.TRAIN.seq_len].tolist())
    for epoch in range(len(order) // tiny_run.WINDOWS):
        first = epoch * tiny_run.WINDOWS
        assert sorted(order[first : first + tiny_run.WINDOWS]) == once


def test_the_learning_rate_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path):
    """At the end of the warm-up and in the cosine's tail."""
    for stop in (6, 20, None):
        tiny_run.run(tmp_path / "left", CPU, until=stop)
    tiny_run.run(tmp_path / "whole", CPU)
    left, whole = (tiny_run.read_trace(tmp_path / name) for name in ("left", "whole"))
    rates = [{key: v for key, v in trace.items() if key[1] == "lr"} for trace in (left, whole)]
    assert rates[0] == rates[1]
    assert len(set(rates[1].values())) > tiny_run.TRAIN.total_steps // 2
    assert left == whole


def test_a_finished_run_that_is_started_again_trains_no_further(tmp_path):
    tiny_run.run(tmp_path, CPU)
    before = (tmp_path / "trace.jsonl").read_bytes()
    tiny_run.run(tmp_path, CPU)
    assert (tmp_path / "trace.jsonl").read_bytes() == before


# Repeated ids


def embedding_gradient(ids, dy):
    weight = Parameter((64, 16), std=1.0, decay=True)
    FlatBuffers([("embed", weight)], CPU).initialize(1, CPU)
    backward([ops.embedding(weight, ids)], [dy])
    return weight.grad.copy()


def test_one_id_a_thousand_times_has_bitwise_the_same_gradient_each_run():
    source = np.random.default_rng(2)
    ids = source.integers(0, 64, 3_000).astype(np.int32)
    ids[::3] = 7
    dy = source.standard_normal((3_000, 16)).astype(np.float32)
    first = embedding_gradient(ids, dy)
    assert all(embedding_gradient(ids, dy).tobytes() == first.tobytes() for _ in range(5))
    wide = np.zeros((64, 16))
    np.add.at(wide, ids, dy.astype(np.float64))
    np.testing.assert_allclose(first, wide, atol=1e-4)


# bf16 weights without a master


def gains_after(precision):
    """By name, how far each norm's gain has moved from one after 100 steps."""
    tiny = tiny_run.build(CPU, precision=precision)
    ids = np.random.default_rng(4).integers(0, 97, (1, 4, 17)).astype(np.int32)
    for step in range(100):
        tiny.step.load(next_token_batch(ids), step, 6e-4)
        tiny.step.run()
    return {n: p.data - 1 for n, p in tiny.buffers.parameters.items() if "norm" in n}


def test_gains_of_norms_move_in_bf16_as_they_do_in_fp32():
    narrow, wide = gains_after("bf16"), gains_after("fp32")
    assert {"layers.0.self_attn.q_norm.weight", "layers.1.self_attn.k_norm.weight"} <= set(wide)
    for name, moved in wide.items():
        assert np.abs(moved).max() > 0.01, name  # beyond bf16's step of 2**-7 around one
        assert np.linalg.norm(narrow[name] - moved) < 0.05 * np.linalg.norm(moved), name


# Not a number


def test_a_batch_that_makes_the_gradient_nan_is_passed_over_and_the_training_goes_on():
    source, values = np.random.default_rng(3), []
    tiny = tiny_run.build(CPU)
    ids = source.integers(0, 97, (1, 2, 9)).astype(np.int32)
    for step in range(4):
        tiny.step.load(next_token_batch(ids), step, 1e-3)
        if step == 1:
            tiny.buffers.grad[5] = np.nan
        loss, norm = tiny.step.run()
        values.append((float(loss), float(norm)))
    assert int(tiny.optimizer.skipped) == 1
    assert math.isnan(values[1][1])
    assert all(math.isfinite(v) for i, pair in enumerate(values) if i != 1 for v in pair)
    assert values[1][0] == values[2][0]  # the weights had not moved
    assert np.isfinite(tiny.buffers.master).all()


def test_skipped_steps_are_counted_in_the_log(tmp_path):
    source, _ = tiny_run.sources(tmp_path)
    tiny = tiny_run.build(CPU)
    lines = []

    def spoil_next(step, values):
        lines.append(values)
        if step == 3:
            tiny.buffers.grad[0] = np.inf

    hooks = loop.Hooks(
        log=spoil_next, evaluate=lambda step: None, save=lambda step: None, stop=lambda: None
    )
    loop.train(
        tiny.step,
        source,
        start=0,
        train_config=tiny_run.TRAIN,
        optim_config=tiny_run.OPTIM,
        hooks=hooks,
    )
    assert [line["skipped"] for line in lines] == [0] * 3 + [1] * 21
