"""Every gate of a phase or of the project, on a CPU: it passes, and it fails on its seeded defects.

Generated from the gates that are found: a new gate file is tested by being there. Times are judged
by the gate alone; here they would depend on what else the machine does. The gates of runs are in
test_gates_of_runs.py.
"""

import pytest

from gates.judging.find import find_gates
from gates.judging.gate import NotMeasured
from gates.judging.judge import FAIL, PASS, judge
from xtrain.config.bars import gate_checks
from xtrain.engine.testing import worst

FILES = {name: file for name, file in find_gates().items() if not file.is_of_run}
GATES = {name: file.load() for name, file in FILES.items()}
CHECKS = {name: {c.name: c for c in gate_checks(name)[0]} for name in GATES}
# Measures without a defect of their own, of what only a GPU has: a CPU must be able to prove these
# gates, so test_gates_on_a_stand_in.py shows that they can fail.
UNPROVEN = {"t1": {"on_gpu"}, "t2": {"beyond"}}
TIMES = "speed"  # the name of the measures that take times
WHOLE = "whole"  # of the one that starts a whole run in a process of its own: twenty seconds


def marks(*measures) -> tuple:
    """A whole run is for `pytest -m slow`, and for the gate itself."""
    return (pytest.mark.slow,) if any(m.__name__ == WHOLE for m in measures) else ()


MEASURES = [
    pytest.param(name, measure, id=f"{name}-{measure.__name__}", marks=marks(measure))
    for name, gate in GATES.items()
    for measure in gate.measures
    if measure.__name__ != TIMES
]
DEFECTS = [
    pytest.param(
        name, defect, id=f"{name}-{defect.name} {defect.rejects}", marks=marks(defect.measure)
    )
    for name, gate in GATES.items()
    for defect in gate.defects
    if CHECKS[name][defect.rejects].applies_to("cpu") and defect.measure.__name__ != TIMES
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


def needs_transformers(value) -> bool:
    return isinstance(value, NotMeasured) and "transformers" in value.reason


@pytest.mark.parametrize(("name", "measure"), MEASURES)
def test_what_a_gate_measures_meets_the_bars(name, measure):
    of_cpu = {
        each: value
        for each, value in measured_by(measure).items()
        if CHECKS[name][each].applies_to("cpu") and not needs_transformers(value)
    }
    found = verdicts(name, of_cpu)
    assert {each: verdict for each, verdict in found.items() if verdict[0] != PASS} == {}


@pytest.mark.parametrize(("name", "defect"), DEFECTS)
def test_a_seeded_defect_misses_the_bar(name, defect):
    sound = measured_by(defect.measure)[defect.rejects]
    if needs_transformers(sound):
        pytest.skip(sound.reason)
    with defect.patch():
        measured = defect.measure("cpu")
    assert verdicts(name, {defect.rejects: measured[defect.rejects]})[defect.rejects][0] == FAIL
    assert verdicts(name, {defect.rejects: sound})[defect.rejects][0] == PASS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(*gate.measures)) for name, gate in GATES.items()]
)
def test_every_check_of_a_cpu_is_measured_and_none_of_a_gpu(name):
    gate, checks = GATES[name], CHECKS[name]
    measured, timed = {}, set()
    for measure in gate.measures:
        if measure.__name__ == TIMES:
            timed |= {d.rejects for d in gate.defects if d.measure is measure}
        else:
            measured |= measured_by(measure)
    claimed = {each for each, value in measured.items() if not isinstance(value, NotMeasured)}
    of_cpu = {each for each, check in checks.items() if check.applies_to("cpu")}
    assert set(measured) | timed >= of_cpu
    assert claimed <= of_cpu


@pytest.mark.parametrize("name", GATES)
def test_every_measurement_has_a_defect_that_it_rejects(name):
    proven = {defect.measure for defect in GATES[name].defects}
    lacking = {m.__name__ for m in GATES[name].measures if m not in proven}
    assert lacking == UNPROVEN.get(name, set())


@pytest.mark.parametrize("name", ["t7", "t10", "t11", "t12"])
def test_a_gate_of_the_gpu_s_phases_has_defects_for_a_cpu_and_for_a_gpu(name):
    assert {CHECKS[name][d.rejects].device for d in GATES[name].defects} == {"any", "cuda"}


@pytest.mark.parametrize("name", GATES)
def test_the_docstring_says_what_why_from_what_and_on_what(name):
    text = FILES[name].path.read_text()
    headings = [line.split()[0] for line in text.splitlines()[2:20] if line[:1].isupper()]
    assert headings[:4] == ["Claim", "Why", "Reads", "Needs"]
    assert text.startswith(f'"""{name.upper()}: ')


def test_a_value_that_is_no_number_is_the_worst_wherever_it_stands():
    nan = float("nan")
    for found in ([nan, 1.0], [1.0, nan], [1.0, nan, 2.0]):
        assert worst(found) != worst(found) and worst(*found) != worst(*found)
    assert worst([1.0, 3.0, 2.0]) == 3.0 and worst(each for each in (0.0, 0.0)) == 0.0
