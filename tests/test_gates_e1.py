"""The gate of the memory estimate: what a CPU can measure of it, and that its defects are seen."""

import pytest

from gates import e1_memory_is_as_estimated as e1
from gates.instruments import real_step
from gates.judging.find import find_gates
from gates.judging.gate import NotMeasured
from xtrain.config.bars import gate_checks


@pytest.fixture(scope="module")
def bars():
    return {check.name: check for check in gate_checks("e1")[0]}


def test_it_is_found_and_its_bars_stand_in_a_file_of_their_own(bars):
    assert find_gates()["e1"].load() is e1.GATE
    assert set(bars) == {"runs_estimated", "state_bytes_rel", "whole_run_rel", "worst_estimate_rel"}
    assert bars["worst_estimate_rel"].device == "cuda"
    assert gate_checks("E1")[1] == e1.GATE.title


def test_a_run_that_does_not_compose_is_counted_and_named(bars):
    with e1._a_run_does_not_compose():
        value = e1.runs("cpu")["runs_estimated"]
    assert value == bars["runs_estimated"].bar - 1
    assert value.why == "v3: model=v3a: there is no such model"


def test_without_a_gpu_no_peak_is_claimed():
    assert isinstance(e1.peaks("cpu")["worst_estimate_rel"], NotMeasured)


def test_runs_that_take_the_same_step_are_measured_once():
    chosen = e1.different_steps([real_step.on("cuda", e1.official(name)) for name in e1.MEASURED])
    left_out = set(e1.MEASURED) - {run.name for run in chosen}
    assert left_out == {"v6", "v7", "v10"}


def test_three_steps_take_the_micro_batches_of_the_run():
    run = real_step.on("cpu", e1.official("v0"))
    train = e1.replace(run.train, batch_size=2, seq_len=8, accumulation=2)
    run = e1.replace(run, train=train)
    learner = e1.build(run)
    step = real_step.three_steps(run, learner)
    assert step.batch["input_ids"].shape == (2, 2, 8)
    assert int(learner.optimizer.updates) == 3
