"""The device and the captured training step, on a GPU."""

import gc

import numpy as np
import pytest

from xtrain.engine import device as devices
from xtrain.errors import OutOfDeviceMemory, UsageError
from xtrain.models.config import Qwen3Config
from xtrain.train.config import OptimConfig
from xtrain.train.learner import make_learner
from xtrain.train.objectives.next_token import next_token
from xtrain.train.step import TrainingStep

pytestmark = pytest.mark.cuda

CONFIG = Qwen3Config(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    vocab_size=301,
)


@pytest.fixture
def device():
    return devices.use("cuda")


def make_step(device, precision="fp32", *, dropout=0.0, remat="none") -> TrainingStep:
    optim = OptimConfig(lr=1e-3)
    options = {"seed": 3, "precision": precision, "remat": remat, "dropout": dropout}
    learner = make_learner(CONFIG, optim, device, **options)
    return learner.step(next_token, seed=5, dropout=dropout)


def batch_of(step: int, *, accumulation=2, rows=3, length=17) -> dict[str, np.ndarray]:
    source = np.random.default_rng(step)
    ids = source.integers(0, CONFIG.vocab_size, (accumulation, rows, length + 1)).astype(np.int32)
    targets = ids[..., 1:].copy()
    targets[source.random(targets.shape) < 0.1] = -100
    return {"input_ids": ids[..., :-1].copy(), "targets": targets}


def train(device, steps: int, **options) -> tuple[np.ndarray, np.ndarray]:
    """(loss, norm) of every step, and the final weights."""
    step = make_step(device, **options)
    trace = []
    for number in range(steps):
        step.load(batch_of(number % 4), number, 1e-3)  # four batches again and again: it can learn
        trace.append([float(device.host(value)) for value in step.run()])
    return np.array(trace), device.host(step.optimizer.buffers.master)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_captured_step_trains_as_the_eager_one_bit_for_bit(device, precision):
    captured = train(device, 100, precision=precision, dropout=0.1)
    device.captures = False
    eager = train(device, 100, precision=precision, dropout=0.1)
    for ours, theirs in zip(captured, eager, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert captured[0][-1, 0] < captured[0][0, 0]


def test_recomputation_is_captured_and_changes_no_bit(device):
    plain, again = train(device, 6), train(device, 6, remat="block")
    np.testing.assert_array_equal(plain[1], again[1])


def test_a_steady_step_asks_the_driver_for_no_memory(device):
    step = make_step(device, "bf16")
    for number in range(5):
        step.load(batch_of(number), number, 1e-3)
        step.run()
    before = device.memory().allocations
    for number in range(5, 10):
        step.load(batch_of(number), number, 1e-3)
        step.run()
    device.synchronize()
    assert step.run.is_captured
    assert device.memory().allocations == before


def test_a_batch_of_another_shape_is_refused_by_name(device):
    step = make_step(device)
    step.load(batch_of(0), 0, 1e-3)
    with pytest.raises(ValueError, match="input_ids"):
        step.load(batch_of(1, rows=4), 1, 1e-3)


def test_a_replay_names_the_input_that_was_replaced(device):
    arrays = {"left": device.xp.ones(4), "right": device.xp.ones(4)}
    run = device.capture(lambda: arrays["left"] + arrays["right"], lambda: arrays)
    for _ in range(3):
        run()
    arrays["right"] = device.xp.ones(4)
    with pytest.raises(ValueError, match="right"):
        run()


def test_a_replay_reads_what_was_written_into_its_inputs(device):
    x = device.array(np.zeros(4, np.float32))
    run = device.capture(lambda: 2 * x)
    for number in range(6):
        device.write(x, np.full(4, number, np.float32))
        np.testing.assert_array_equal(device.host(run()), np.full(4, 2 * number))


def test_results_outlive_the_captured_step(device):
    run = device.capture(lambda: device.xp.arange(5.0) + 1)
    for _ in range(3):
        result = run()
    del run
    gc.collect()
    device.xp.zeros(1 << 20)
    np.testing.assert_array_equal(device.host(result), np.arange(5.0) + 1)


def test_a_step_that_reads_on_the_host_fails_and_leaves_the_device_usable(device):
    x = device.xp.ones(3)

    def reads():
        return device.xp.asarray(float(x.sum()))

    run = device.capture(reads)
    run(), run()
    with pytest.raises(Exception, match=r"(?i)captur"):
        run()
    assert device.host(device.xp.ones(3).sum()) == 3


def test_written_values_do_not_change_with_the_host_array_afterwards(device):
    x, host = device.array(np.zeros(1000, np.int32)), np.zeros(1000, np.int32)
    for number in range(20):
        host[...] = number
        device.write(x, host)
        host[...] = -1
        assert (device.host(x) == number).all()


def test_a_full_memory_is_one_line_that_says_what_would_fit(device):
    with pytest.raises(OutOfDeviceMemory) as raised:
        device.xp.empty(1 << 46, np.uint8)
    assert "\n" not in str(raised.value) and "train.accumulation" in str(raised.value)


@pytest.fixture
def unpooled(device, monkeypatch):
    """A device without a pool, on which three quarters of a GiB may wait to go back."""
    from xtrain.cuda import memory

    monkeypatch.setattr(memory, "WAITING_BYTES", 3 << 28)
    device.restart_peak()
    device.use_pool(False)
    yield device
    device.use_pool(True)


def test_without_a_pool_freed_memory_waits_and_goes_back_together(unpooled):
    def free_gib() -> float:
        return unpooled.xp.cuda.Device().mem_info[0] / 2**30

    before = free_gib()
    one, other = (unpooled.xp.zeros(1 << 29, np.uint8) for _ in range(2))  # half a GiB each
    del one
    assert before - free_gib() > 0.9
    del other
    assert before - free_gib() < 0.1


def test_without_a_pool_memory_in_a_reference_cycle_goes_back_too(unpooled):
    before = unpooled.xp.cuda.Device().mem_info[0]
    cycle = [unpooled.xp.zeros(1 << 30, np.uint8)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert before - unpooled.xp.cuda.Device().mem_info[0] < 1 << 28


def test_without_a_pool_what_waits_goes_back_before_memory_counts_as_full(unpooled, monkeypatch):
    from xtrain.cuda import memory

    monkeypatch.setattr(memory, "WAITING_BYTES", 1 << 60)
    most = unpooled.xp.cuda.Device().mem_info[0] * 3 // 4
    unpooled.xp.empty(most, np.uint8)  # waits at once
    unpooled.xp.empty(most, np.uint8)
    with pytest.raises(OutOfDeviceMemory):
        unpooled.xp.empty(1 << 46, np.uint8)


def test_waiting_inside_a_step_and_capturing_it_exclude_each_other(device):
    device.op_sync = True
    with pytest.raises(UsageError, match=r"features\.op_sync"):
        device.capture(lambda: None)


def test_a_captured_step_that_is_gone_gave_its_memory_back(device):
    import cupy

    def free_bytes() -> int:
        gc.collect()
        device.restart_peak()
        return cupy.cuda.Device().mem_info[0]

    train(device, 3)  # compiles and loads what stays loaded
    before = free_bytes()
    step = device.capture(lambda: device.xp.zeros(2**28, np.float32) + 1)  # 1 GiB, twice
    for _ in range(4):
        step()
    del step
    assert before - free_bytes() < 2**26
