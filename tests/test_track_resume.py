"""Which run is gone on with, what is refused, and which runs are dead."""

import errno
import fcntl
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from xtrain.config.compose import compose, load_run, resolved_yaml
from xtrain.errors import UsageError
from xtrain.track.machine import process_mark
from xtrain.track.mirror import reap_stale
from xtrain.track.resume import (
    choose_run,
    continue_run,
    differing_keys,
    mark_killed,
    stale_runs,
    take_over,
)
from xtrain.track.run_dir import open_run, read_metrics, read_run

CONFIG = {"seed": 1, "out": "a", "optim": {"lr": 0.004, "betas": [0.9, 0.95]}}


def make_run(root, config, run="v0", phase="t6"):
    prints = {"config": "c0", "data": "d0"}
    return open_run(root, run, phase, config, config_text="", fingerprints=prints, facts={})


def choose(root, config=CONFIG, resume="auto", typed=False, data="d0"):
    return choose_run(
        root,
        "v0",
        "t6",
        config,
        resume=resume,
        typed=typed,
        fingerprints={"data": data},
        ignore=("out", "train.log_every_steps", "gate."),
    )


def ended(root, status, config=CONFIG, **where):
    run = make_run(root, config, **where)
    run.set_status(status)
    return run


def orphan(run):
    """Leave a run as a process that has died does: RUNNING, its lock let go of."""
    run.release()
    return run


@pytest.mark.parametrize("status", ["KILLED", "FAILED"])
def test_auto_goes_on_with_an_unfinished_run_of_the_same_config(tmp_path, status):
    run = ended(tmp_path, status)
    found, notice = choose(tmp_path, {**CONFIG, "out": "elsewhere"})
    assert found.path == run.path
    assert str(run.path) in notice and status in notice


def test_auto_goes_on_with_a_running_run_whose_process_is_gone(tmp_path):
    run = orphan(make_run(tmp_path, CONFIG))
    assert choose(tmp_path)[0].path == run.path


def test_auto_leaves_a_living_run_alone(tmp_path):
    make_run(tmp_path, CONFIG)
    assert choose(tmp_path) == (None, "")


def test_auto_takes_the_latest_run_of_its_own_config(tmp_path):
    ended(tmp_path, "KILLED")
    latest = ended(tmp_path, "KILLED")
    ended(tmp_path, "KILLED", {**CONFIG, "seed": 2})
    ended(tmp_path, "KILLED", run="v1")
    ended(tmp_path, "KILLED", phase="t5")
    assert choose(tmp_path)[0].path == latest.path


def test_auto_starts_a_new_run_after_a_finished_one(tmp_path):
    ended(tmp_path, "KILLED")
    ended(tmp_path, "FINISHED")
    assert choose(tmp_path) == (None, "")


def test_a_typed_auto_refuses_a_changed_config_and_names_the_keys(tmp_path):
    ended(tmp_path, "KILLED")
    changed = {**CONFIG, "optim": {"lr": 0.002, "betas": [0.9, 0.95]}}
    with pytest.raises(UsageError, match=r"optim\.lr was 0\.004, is 0\.002") as refused:
        choose(tmp_path, changed, typed=True)
    assert "out" not in str(refused.value).split("differs:")[1].split(";")[0]


def test_the_default_auto_starts_a_new_run_and_says_why(tmp_path):
    ended(tmp_path, "KILLED")
    found, notice = choose(tmp_path, {**CONFIG, "seed": 9})
    assert found is None
    assert "seed was 1, is 9" in notice and "\n" not in notice


def test_changed_data_is_refused_like_a_changed_key(tmp_path):
    ended(tmp_path, "KILLED")
    with pytest.raises(UsageError, match="data fingerprint was 'd0', is 'd1'"):
        choose(tmp_path, typed=True, data="d1")


def test_none_never_goes_on(tmp_path):
    ended(tmp_path, "KILLED")
    assert choose(tmp_path, resume="none", typed=True) == (None, "")


