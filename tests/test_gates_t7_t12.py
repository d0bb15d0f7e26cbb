"""The gates of the GPU's phases: what a CPU can show of them, and that it shows nothing else."""

import numpy as np
import pytest

from gates import paired
from gates.find import find_gates
from gates.gate import NotMeasured
from gates.judge import FAIL, PASS, judge
from xtrain.config import Features, gate_checks
from xtrain.engine import device as devices

PHASES = ["t7", "t10", "t11", "t12"]
FILES = {name: find_gates()[name] for name in PHASES}
GATES = {name: file.load() for name, file in FILES.items()}
CHECKS = {name: {c.name: c for c in gate_checks(name)[0]} for name in GATES}
MEASURES = [
    pytest.param(name, measure, id=f"{name}-{measure.__name__}")
    for name, gate in GATES.items()
    for measure in gate.measures
]
PROVABLE = [
    pytest.param(name, defect, id=f"{name}-{defect.name}")
    for name, gate in GATES.items()
    for defect in gate.defects
    if CHECKS[name][defect.rejects].applies_to("cpu")
]
MEASURED = {}  # by measure: each runs once for all tests of this file


def measured_by(measure):
    if measure not in MEASURED:
        MEASURED[measure] = measure("cpu")
    return MEASURED[measure]


def verdicts(name, measured):
    """The verdict and the reason by check, of the measured values."""
    checks = [CHECKS[name][each] for each in measured]
    return {r.check.name: (r.verdict, r.reason) for r in judge(checks, measured, "cpu")}


@pytest.mark.parametrize(("name", "measure"), MEASURES)
def test_what_a_gate_measures_on_a_cpu_meets_the_bars(name, measure):
    found = verdicts(name, measured_by(measure))
    assert {each: verdict for each, verdict in found.items() if verdict[0] != PASS} == {}


@pytest.mark.parametrize("name", GATES)
def test_on_a_cpu_every_check_of_a_cpu_is_measured_and_no_other(name):
    measured = set().union(*(measured_by(measure) for measure in GATES[name].measures))
    assert measured == {check.name for check in CHECKS[name].values() if check.applies_to("cpu")}


@pytest.mark.parametrize(("name", "defect"), PROVABLE)
def test_a_seeded_defect_misses_the_bar(name, defect):
    with defect.patch():
        measured = defect.measure("cpu")
    found = verdicts(name, {defect.rejects: measured[defect.rejects]})
    assert found[defect.rejects][0] == FAIL


@pytest.mark.parametrize("name", GATES)
def test_every_gate_has_a_defect_that_a_cpu_proves_and_one_for_each_gpu_measure(name):
    gate, checks = GATES[name], CHECKS[name]
    rejects = {checks[defect.rejects].device for defect in gate.defects}
    assert rejects == {"any", "cuda"}
    assert {defect.measure for defect in gate.defects} == set(gate.measures)


@pytest.mark.parametrize("name", GATES)
def test_the_docstring_says_what_why_from_what_and_on_what(name):
    text = FILES[name].path.read_text()
    headings = [line.split()[0] for line in text.splitlines()[2:20] if line[:1].isupper()]
    assert headings[:4] == ["Claim", "Why", "Reads", "Needs"]
    assert text.startswith(f'"""{name.upper()}: ')


def test_a_run_as_of_a_phase_has_its_features_and_no_later_ones():
    features = paired.as_of("t7", "v0", "cuda").features
    assert (features.gemm, features.optimizer, features.op_sync) == ("library", "device", False)
    assert (features.batched, features.pool, features.capture) == (False, False, False)
    features = paired.as_of("t12", "v1", "cuda", "data=sotu").features
    assert (features.batched, features.pool, features.capture) == (True, True, True)
    assert (features.precision, features.attention) == ("bf16", "composed")


def test_ways_take_turns_back_and_forth_and_the_first_round_is_not_counted():
    here, called = devices.use("cpu"), []
    ways = {name: paired.Way(lambda name=name: called.append(name), Features()) for name in "ab"}
    times = paired.seconds(here, ways, rounds=2, steps=2)
    assert "".join(called) == "bbbaaa" + "aaabbb" + "bbbaaa"
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
