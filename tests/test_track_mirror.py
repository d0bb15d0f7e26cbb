"""MLflow holds what the run directory holds, and whatever its database does, training goes on."""

import http.server
import json
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
from xtrain.track.mirror import Mirror, catch_up, reap_stale
from xtrain.track.mlflow_copy import read_note
from xtrain.track.mlflow_store import open_store
from xtrain.track.registry import Grant, register_owed
from xtrain.track.resume import continue_run
from xtrain.track.run_dir import open_run, read_run
from xtrain.track.store_address import store_uri

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
    (run.path / "samples.txt").write_text("Once upon")
    mirror.artifact(run.path / "samples.txt")
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
    (run.path / "samples.txt").write_text("Once upon")
    with closing(sqlite3.connect(here / "mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        mirror = Mirror(run, say=lambda line: None, interval_s=0.05).start()
        log_steps(run, range(1, 8))
        mirror.artifact(run.path / "samples.txt")
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


def foreign_run(here, note, export="export"):
    """A run directory that somebody else made, with what its mirror.json says is owed."""
    run = make_run(here)
    run.set_status("FINISHED")
    run.write_json("mirror.json", note)
    return run


def test_a_foreign_run_directory_sends_nothing_but_its_own_files(here, monkeypatch):
    (here / "secret").write_text("s3cret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here / 'mlflow.db'}")
    note = {"run_id": None, "store": store_uri(), "status": "BEHIND", "tags": {}}
    artifacts = [str(here / "secret"), "../../../../secret", "link", "folder", "own.txt"]
    owed = [{"path": each, "folder": "x", "is_sent": False} for each in artifacts]
    run = foreign_run(here, {**note, "artifacts": owed})
    (run.path / "link").symlink_to(here / "secret")
    (run.path / "folder").mkdir()
    (run.path / "folder" / "inner").symlink_to(here / "secret")
    (run.path / "own.txt").write_text("mine")
    said = []

    assert catch_up(here / "outputs", said.append) == [run.path]

    run_id = read_note(run.path)["run_id"]
    found = open_store(store_uri()).list_artifacts(run_id, "x")
    assert [each.path for each in found] == ["x/own.txt"]
    assert sum("leads out of the run directory" in line for line in said) == 4
    held = [path for path in (here / "mlruns").rglob("*") if path.is_file()]
    assert not any("s3cret" in path.read_text() for path in held)


class Listener(http.server.BaseHTTPRequestHandler):
    """A server of somebody else's: whatever asks it for anything is noted."""

    def _note(self):
        self.server.asked.append(self.path)
        self.send_error(404)

    do_GET = do_POST = do_PUT = _note

    def log_message(self, *arguments):
        pass


@pytest.fixture
def foreign_server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_foreign_run_directory_names_no_server_to_talk_to(here, foreign_server):
    uri = f"http://127.0.0.1:{foreign_server.server_port}"
    note = {"run_id": None, "store": uri, "status": "BEHIND", "tags": {}, "artifacts": []}
    run = foreign_run(here, note)
    run.write_json("registry.json", {"name": "xtrain-v0", "tags": {"a": "b"}, "version": None})
    stale = make_run(here)
    stale.write_json("mirror.json", {**note, "status": "RUNNING"})
    stale.release()

    assert reap_stale(here / "outputs") == [stale.path]
    assert catch_up(here / "outputs") == []
    granted = Grant({"a": "b"}, is_newest=True)
    assert register_owed(here / "outputs", lambda run: granted) == []

    assert foreign_server.asked == []


def test_a_foreign_note_cannot_name_another_runs_copy(here):
    victim = make_run(here)
    log_steps(victim, range(1, 4))
    run_id = finish(victim)
    note = {"run_id": run_id, "store": store_uri(), "status": "BEHIND", "tags": {"x": "y"}}
    foreign = foreign_run(here, {**note, "artifacts": []})
    log_steps(foreign, range(4, 9))

    assert catch_up(here / "outputs") == [foreign.path]

    assert logged_steps(run_id) == [1, 2, 3]
    assert read_note(foreign.path)["run_id"] != run_id


@pytest.mark.parametrize(
    "uri",
    [
        "http://ada:pa55word@127.0.0.1:9/mlflow?token=t0ken",
        "https://:pa55word@127.0.0.1:9",
    ],
)
def test_credentials_of_the_store_are_written_nowhere_and_said_nowhere(here, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = make_run(here)
    said = []
    mirror = Mirror(run, say=said.append, interval_s=0.05).start()
    mirror.flush(0.5)
    run.set_status("FINISHED")
    said.append(mirror.close("FINISHED", timeout_s=0.1))
    mirror._thread.join()
    catch_up(here / "outputs", said.append)

    assert read_note(run.path)["store"].startswith(uri[:7])
    written = [path.read_text() for path in run.path.rglob("*") if path.is_file()]
    assert len(written) > 2 and len(said) > 1
    for text in [*written, *said]:
        assert "pa55word" not in text and "t0ken" not in text and "ada:" not in text


class Tracker(http.server.BaseHTTPRequestHandler):
    """A tracking server that takes whatever it is told; what is told is kept."""

    def _answer(self):
        size = int(self.headers.get("Content-Length", 0))
        self.server.told.append(self.path.partition("?")[2] + self.rfile.read(size).decode())
        info = {"run_id": "7" * 32, "run_uuid": "7" * 32, "experiment_id": "1"}
        info |= {"status": "RUNNING", "lifecycle_stage": "active", "artifact_uri": "mlruns"}
        experiment = {"experiment_id": "1", "name": "xtrain-v0", "lifecycle_stage": "active"}
        answer = {"experiment": experiment, "experiment_id": "1", "runs": []}
        content = json.dumps(answer | {"run": {"info": info, "data": {}}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = _answer

    def log_message(self, *arguments):
        pass


def test_credentials_of_the_store_are_not_told_to_mlflow_as_data(here, monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Tracker) as server:
        server.told = []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        uri = f"http://ada:pa55word@127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        run = make_run(here)
        log_steps(run, range(1, 4))
        mirror = Mirror(run, interval_s=0.05).start()
        mirror.tag("xtrain.eval_set", "sotu_v1")
        mirror.flush()
        run.set_status("FINISHED")
        said = mirror.close("FINISHED")
        server.shutdown()
        thread.join()
    told = "\n".join(server.told)
    assert said == "" and "xtrain.directory" in told and "sotu_v1" in told and "loss" in told
    assert "pa55word" not in told and "ada:" not in told


@pytest.mark.parametrize("content", ["[1]", "", '{"run_id": 7}', "null", '{"artifacts": [["/x"]]}'])
def test_a_damaged_note_is_said_and_made_anew_and_nothing_is_doubled(here, content):
    run = make_run(here)
    log_steps(run, range(1, 4))
    run_id = finish(run)
    (run.path / "mirror.json").write_text(content)
    said = []

    assert catch_up(here / "outputs", said.append) == [run.path]

    assert len(said) == 1 and "mirror.json is damaged" in said[0]
    assert read_note(run.path)["run_id"] == run_id
    assert logged_steps(run_id) == [1, 2, 3]
    assert catch_up(here / "outputs", said.append) == [] and len(said) == 1


def test_a_damaged_record_is_named_once_and_the_others_are_copied(here):
    run = make_run(here)
    log_steps(run, [1, 2])
    run.close()
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'\x00\x00\n{"step": "3", "kind": "train"}\n')
    log_steps(run, [4])
    note = {"run_id": None, "store": store_uri(), "status": "BEHIND", "tags": {}, "artifacts": []}
    run.write_json("mirror.json", note)
    run.set_status("FINISHED")
    said = []

    assert catch_up(here / "outputs", said.append) == [run.path]

    assert logged_steps(read_note(run.path)["run_id"]) == [1, 2, 4]
    assert len(said) == 1 and "metrics.jsonl line 3, 4 is damaged" in said[0]
    assert catch_up(here / "outputs", said.append) == [] and len(said) == 1


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

    assert read_run(path).manifest["status"] == "KILLED"
    assert client.get_run(run_id).info.status == "KILLED"
    assert logged_steps(run_id) == list(range(1, 32))
    assert reap_stale(here / "outputs") == []


FIRST_USE = """
import http.server
import os
from xtrain.track.mlflow_store import import_mlflow, open_store
from xtrain.track.store_address import store_uri
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