def test_a_path_names_the_run_or_a_checkpoint_in_it(tmp_path):
    run = ended(tmp_path, "KILLED")
    ended(tmp_path, "KILLED")
    for path in (run.path, run.path / "checkpoints" / "12"):
        assert choose(tmp_path, resume=str(path), typed=True)[0].path == run.path


def test_a_path_that_differs_is_refused(tmp_path):
    run = ended(tmp_path, "KILLED")
    with pytest.raises(UsageError, match="seed was 1, is 2"):
        choose(tmp_path, {**CONFIG, "seed": 2}, resume=str(run.path), typed=True)


def test_a_path_that_is_finished_or_running_or_no_run_is_refused(tmp_path):
    finished, running = ended(tmp_path, "FINISHED"), make_run(tmp_path, CONFIG)
    with pytest.raises(UsageError, match="FINISHED"):
        choose(tmp_path, resume=str(finished.path), typed=True)
    with pytest.raises(UsageError, match="RUNNING in process"):
        choose(tmp_path, resume=str(running.path), typed=True)
    with pytest.raises(UsageError, match="not a run directory"):
        choose(tmp_path, resume=str(tmp_path), typed=True)


def test_a_damaged_manifest_is_passed_over_by_auto_and_named_by_path(tmp_path):
    run = ended(tmp_path, "KILLED")
    (run.path / "manifest.json").write_text('{"id": "x", ')
    assert choose(tmp_path) == (None, "")
    with pytest.raises(UsageError, match=r"manifest\.json is damaged: not JSON"):
        choose(tmp_path, resume=str(run.path), typed=True)


@pytest.mark.parametrize("left", ["", '{"id": "x", ', None])
def test_auto_refuses_to_leave_behind_a_checkpoint_of_its_own_config(tmp_path, left):
    composed = load_run(compose(["run=v0"]))
    saved, text = asdict(composed), resolved_yaml(composed)
    run = open_run(tmp_path, "v0", "t6", saved, config_text=text, fingerprints={}, facts={})
    (run.path / "checkpoints" / "5").mkdir(parents=True)
    manifest = run.path / "manifest.json"
    manifest.unlink() if left is None else manifest.write_text(left)

    with pytest.raises(UsageError, match=r"manifest\.json.*has this config and a checkpoint"):
        choose(tmp_path, saved)
    assert choose(tmp_path, {**saved, "seed": 9}) == (None, "")
    assert choose(tmp_path, saved, resume="none") == (None, "")


def test_going_on_takes_the_run_over_and_redoes_no_record_twice(tmp_path):
    run = make_run(tmp_path, CONFIG)
    for step in range(1, 6):
        run.log(step, {"loss": 1 / step})
    run.set_status("KILLED")

    taken = continue_run(take_over(run), from_step=3, facts={"device": "cpu"})
    taken.log(4, {"loss": 0.25})

    assert [r["step"] for r in read_metrics(run.path / "metrics.jsonl")] == [1, 2, 3, 4]
    manifest = read_run(run.path).manifest
    assert manifest["status"] == "RUNNING" and manifest["ended"] is None
    assert [(r["from_step"], r["was"]) for r in manifest["resumes"]] == [(3, "KILLED")]


def leave_behind(run):
    """Half-written files, as a kill leaves them."""
    (run.path / ".export.writing-7").mkdir()
    (run.path / ".export.writing-7" / "model.safetensors").write_text("x")
    (run.path / "checkpoints" / ".writing-5-7").mkdir(parents=True)
    (run.path / ".manifest.json.abcd.tmp").write_text("{")


def left(run):
    owned = (".lock", ".spare")
    return [path.name for path in run.path.rglob(".*") if path.name not in owned]


def test_going_on_sweeps_what_the_dead_process_left_half_written(tmp_path):
    run = ended(tmp_path, "KILLED")
    leave_behind(run)
    continue_run(take_over(run), from_step=0, facts={})
    assert left(run) == []


def test_a_dead_run_that_is_marked_is_swept_and_a_living_one_is_not(tmp_path):
    living, dead = make_run(tmp_path, CONFIG), orphan(make_run(tmp_path, CONFIG))
    leave_behind(living)
    leave_behind(dead)
    reap_stale(tmp_path)
    assert left(dead) == [] and len(left(living)) == 3


