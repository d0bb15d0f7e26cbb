"""T11: a steady step allocates nothing and is one graph.

Claim   After its first calls a training step asks the driver for no memory, captured or not; its
        replay as one CUDA graph gives the eager step's bits over 100 steps, with dropout, in fp32
        and bf16, and takes the host at most 2 ms; pool and graph together at least double v2's
        speed. On any device the step obeys what capture asks of it: nothing is read on the host
        inside it, and what it reads and writes stays where it is.
Why     A replay reads the addresses of its capture: an array that moved, or a value that the host
        put into a kernel, is the one of the third step for ever, and the loss still falls.
Reads   conf/model/v2 and conf/phase/t11, for the size and for what is on as of this phase.
Needs   A CPU for the rules; all else one CUDA device that nobody else uses. About 20 seconds.
"""

import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import numpy as np

from gates.instruments import paired, tiny_run
from gates.instruments.bits import differing_bits
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.assemble.sized_step import SizedStep, Work
from xtrain.config.schema import Features
from xtrain.engine import device as devices
from xtrain.engine.tensor import HostReadError, Tensor
from xtrain.train.objectives.next_token import next_token_batch
from xtrain.train.optimizer import AdamW, learning_rate
from xtrain.train.step import TrainingStep

STEPS = 100
DROPOUT = 0.1
WORK = Work("v2", 16, 256)
WARM_UP, STEADY = 5, 10


def rules(device: str) -> dict[str, float]:
    """Arrays of a step that moved, and host reads inside it, over ten steps on any device."""
    here = devices.use(device)
    tiny = tiny_run.build(here, dropout=DROPOUT)
    before, broken = {}, 0
    for number, batch in enumerate(_batches(10)):
        tiny.step.load(batch, number, 1e-3)
        try:
            tiny.step.run()
        except HostReadError:
            broken += 1
        now = _arrays(tiny)
        broken += sum(_address(before[n]) != _address(now[n]) for n in before)
        before = before or now
    return {"capture_rules_broken": float(broken)}


def _arrays(tiny) -> dict[str, object]:
    b, optimizer, step = tiny.buffers, tiny.optimizer, tiny.step
    state = {"m": b.moment1, "v": b.moment2, "n": optimizer.updates, "skipped": optimizer.skipped}
    inputs = {**step.batch, "keys": step.keys, "lr": optimizer.lr}
    return {"weights": b.master, "gradient": b.grad, **state, **inputs}


def _address(array) -> int:
    data = getattr(array.data, "ptr", None)
    return array.ctypes.data if data is None else data


def _batches(count: int) -> list[dict[str, np.ndarray]]:
    ids = tiny_run.token_stream(count * 4 * 9).reshape(count, 2, 2, 9).astype(np.int32)
    return [next_token_batch(each) for each in ids]


def replay(device: str) -> dict[str, float]:
    """Losses, norms and final state of 100 captured steps whose bits are not the eager ones."""
    if device != "cuda":
        return {}
    differing = 0
    for precision in ("fp32", "bf16"):
        captured, eager = (_trained(device, precision, captures) for captures in (True, False))
        differing += sum(differing_bits(*pair) for pair in zip(captured, eager, strict=True))
    return {"replay_differing_values": float(differing)}


def _trained(device: str, precision: str, captures: bool) -> list[np.ndarray]:
    here = devices.use(device)
    here.captures = captures
    tiny = tiny_run.build(here, dropout=DROPOUT, precision=precision)
    trace = []
    for number, batch in enumerate(_batches(STEPS)):
        tiny.step.load(batch, number, learning_rate(tiny_run.OPTIM, number, STEPS))
        trace.append([float(here.host(value)) for value in tiny.step.run()])
    if getattr(tiny.step.run, "is_captured", False) != captures:
        raise RuntimeError("the step to be captured ran eagerly, or the other way round")
    b = tiny.buffers
    state = [b.master, b.moment1, b.moment2, *([] if b.copy is None else [b.copy])]
    return [np.array(trace), *(here.host(array).copy() for array in state)]


