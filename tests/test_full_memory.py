"""A GPU that is full: one line that says what would fit, exit code 1, the checkpoint kept."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.__main__ import main
from pipelines.run import resolve, saying_what_would_fit
from xtrain.assemble import learner
from xtrain.command.ending import guarded
from xtrain.config.compose import compose, load_run
from xtrain.engine import device
from xtrain.errors import OutOfDeviceMemory, UsageError
from xtrain.track.machine import device_facts
from xtrain.track.run_dir import all_runs
from xtrain.train.objectives.next_token import next_token

CONF = str(Path(__file__).parent / "conf")
ASKED = "GPU memory is full: 2.00 GiB more needed, 0.10 of 1 GiB free"


def full() -> OutOfDeviceMemory:
    return OutOfDeviceMemory(f"{ASKED}; halve train.batch_size", 1 << 30)


def test_a_full_memory_is_one_line_and_no_usage_error(capsys):
    def fails():
        raise full()

    assert guarded("xtrain", fails) == 1
    assert capsys.readouterr().err == f"xtrain: {ASKED}; halve train.batch_size\n"


def test_what_would_fit_is_said_for_the_run_that_found_it_full():
    run = replace(load_run(compose(["run=v0"])), device="cuda")
    with pytest.raises(OutOfDeviceMemory) as raised, saying_what_would_fit(run):
        raise full()
    asked, fits, kept = str(raised.value).split("; ")
    assert asked == ASKED
    assert fits.startswith("what would fit: train.batch_size=4 train.accumulation=2 (")
    assert kept == "there is no checkpoint yet"


def test_other_errors_pass_as_they_are():
    run = resolve(load_run(compose(["run=v0", "device=cpu"])))
    with pytest.raises(UsageError, match="^typo$"), saying_what_would_fit(run):
        raise UsageError("typo")


def test_a_run_whose_memory_was_full_is_failed_and_goes_on_later(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "text.txt").write_text("The people of the county sent letters.\n" * 400)
    command = ["--config-dir", CONF, "run=tiny", "data.path=text.txt", "device=cpu"]
    calls = []

    def is_full_at_the_eighth_step(*arguments):
        calls.append(arguments)
        if len(calls) == 8:
            raise full()
        return next_token(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(learner, "next_token", is_full_at_the_eighth_step)
        assert main(command) == 1
    (failed,) = all_runs(tmp_path / "outputs", "tiny", "pretrain")
    assert failed.manifest["status"] == "FAILED"
    kept = failed.path / "checkpoints" / "5"
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"xtrain: {ASKED}; what would fit: train.batch_size=2 ")
    assert last.endswith(f"; checkpoint {kept} is kept")
    assert main(command) == 0
    assert f"resuming from checkpoint {kept}" in capsys.readouterr().err


def test_memory_of_a_cpu_is_that_of_the_process_and_its_peak_stays():
    here = device.use("cpu")
    before = here.memory()
    held = np.ones(1 << 25)
    during = here.memory()
    del held
    assert before.reserved_bytes > 1 << 20
    assert during.reserved_bytes - before.reserved_bytes > 1 << 27
    after = here.memory()  # Linux counts pages in batches, so no figure is exact
    assert during.reserved_bytes - after.reserved_bytes > 1 << 27
    assert after.peak_bytes - after.reserved_bytes > 1 << 27


def test_the_peak_of_an_action_on_a_cpu_is_what_it_held_at_its_fullest():
    def twice():
        np.ones(1 << 20)
        np.ones(1 << 21)

    found = device.use("cpu").peak_of(twice)
    assert 8 << 21 <= found < (8 << 21) + (1 << 16)


def test_facts_of_a_gpu_are_asked_for_only_there():
    assert "gpu" not in device_facts("cpu")
    found = device_facts("cuda")["gpu"]
    assert "versions" in found and ("device" in found or "problem" in found)