def test_a_run_can_be_taken_over_only_once(tmp_path):
    run = ended(tmp_path, "KILLED")
    continue_run(take_over(run), from_step=0, facts={})
    with pytest.raises(UsageError, match="RUNNING in process"):
        take_over(read_run(run.path))


def test_only_runs_whose_process_is_gone_are_stale(tmp_path):
    make_run(tmp_path, CONFIG)
    make_run(tmp_path, CONFIG).update(host="another-machine", process="x")  # and it holds it
    ended(tmp_path, "FINISHED")
    dead = orphan(make_run(tmp_path, CONFIG))
    assert [run.path for run in stale_runs(tmp_path)] == [dead.path]


RENAMED = {"host": "pod-a", "process": "another-boot:7"}


def test_a_run_whose_host_had_another_name_is_gone_on_with(tmp_path):
    run = make_run(tmp_path, CONFIG)
    run.update(**RENAMED)
    orphan(run)
    assert [each.path for each in stale_runs(tmp_path)] == [run.path]
    assert choose(tmp_path)[0].path == run.path
    assert choose(tmp_path, resume=str(run.path), typed=True)[0].path == run.path


def test_a_living_run_is_alive_whatever_host_and_process_it_names(tmp_path):
    run = make_run(tmp_path, CONFIG)
    run.update(**RENAMED)
    assert stale_runs(tmp_path) == [] and choose(tmp_path) == (None, "")
    with pytest.raises(UsageError, match="RUNNING"):
        take_over(read_run(run.path))


def test_a_run_that_another_process_has_just_finished_is_not_taken_over(tmp_path):
    seen = ended(tmp_path, "KILLED")
    read_run(seen.path).set_status("FINISHED")
    with pytest.raises(UsageError, match="FINISHED"):
        take_over(seen)


def test_a_stale_run_that_another_process_has_just_taken_is_not_marked(tmp_path):
    run = orphan(make_run(tmp_path, CONFIG))
    (stale,) = stale_runs(tmp_path)
    continue_run(take_over(run), from_step=0, facts={})
    assert not mark_killed(stale)
    assert read_run(run.path).manifest["status"] == "RUNNING"


HOLDER = """
import sys
from pathlib import Path
from xtrain.track.ownership import acquire
acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_kernel_lets_go_of_a_killed_process_s_run(tmp_path):
    run = orphan(make_run(tmp_path, CONFIG))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        holder.stdout.readline()
        assert stale_runs(tmp_path) == []
        with pytest.raises(UsageError, match="RUNNING"):
            take_over(run)
        holder.kill()
    assert take_over(run).is_owned


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks, as some network file systems are."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_a_process_of_this_host_is_asked_for(tmp_path, no_locks):
    living = make_run(tmp_path, CONFIG)
    assert not living.is_owned and stale_runs(tmp_path) == []
    living.update(process="another-boot:7")
    assert [each.path for each in stale_runs(tmp_path)] == [living.path]
    assert choose(tmp_path)[0].path == living.path


def test_without_locks_a_run_of_another_host_is_said_to_be_out_of_sight(tmp_path, no_locks):
    run = make_run(tmp_path, CONFIG)
    run.update(**RENAMED)
    found, notice = choose(tmp_path)
    assert found is None and stale_runs(tmp_path) == []
    assert "no locks" in notice and f"on pod-a still has {run.path}" in notice
    found, notice = choose(tmp_path, resume=f"{notice.rpartition('resume=')[2]}", typed=True)
    assert take_over(found).path == run.path and "no locks" in notice


def test_a_dead_process_has_no_mark():
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_mark(child.pid) is None


def test_differing_keys_are_dotted_and_absent_ones_are_said_to_be():
    old = {"a": {"b": 1, "c": [1, 2]}, "gone": None, "gate": {"x": 1}}
    new = {"a": {"b": 1, "c": (1, 3)}, "gate": {"x": 2}}
    assert differing_keys(old, new, ignore=("gate",)) == {
        "a.c": ([1, 2], [1, 3]),
        "gone": (None, "(absent)"),
    }
