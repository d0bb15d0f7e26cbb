"""The gate of every run: what is known before training holds, and its defects are rejected."""

import pytest

from gates.judging.find import find_gates
from gates.judging.gate import Explained
from gates.judging.judge import FAIL, NOT_MEASURED, PASS, judge
from gates.judging.undeclared import undeclared_axes
from gates.trained_run import gate_of
from xtrain.config.bars import gate_checks, official
from xtrain.config.compose import compose, load_run
from xtrain.config.files import choices


@pytest.mark.parametrize("name", choices("run"))
def test_every_run_has_a_gate_whose_file_holds_and_whose_defects_are_rejected(name, tmp_path):
    gate = find_gates()[name].load()
    checks = {check.name: check for check in gate_checks(name)[0]}
    (of_config,) = gate.measures
    (of_run,) = gate.run_measures
    measured = {**of_config("cpu"), **of_run("cpu", tmp_path)}
    found = {r.check.name: r.verdict for r in judge(list(checks.values()), measured, "cpu")}
    known = {"params_core", "params_total", "undeclared_axes"}
    assert {each for each, verdict in found.items() if verdict == PASS} == known
    assert {found[each] for each in found.keys() - known} == {NOT_MEASURED}
    assert gate.defects
    for defect in gate.defects:
        with defect.patch():
            spoilt = judge([checks[defect.rejects]], defect.measure("cpu"), "cpu")
        assert [result.verdict for result in spoilt] == [FAIL]


def test_changing_an_undeclared_axis_of_v8_fails_its_gate_with_the_key_named():
    checks = [c for c in gate_checks("v8")[0] if c.name == "undeclared_axes"]
    for override, said in (
        ("optim.eps=1e-6", "differs from v6 in precision (optim.eps)"),
        ("data=sotu", "data.source"),
        ("train.accumulation=2", "infra (tokens_per_step)"),
    ):
        run = load_run(compose(["run=v8", override]))
        (result,) = judge(checks, {"undeclared_axes": undeclared_axes(run)}, "cpu")
        assert result.verdict == FAIL and said in result.reason


def test_a_declared_axis_a_seed_and_a_device_are_free_to_differ():
    for override in ("model.num_hidden_layers=3", "seed=5", "device=cuda", "features.remat=none"):
        assert undeclared_axes(load_run(compose(["run=v8", override]))) == 0


def test_a_device_that_cannot_do_what_the_parent_does_is_a_difference():
    run = load_run(compose(["run=v8", "device=cpu", "features.precision=fp32"]))
    value = undeclared_axes(run)
    assert isinstance(value, Explained) and "features.precision" in value.why


def test_a_run_without_a_parent_differs_from_nothing():
    assert undeclared_axes(official("v0")) == 0


def test_a_parent_without_a_file_is_not_measured():
    run = load_run(compose(["run=v8"]))
    stray = type(run)(**{**vars(run), "parent": "v99"})
    assert "v99" in undeclared_axes(stray).reason


def test_the_gate_of_a_run_names_its_parent_among_what_it_composes():
    assert gate_of("v8").composes == ("run/v8", "run/v6")
