"""The training step, AdamW, the schedule, evaluation and the loop, on a tiny model."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gates.instruments import tiny_run
from xtrain.data.packing import EvalWindows
from xtrain.data.shards import ShardWriter, open_shard
from xtrain.engine import device
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.errors import Interrupted
from xtrain.train import loop
from xtrain.train.config import OptimConfig
from xtrain.train.evaluate import evaluate
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW, learning_rate

CPU = device.use("cpu")
# With these the first moment after one update is the gradient itself, and no weight moves.
GRADIENT_ONLY = OptimConfig(lr=0.0, beta1=0.0, clip_norm=0.0, weight_decay=0.0)


def words(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 97, shape).astype(np.int32)


def batch_of(ids):
    """(A, B, T + 1) ids as a batch of every next token."""
    return {"input_ids": ids[..., :-1].copy(), "targets": ids[..., 1:].copy()}


def one_step(batch, *, lr=0.0, **options):
    """Loss and gradient of one step from the initial weights."""
    tiny = tiny_run.build(CPU, **{"optim": GRADIENT_ONLY, **options})
    tiny.step.load(batch, 0, lr)
    loss, norm = tiny.step.run()
    return float(loss), tiny.buffers.moment1.copy(), float(norm)


def optimizer_of(gradient, config):
    """AdamW over one parameter that holds ones; it is decayed."""
    p = Parameter((len(gradient), 1), std=None, decay=True)
    buffers = FlatBuffers([("p", p)], CPU)
    buffers.initialize(0, CPU)
    return p, buffers, AdamW(buffers, config, CPU)


def update(optimizer, p, gradient, lr):
    p.grad[:, 0] = gradient
    optimizer.lr[...] = lr
    return float(optimizer.update())


# AdamW


def test_epsilon_is_added_after_the_bias_corrected_root():
    gradient = np.array([1e-6, -1e-4, 1e-3, 2.0], np.float32)
    config = OptimConfig(lr=0.1, eps=1e-3, weight_decay=0.0, clip_norm=0.0)
    p, _, optimizer = optimizer_of(gradient, config)
    update(optimizer, p, gradient, 0.1)
    expected = 1 - 0.1 * gradient / (np.abs(gradient) + 1e-3)  # corrected moments are g and g**2
    np.testing.assert_allclose(p.data[:, 0], expected, rtol=3e-7)


def test_weight_decay_is_decoupled_and_scaled_by_the_learning_rate():
    config = OptimConfig(lr=0.5, weight_decay=0.1)
    p, _, optimizer = optimizer_of(np.zeros(3), config)
    update(optimizer, p, np.zeros(3), 0.5)
    np.testing.assert_allclose(p.data, 0.95, rtol=1e-7)


def test_a_gradient_below_the_limit_is_not_scaled():
    gradient = np.array([0.3, -0.4, 0.1], np.float32)
    p, buffers, optimizer = optimizer_of(gradient, replace(GRADIENT_ONLY, clip_norm=1.0))
    update(optimizer, p, gradient, 0.0)
    np.testing.assert_array_equal(buffers.view(buffers.moment1, "p")[:, 0], gradient)


def test_a_gradient_above_the_limit_keeps_its_direction_and_gets_its_norm():
    gradient = np.array([30.0, -40.0, 0.0], np.float32)
    p, buffers, optimizer = optimizer_of(gradient, replace(GRADIENT_ONLY, clip_norm=2.0))
    assert update(optimizer, p, gradient, 0.0) == 50.0
    np.testing.assert_allclose(
        buffers.view(buffers.moment1, "p")[:, 0], [1.2, -1.6, 0.0], rtol=1e-6
    )


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad, clip_norm):
    config = OptimConfig(lr=0.1, clip_norm=clip_norm)
    p, buffers, optimizer = optimizer_of(np.zeros(4), config)
    update(optimizer, p, [0.1, 0.2, -0.3, 0.4], 0.1)
    before = [b.copy() for b in (buffers.master, buffers.moment1, buffers.moment2)]
    norm = update(optimizer, p, [0.1, bad, 0.1, 0.1], 0.1)
    assert not math.isfinite(norm)
    for now, then in zip((buffers.master, buffers.moment1, buffers.moment2), before, strict=True):
        assert now.tobytes() == then.tobytes()
    assert (buffers.grad == 0).all()
    assert (int(optimizer.updates), int(optimizer.skipped)) == (1, 1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_skipped_gradient_leaves_no_trace_in_the_next_update():
    gradients = [[0.1, 0.2], [math.nan, 0.0], [0.3, -0.1]]
    p, _, with_bad = optimizer_of(np.zeros(2), OptimConfig(lr=0.1))
    for g in gradients:
        update(with_bad, p, g, 0.1)
    q, _, without = optimizer_of(np.zeros(2), OptimConfig(lr=0.1))
    for g in (gradients[0], gradients[2]):
        update(without, q, g, 0.1)
    np.testing.assert_array_equal(p.data, q.data)


def test_the_norm_of_values_whose_square_overflows_is_right():
    gradient = np.array([3e30, -4e30], np.float32)
    p, buffers, optimizer = optimizer_of(gradient, OptimConfig(lr=0.1, clip_norm=1.0))
    assert update(optimizer, p, gradient, 0.1) == pytest.approx(5e30, rel=1e-6)
    assert int(optimizer.skipped) == 0
    for buffer in (buffers.master, buffers.moment1, buffers.moment2):
        assert np.isfinite(buffer).all()


def test_a_gradient_whose_square_would_overflow_the_second_moment_is_skipped():
    p, buffers, optimizer = optimizer_of(np.zeros(2), OptimConfig(lr=0.1, clip_norm=0.0))
    update(optimizer, p, [3e30, 1.0], 0.1)
    assert int(optimizer.skipped) == 1
    assert (p.data == 1).all()
    assert (buffers.moment2 == 0).all()


# Schedule


def rates(steps, **options):
    config = OptimConfig(lr=2.0, **options)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_the_warm_up_moves_at_once_and_ends_at_the_peak():
    assert rates(20, warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_without_a_warm_up_the_first_step_has_the_peak():
    assert rates(10)[0] == 2.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_falls_to_its_floor_at_the_last_step(schedule):
    trace = rates(30, schedule=schedule, warmup_steps=5, min_lr_ratio=0.1)
    assert trace[-1] == pytest.approx(0.2, rel=1e-12)
    assert all(a > b for a, b in pairwise(trace[5:]))


def test_the_cosine_is_half_way_at_half_time():
    assert rates(21, min_lr_ratio=0.0)[10] == pytest.approx(1.0, rel=1e-12)


def test_a_constant_schedule_stays_at_the_peak():
    assert rates(9, schedule="constant", warmup_steps=2) == [1.0] + [2.0] * 8


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_of_one_step_trains_at_the_peak(schedule):
    assert rates(1, schedule=schedule) == [2.0]


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="schedule=polynomial: cosine, linear or constant"):
        rates(3, schedule="polynomial")


# The step


def test_a_step_without_accumulation_is_bitwise_the_plain_gradient():
    ids = words(1, 3, 18)
    loss, gradient, _ = one_step(batch_of(ids))
    tiny = tiny_run.build(CPU)
    batch = {name: a[0] for name, a in batch_of(ids).items()}
    term = next_token(tiny.model, batch, np.asarray(1 / 51, np.float32), None)
    term.backward()
    assert loss == float(term)
    assert gradient.tobytes() == tiny.buffers.grad.tobytes()


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_micro_batches_have_the_loss_and_gradient_of_one_batch(parts):
    ids = words(6, 18)
    whole = one_step(batch_of(ids.reshape(1, 6, 18)))
    cut = one_step(batch_of(ids.reshape(parts, 6 // parts, 18)))
    require_same_step(cut, whole)


def test_micro_batches_weigh_tokens_alike_when_they_have_10_and_1000():
    batch = batch_of(words(2, 16, 65))  # two micro-batches of 1024 tokens
    flat = batch["targets"].reshape(2, -1)
    flat[0, 10:] = -100
    flat[1, 1000:] = -100
    joined = {name: a.reshape(1, 32, 64) for name, a in batch.items()}
    require_same_step(one_step(batch), one_step(joined))


def test_a_micro_batch_without_targets_changes_nothing():
    batch = batch_of(words(1, 3, 18))
    empty = batch_of(words(1, 3, 18, seed=1))
    empty["targets"][...] = -100
    both = {name: np.concatenate([empty[name], batch[name]]) for name in batch}
    loss, gradient, norm = one_step(both)
    expected_loss, expected_gradient, expected_norm = one_step(batch)
    assert (loss, norm) == (expected_loss, expected_norm)
    np.testing.assert_array_equal(gradient, expected_gradient)


def test_a_step_without_any_target_has_loss_and_gradient_zero():
    batch = batch_of(words(2, 3, 18))
    batch["targets"][...] = -100
    loss, gradient, norm = one_step(batch)
    assert (loss, norm) == (0.0, 0.0)
    assert (gradient == 0).all()


def test_a_step_without_any_target_keeps_the_weights_finite():
    batch = batch_of(words(1, 3, 18))
    batch["targets"][...] = -100
    tiny = tiny_run.build(CPU)
    for step in range(3):
        tiny.step.load(batch, step, 1e-2)
        tiny.step.run()
    assert np.isfinite(tiny.buffers.master).all()
    assert int(tiny.optimizer.skipped) == 0


def test_a_batch_of_another_shape_is_refused():
    tiny = tiny_run.build(CPU)
    tiny.step.load(batch_of(words(1, 3, 18)), 0, 0.0)
    with pytest.raises(ValueError, match=r"\(1, 3, 9\), the step was made for \(1, 3, 17\)"):
        tiny.step.load(batch_of(words(1, 3, 10)), 1, 0.0)


def test_dropout_differs_between_steps_micro_batches_and_seeds():
    tiny = tiny_run.build(CPU, dropout=0.5)
    batch = batch_of(np.repeat(words(1, 3, 18), 2, axis=0))
    keys = []
    for step in (0, 1):
        tiny.step.load(batch, step, 0.0)
        keys += [tuple(row) for row in tiny.step.keys]
    other = tiny_run.build(CPU, dropout=0.5, seed=1)
    other.step.load(batch, 0, 0.0)
    keys += [tuple(row) for row in other.step.keys]
    assert len(set(keys)) == 6


def test_equal_micro_batches_of_a_step_drop_different_elements():
    one = batch_of(words(1, 3, 18))
    both = {name: np.repeat(rows, 2, axis=0) for name, rows in one.items()}
    for dropout, least, most in ((0.0, 0, 1e-5), (0.5, 0.05, np.inf)):
        alone, twice = (one_step(batch, dropout=dropout)[1] for batch in (one, both))
        assert least <= np.linalg.norm(twice - alone) / np.linalg.norm(alone) <= most


def test_dropout_is_live_in_training():
    batch = batch_of(words(1, 3, 18))
    assert one_step(batch, dropout=0.3)[0] != one_step(batch)[0]


def test_dropout_zero_is_bitwise_no_dropout():
    batch = batch_of(words(1, 3, 18))
    loss, gradient, _ = one_step(batch, dropout=0.0)
    expected_loss, expected_gradient, _ = one_step(batch)
    assert loss == expected_loss
    assert gradient.tobytes() == expected_gradient.tobytes()


def test_one_batch_is_learned_by_heart():
    batch = batch_of(words(1, 2, 13))
    tiny = tiny_run.build(CPU, optim=OptimConfig(lr=2e-2))
    for step in range(60):
        tiny.step.load(batch, step, 2e-2)
        loss, _ = tiny.step.run()
    assert float(loss) < 0.02


# Evaluation


def eval_source(directory, tokens):
    made = {"vocab_size": 97, "tokenizer": "00" * 32}
    with ShardWriter(directory / "heldout.bin", **made) as writer:
        writer.append(words(tokens + 1))
    return EvalWindows(open_shard(directory / "heldout.bin", **made), seq_len=8)


def test_the_evaluation_loss_does_not_depend_on_the_batch_size(tmp_path):
    tiny = tiny_run.build(CPU)
    source = eval_source(tmp_path, 8 * 37 + 5)  # 38 windows, the last one ragged
    results = [evaluate(tiny.model, source, batch_size=n, device=CPU) for n in (1, 7, 32)]
    assert {r.tokens for r in results} == {8 * 37 + 5}
    for r in results[1:]:
        assert r.loss == pytest.approx(results[0].loss, rel=1e-6)
        assert r.standard_error == pytest.approx(results[0].standard_error, rel=1e-5)


def test_evaluation_has_no_dropout_and_leaves_the_training_as_it_was(tmp_path):
    source = eval_source(tmp_path, 40)
    dropping, plain = tiny_run.build(CPU, dropout=0.5), tiny_run.build(CPU)
    losses = [evaluate(t.model, source, batch_size=4, device=CPU).loss for t in (dropping, plain)]
    assert losses[0] == losses[1]
    assert (dropping.buffers.grad == 0).all()
    batch = batch_of(words(1, 3, 18))
    dropping.step.load(batch, 0, 0.0)
    assert float(dropping.step.run()[0]) == one_step(batch, dropout=0.5)[0]


def test_the_loss_of_uniform_predictions_is_the_log_of_the_vocabulary(tmp_path):
    tiny = tiny_run.build(CPU)
    tiny.model.lm_head.weight.data[...] = 0
    result = evaluate(tiny.model, eval_source(tmp_path, 40), batch_size=4, device=CPU)
    assert result.loss == pytest.approx(math.log(97), rel=1e-6)
    assert result.perplexity == pytest.approx(97, rel=1e-5)
    assert result.standard_error < 1e-3


def test_an_evaluation_set_without_targets_is_an_error():
    class Empty:
        def batches(self, batch_size):
            ids = words(2, 8)
            yield {"input_ids": ids, "targets": np.full_like(ids, -100)}

    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(tiny_run.build(CPU).model, Empty(), batch_size=2, device=CPU)


# The loop


def record_loop(tmp_path, *, start=0, stop=lambda: None, **changes):
    """What the loop asked of its hooks, in order: (what, step)."""
    source, _ = tiny_run.sources(tmp_path)
    tiny = tiny_run.build(CPU)
    asked = []
    hooks = loop.Hooks(
        log=lambda step, values: asked.append(("log", step)),
        evaluate=lambda step: asked.append(("evaluate", step)),
        save=lambda step: asked.append(("save", step)),
        stop=stop,
    )
    config = replace(tiny_run.TRAIN, max_tokens=7 * 32, **changes)
    try:
        loop.train(
            tiny.step,
            source,
            start=start,
            train_config=config,
            optim_config=tiny_run.OPTIM,
            hooks=hooks,
        )
    except Interrupted as interrupted:
        asked.append(("interrupted", interrupted.signal))
    return asked


def steps_of(what, asked):
    return [step for name, step in asked if name == what]


class Given:
    """Stands where the step and the source do: what the loop gives each step, in order."""

    def __init__(self):
        self.loads, self.device, self.optimizer = [], self, self
        self.skipped = 0

    def load(self, batch, number, lr):
        self.loads.append((number, batch, lr))

    def run(self):
        return 1.0, 1.0

    def host(self, value):
        return value

    def batch(self, number):
        return f"windows of step {number}"

    def epoch(self, number):
        return 0.0


@pytest.mark.parametrize("start", [0, 3, 6])
def test_the_loop_gives_each_step_its_own_rate_windows_and_key(start):
    """Numbers worked out by hand: four steps of warm-up, then linear to nothing at the last."""
    given, nothing = Given(), lambda *arguments: None
    config = replace(tiny_run.TRAIN, max_tokens=7 * 32)
    optim = OptimConfig(lr=12.0, warmup_steps=4, schedule="linear", min_lr_ratio=0.0)
    hooks = loop.Hooks(log=nothing, evaluate=nothing, save=nothing, stop=nothing)
    loop.train(given, given, start=start, train_config=config, optim_config=optim, hooks=hooks)
    rates = [3.0, 6.0, 9.0, 12.0, 12.0, 6.0, 0.0]
    assert given.loads == [(n, f"windows of step {n}", rates[n]) for n in range(start, 7)]


def test_the_wall_clock_speed_has_the_evaluations_and_saves_in_it(monkeypatch):
    """A step takes a second, an evaluation ten, a save a hundred; one step is 32 tokens."""
    now, logged = [0.0], {}

    def takes(seconds):
        def pass_time(*arguments):
            now[0] += seconds
            return 1.0, 1.0

        return pass_time

    given = Given()
    given.run = takes(1.0)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    config = replace(tiny_run.TRAIN, max_tokens=3 * 32, eval_every_steps=1, save_every_steps=2)
    hooks = loop.Hooks(
        log=logged.__setitem__, evaluate=takes(10.0), save=takes(100.0), stop=lambda: None
    )
    optim = OptimConfig(lr=1.0)
    loop.train(given, given, start=0, train_config=config, optim_config=optim, hooks=hooks)
    assert [logged[n]["tok_s"] for n in (1, 2, 3)] == [32.0, 32.0, 32.0]
    assert [logged[n]["wall_tok_s"] for n in (1, 2, 3)] == [32.0, 32.0 / 11.0, 32.0 / 111.0]


def test_the_loop_logs_evaluates_and_saves_when_asked_and_at_the_end(tmp_path):
    asked = record_loop(tmp_path, log_every_steps=2, eval_every_steps=3, save_every_steps=4)
    assert steps_of("log", asked) == [2, 4, 6, 7]
    assert steps_of("evaluate", asked) == [0, 3, 6, 7]
    assert steps_of("save", asked) == [4, 7]


def test_a_resumed_loop_does_not_evaluate_its_start_again(tmp_path):
    asked = record_loop(tmp_path, start=4, log_every_steps=1, eval_every_steps=2)
    assert steps_of("log", asked) == [5, 6, 7]
    assert steps_of("evaluate", asked) == [6, 7]


def test_a_signal_ends_the_loop_after_a_checkpoint(tmp_path):
    signals = iter([None, None, 15])
    asked = record_loop(tmp_path, stop=lambda: next(signals), save_every_steps=100)
    assert asked[-2:] == [("save", 3), ("interrupted", 15)]


def test_a_signal_in_the_last_step_does_not_undo_the_end(tmp_path):
    signals = iter([None] * 6 + [15])
    asked = record_loop(tmp_path, stop=lambda: next(signals), save_every_steps=100)
    assert asked[-1] == ("save", 7)


def test_two_trainings_are_bitwise_the_same(tmp_path):
    runs = [tiny_run.run(tmp_path / name, CPU) for name in "ab"]
    traces = [tiny_run.read_trace(tmp_path / name) for name in "ab"]
    assert traces[0] == traces[1]
    for buffer in ("master", "moment1", "moment2"):
        first, second = (getattr(r.buffers, buffer) for r in runs)
        assert first.tobytes() == second.tobytes()


def test_another_seed_gives_another_training():
    batch = batch_of(words(1, 3, 18))
    assert one_step(batch, seed=1)[0] != one_step(batch, seed=2)[0]


def require_same_step(one, other):
    """Loss to 1e-7 and gradient to 1e-5 relative: rounding of another order of summation."""
    assert one[0] == pytest.approx(other[0], rel=1e-7)
    assert np.linalg.norm(one[1] - other[1]) <= 1e-5 * np.linalg.norm(other[1])
