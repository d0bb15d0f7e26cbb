"""Ways to do a step are timed in turn; and what T7 calls a difference."""

import numpy as np

from gates.instruments import paired
from gates.judging.gate import NotMeasured
from xtrain.config.schema import Features
from xtrain.engine import device as devices


def test_a_run_as_of_a_phase_has_its_features_and_no_later_ones():
    features = paired.as_of("t7", "v0", "cuda").features
    assert (features.gemm, features.optimizer, features.op_sync) == ("library", "device", False)
    assert (features.batched, features.pool, features.capture) == (False, False, False)
    features = paired.as_of("t12", "v1", "cuda", "data=sotu").features
    assert (features.batched, features.pool, features.capture) == (True, True, True)
    assert (features.precision, features.attention) == ("bf16", "composed")


def test_ways_take_turns_back_and_forth_and_the_first_step_is_not_counted():
    here, called = devices.use("cpu"), []
    ways = {name: paired.Way(lambda name=name: called.append(name), Features()) for name in "ab"}
    times = paired.seconds(here, ways, rounds=2, steps=2)
    assert "".join(called) == "ab" + "aaabbb" + "bbbaaa"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_the_rounds():
    times = {"slow": [6.0, 8.0, 50.0], "fast": [2.0, 2.0, 1.0]}
    assert paired.ratio(times, "slow", "fast") == 4.0


def test_the_features_of_a_way_hold_for_its_turn():
    here, seen = devices.use("cpu"), {}
    ways = {
        gemm: paired.Way(lambda g=gemm: seen.update({g: dict(here.variants)}), Features(gemm=gemm))
        for gemm in ("tiled", "library")
    }
    paired.seconds(here, ways, rounds=1)
    assert seen == {"tiled": {"linear": "tiled", "matmul": "tiled"}, "library": {}}


def test_times_beside_other_processes_are_declined():
    class Shared(devices.Device):
        def other_processes(self):
            return 2

    declined = paired.busy(Shared())
    assert isinstance(declined, NotMeasured) and "2 other processes" in declined.reason


def test_a_difference_in_sign_of_zero_is_a_difference():
    from gates.t7_step_stays_on_the_device import _difference

    assert _difference(np.float32([0.0, 1.0]), np.float32([0.0, 1.0])) == 0
    assert _difference(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0])) > 0
    assert _difference(np.float32([0.0, 1.0]), np.float32([0.0, 1.5])) == 0.5
