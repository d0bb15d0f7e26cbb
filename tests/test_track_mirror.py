"""MLflow holds what the run directory holds, and whatever its database does, training goes on."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

import xtrain
from xtrain.track.mirror import Mirror, catch_up, read_note, reap_stale
from xtrain.track.mlflow_store import open_store, store_uri
from xtrain.track.resume import continue_run
from xtrain.track.run_dir import load_run, open_run

# Children run in another directory, where a relative path to the package would not be found.
CHILD_ENV = {**os.environ, "PYTHONPATH": str(Path(xtrain.__file__).resolve().parents[1])}


def make_run(root):
    return open_run(
        root / "outputs",
        "v0",
        "t6",
        {"seed": 1, "optim": {"lr": 0.004}},
        config_text="",
        fingerprints={"data": "d0"},
        facts={"cores": 2},
    )


def log_steps(run, steps):
    for step in steps:
        run.log(step, {"loss": 1 / step, "tokens": step * 512})


def logged_steps(run_id, key="train/loss"):
    return [metric.step for metric in open_store(store_uri()).get_metric_history(run_id, key)]


def finish(run, status="FINISHED"):
    mirror = Mirror(run, interval_s=0.05).start()
    assert mirror.close(status) == ""
    run.set_status(status)
    return mirror.run_id


def test_everything_of_a_run_is_in_mlflow_when_it_closes(here):
    run = make_run(here)
    mirror = Mirror(run, tags={"note": "first"}, interval_s=0.05).start()
    log_steps(run, range(1, 801))
    run.log(800, {"loss": 0.5}, kind="eval")
    (here / "samples.txt").write_text("Once upon")
    mirror.artifact(here / "samples.txt")
    mirror.tag("verdict", "PASS")

    assert mirror.close("FINISHED") == ""

    client = open_store(store_uri())
    held = client.get_run(mirror.run_id)
    assert held.info.status == "FINISHED" and held.info.end_time
    assert held.data.params == {"seed": "1", "optim.lr": "0.004"}
    tags = held.data.tags
    assert (tags["note"], tags["verdict"], tags["system.cores"]) == ("first", "PASS", "2")
    assert tags["fingerprint.data"] == "d0" and tags["xtrain.id"] == run.id
    assert logged_steps(mirror.run_id) == list(range(1, 801))
    history = client.get_metric_history(mirror.run_id, "train/loss")
    assert [metric.value for metric in history] == [1 / step for step in range(1, 801)]
    assert held.data.metrics["eval/loss"] == 0.5
    assert [each.path for each in client.list_artifacts(mirror.run_id)] == ["samples.txt"]
    assert (here / "mlruns" / "xtrain-v0" / mirror.run_id / "artifacts" / "samples.txt").is_file()


def test_values_that_are_not_finite_are_left_out_and_said(here):
    run = make_run(here)
    run.log(1, {"loss": float("nan"), "lr": 0.1})
    run.log(2, {"loss": float("inf"), "lr": 0.2})

    mirror = Mirror(run, interval_s=0.05).start()
    notice = mirror.close("FINISHED")

    assert notice.startswith("2 values that are not finite")
    assert logged_steps(mirror.run_id) == []
    assert logged_steps(mirror.run_id, "train/lr") == [1, 2]


def test_a_resumed_run_goes_on_in_mlflow_and_doubles_nothing(here):
    run = make_run(here)
    log_steps(run, range(1, 6))
    first = finish(run, "KILLED")

    taken = continue_run(run, from_step=3, facts={})
    log_steps(taken, range(4, 9))
    second = finish(taken)

    assert second == first
    assert logged_steps(first) == list(range(1, 9))
    assert open_store(store_uri()).get_run(first).info.status == "FINISHED"


def test_another_store_gets_a_whole_copy_of_a_resumed_run(here, empty_store, monkeypatch):
    run = make_run(here)
    log_steps(run, range(1, 4))
    first = finish(run, "KILLED")
    shutil.copy(empty_store, here / "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here / 'other.db'}")

    taken = continue_run(run, from_step=3, facts={})
    log_steps(taken, range(4, 6))
    second = finish(taken)

    assert second != first
    assert logged_steps(second) == [1, 2, 3, 4, 5]


def test_training_goes_on_while_the_database_is_locked_and_the_mirror_catches_up(here):
    run = make_run(here)
    warned = threading.Event()
    lines = []

    def say(line):
        lines.append(line)
        warned.set()

    with closing(sqlite3.connect(here / "mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        mirror = Mirror(run, say=say, interval_s=0.05).start()
        log_steps(run, range(1, 11))
        assert warned.wait(60)
        other.execute("ROLLBACK")
    log_steps(run, range(11, 21))

    assert mirror.close("FINISHED") == ""
    assert logged_steps(mirror.run_id) == list(range(1, 21))
    assert len(lines) == 1 and "locked" in lines[0] and "training goes on" in lines[0]


def test_a_mirror_that_stays_behind_says_so_and_is_completed_later(here):
    run = make_run(here)
    (here / "samples.txt").write_text("Once upon")
    with closing(sqlite3.connect(here / "mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        mirror = Mirror(run, say=lambda line: None, interval_s=0.05).start()
        log_steps(run, range(1, 8))
        mirror.artifact(here / "samples.txt")
        mirror.tag("verdict", "PASS")
        run.set_status("FINISHED")
        notice = mirror.close("FINISHED", timeout_s=0.1)
        mirror._thread.join()
        other.execute("ROLLBACK")

    assert notice.startswith("MLflow is 7 lines behind")
    assert catch_up(here / "outputs") == [run.path]
    run_id = read_note(run.path)["run_id"]
    client = open_store(store_uri())
    assert logged_steps(run_id) == list(range(1, 8))
    assert client.get_run(run_id).info.status == "FINISHED"
    assert client.get_run(run_id).data.tags["verdict"] == "PASS"
    assert [each.path for each in client.list_artifacts(run_id)] == ["samples.txt"]
    assert catch_up(here / "outputs") == []


@pytest.mark.parametrize("kind", ["unreachable server", "not a database"])
def test_a_useless_store_stops_nothing(here, monkeypatch, kind):
    if kind == "unreachable server":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    else:
        (here / "mlflow.db").write_text("this is not a database " * 100)
    run = make_run(here)
    warned = threading.Event()

    mirror = Mirror(run, say=lambda line: warned.set(), interval_s=0.05).start()
    log_steps(run, range(1, 4))

    assert warned.wait(60)
    assert "3 lines behind" in mirror.close("FINISHED", timeout_s=0.1)


KILLED_CHILD = """
import sys, time
from xtrain.track.mirror import Mirror
from xtrain.track.run_dir import open_run
run = open_run("outputs", "v0", "t6", {"seed": 1}, config_text="", fingerprints={}, facts={})
mirror = Mirror(run, interval_s=0.05).start()
for step in range(1, 31):
    run.log(step, {"loss": 1 / step})
