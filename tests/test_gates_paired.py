"""Ways to do a step are timed in turn; and what T7 calls a difference."""

import os

import numpy as np
import pytest

from gates.instruments import paired
from gates.judging.find import find_gates
from gates.judging.gate import NotMeasured
from xtrain.config.bars import gate_checks
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


@pytest.mark.parametrize(("others", "declined"), [(0.0, False), (30.0, True)])
def test_a_ratio_on_a_cpu_is_declined_when_others_took_its_cores(tmp_path, others, declined):
    here, stat = devices.use("cpu"), tmp_path / "stat"
    core = min(os.sched_getaffinity(0))

    def spend(seconds):
        """What the kernel counts by now: ten minutes, this process and the others."""
        own = sum(os.times()[:4])
        ticks = int((600 + own + seconds) * os.sysconf("SC_CLK_TCK"))
        stat.write_text(f"cpu 1 2 3 4\ncpu{core} {ticks} 0 0 999999 77777 0 0 0 0 0\nintr 5\n")

    spend(0.0)
    ways = {name: paired.Way(lambda: spend(others), Features()) for name in "ab"}
    found = paired.ratios(here, ways, {"slowdown": ("a", "b")}, rounds=3, stat=stat)["slowdown"]
    assert isinstance(found, NotMeasured) == declined
    assert not declined or "other processes used" in found.reason


def test_no_other_core_and_no_idle_time_counts_as_use_by_others(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu99999 8000 0 0 1 1 0 0 0 0 0\n")
    assert paired.others_seconds(stat) == pytest.approx(-sum(os.times()[:4]), abs=0.1)
    assert paired.others_seconds(tmp_path / "none") is None


def test_a_timing_is_judged_only_on_the_device_that_its_bar_is_for():
    """Every check of a ratio of times stands in a file with the device class it was set on."""
    timed = ("slowdown", "speedup", "ms_per_step", "tok_s")
    checks = [check for file in find_gates() for check in gate_checks(file)[0]]
    found = {check.name: check.device for check in checks if any(t in check.name for t in timed)}
    assert len(found) >= 11 and set(found.values()) == {"cuda"}, found


def test_a_difference_in_sign_of_zero_is_a_difference():
    from gates.t7_step_stays_on_the_device import _difference

    assert _difference(np.float32([0.0, 1.0]), np.float32([0.0, 1.0])) == 0
    assert _difference(np.float32([0.0, 1.0]), np.float32([-0.0, 1.0])) > 0
    assert _difference(np.float32([0.0, 1.0]), np.float32([0.0, 1.5])) == 0.5
