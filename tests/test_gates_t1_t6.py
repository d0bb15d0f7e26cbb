"""The gates of the engine's phases pass on a CPU, and each check fails on its seeded defect."""

import pytest

from gates.find import find_gates
from gates.judge import FAIL, PASS, judge
from xtrain.config import gate_checks

PHASES = ["t1", "t2", "t3", "t4", "t5", "t6"]
FILES = {name: find_gates()[name] for name in PHASES}
GATES = {name: file.load() for name, file in FILES.items()}
CHECKS = {name: {c.name: c for c in gate_checks(name)[0]} for name in GATES}
MEASURES = [
    pytest.param(name, measure, id=f"{name}-{measure.__name__}")
    for name, gate in GATES.items()
    for measure in gate.measures
]
DEFECTS = [
    pytest.param(name, defect, id=f"{name}-{defect.name}")
    for name, gate in GATES.items()
    for defect in gate.defects
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
def test_what_a_gate_measures_meets_the_bars(name, measure):
    found = verdicts(name, measured_by(measure))
    assert {each: verdict for each, verdict in found.items() if verdict[0] != PASS} == {}


@pytest.mark.parametrize(("name", "defect"), DEFECTS)
def test_a_seeded_defect_misses_the_bar(name, defect):
    with defect.patch():
        measured = defect.measure("cpu")
    found = verdicts(name, {defect.rejects: measured[defect.rejects]})
    assert found[defect.rejects][0] == FAIL


@pytest.mark.parametrize("name", GATES)
def test_every_check_of_a_cpu_is_measured(name):
    measured = set().union(*(measured_by(measure) for measure in GATES[name].measures))
    assert measured == {check.name for check in CHECKS[name].values() if check.applies_to("cpu")}


@pytest.mark.parametrize("name", GATES)
def test_the_docstring_says_what_why_from_what_and_on_what(name):
    text = FILES[name].path.read_text()
    headings = [line.split()[0] for line in text.splitlines()[2:20] if line[:1].isupper()]
    assert headings[:4] == ["Claim", "Why", "Reads", "Needs"]
    assert text.startswith(f'"""{name.upper()}: ')