def steady(device: str) -> dict[str, float]:
    """Requests to the driver in ten steady steps, captured and eager, their batches included; and
    the median time that the host spends on a captured step, from its batch to its launch."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    features = _features(device)
    requests, host_ms = 0, 0.0
    for each in (features, replace(features, capture=False)):
        step = paired.sized_step(here, each, WORK)
        for _ in range(WARM_UP):
            step.loss()
        before, times = here.memory().allocations, []
        for _ in range(STEADY):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
            step.loss()
        requests += here.memory().allocations - before
        if each.capture:
            host_ms = statistics.median(times) * 1e3
    return {"steady_step_allocations": float(requests), "host_ms_per_step": host_ms}


def speed(device: str) -> Mapping[str, float | NotMeasured]:
    """Time of v2's step with neither pool nor graph, over that with the pool and with both."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    features = _features(device)
    names = {"pool_speedup": "pool", "pool_and_capture_speedup": "both"}
    declined = paired.busy(here)
    if declined:
        return dict.fromkeys(names, declined)
    of = {
        "both": features,
        "pool": replace(features, capture=False),
        "neither": replace(features, capture=False, pool=False),
    }
    ways = {name: paired.Way(paired.sized_step(here, f, WORK), f) for name, f in of.items()}
    wanted = {name: ("neither", way) for name, way in names.items()}
    return paired.ratios(here, ways, wanted, rounds=5, steps=3)


def _features(device: str) -> Features:
    return paired.as_of("t11", "v2", device).features


def _the_learning_rate_is_a_new_array_each_step():
    sound = TrainingStep.load

    def load(self, batch, step, lr):
        self.optimizer.lr = self.optimizer.lr.copy()
        sound(self, batch, step, lr)

    return mock.patch.object(TrainingStep, "load", load)


def _the_norm_is_looked_at_inside_the_step():
    sound = AdamW.update

    def update(self):
        norm = sound(self)
        float(Tensor(norm))
        return norm

    return mock.patch.object(AdamW, "update", update)


@contextlib.contextmanager
def _the_learning_rate_is_a_host_value():
    """It goes into a kernel as an argument, so that replays have the one of the capture."""
    load, update = TrainingStep.load, AdamW.update

    def note(self, batch, step, lr):
        load(self, batch, step, lr)
        self.optimizer.host_lr = lr

    def update_with_it(self):
        self.lr[...] = np.float32(self.host_lr)
        return update(self)

    with (
        mock.patch.object(TrainingStep, "load", note),
        mock.patch.object(AdamW, "update", update_with_it),
    ):
        yield


@contextlib.contextmanager
def _an_eager_step_has_no_pool():
    device = type(devices.current())
    use_pool = device.use_pool
    with mock.patch.object(device, "use_pool", lambda self, pooled: use_pool(self, False)):
        yield


def _a_step_sleeps():
    sound = SizedStep.__call__

    def slow(self):
        time.sleep(0.003)
        return sound(self)

    return mock.patch.object(SizedStep, "__call__", slow)


def _switches_switch_nothing():
    """Every way is made and called as the first, whatever its features say."""
    plain = {"capture": False, "pool": False}
    sound = paired.configure
    return mock.patch.object(paired, "configure", lambda here, f: sound(here, replace(f, **plain)))


RULES = "capture_rules_broken"
GATE = Gate(
    "T11",
    "Pooled memory and capture",
    measures=(rules, replay, steady, speed),
    defects=(
        Defect("moved", RULES, rules, _the_learning_rate_is_a_new_array_each_step),
        Defect("host read", RULES, rules, _the_norm_is_looked_at_inside_the_step),
        Defect("host value", "replay_differing_values", replay, _the_learning_rate_is_a_host_value),
        Defect("no pool", "steady_step_allocations", steady, _an_eager_step_has_no_pool),
        Defect("slept step", "host_ms_per_step", steady, _a_step_sleeps),
        Defect("no switch", "pool_and_capture_speedup", speed, _switches_switch_nothing),
    ),
    composes=("run/v2", "model/v2", "phase/t11"),
)