assert mirror.flush()
run.log(31, {"loss": 1 / 31})
print(run.path, mirror.run_id, flush=True)
sys.stdin.read()
"""


def test_a_run_killed_by_sigkill_is_reaped_here_and_in_mlflow(here):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_CHILD],
        env=CHILD_ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        path, run_id = child.stdout.readline().split()
        assert reap_stale(here / "outputs") == []
        child.send_signal(signal.SIGKILL)
    client = open_store(store_uri())
    assert client.get_run(run_id).info.status == "RUNNING"

    assert [str(each) for each in reap_stale(here / "outputs")] == [path]

    assert load_run(path).manifest["status"] == "KILLED"
    assert client.get_run(run_id).info.status == "KILLED"
    assert logged_steps(run_id) == list(range(1, 32))
    assert reap_stale(here / "outputs") == []


FIRST_USE = """
import os
from xtrain.track.mlflow_store import import_mlflow, open_store, store_uri
from xtrain.track.mirror import Mirror
from xtrain.track.run_dir import open_run
import_mlflow()
waiting, start = os.pipe()
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        run = open_run("outputs", "v0", "t6", {}, config_text="", fingerprints={}, facts={})
        os.close(start)
        os.read(waiting, 1)  # returns for all at once, when the parent closes its end
        open_store(store_uri())
        mirror = Mirror(run).start()
        run.log(1, {"loss": 1.0})
        os._exit(0 if mirror.close("FINISHED", timeout_s=60) == "" else 1)
    children.append(pid)
os.close(start)
print([os.waitpid(pid, 0)[1] for pid in children])
"""


def test_four_processes_may_create_one_database_at_once(here):
    (here / "mlflow.db").unlink()

    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], env=CHILD_ENV, stdout=subprocess.PIPE, text=True
    )

    assert done.stdout == "[0, 0, 0, 0]\n"
    client = open_store(store_uri())
    experiment = client.get_experiment_by_name("xtrain-v0")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4
