"""Whole runs of a tiny model from the command line: promoted, refused, killed, resumed, wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_and_resume import compare, environment, run_directory

from pipelines.__main__ import main
from xtrain.track.run_dir import read_run

CONF = str(Path(__file__).parent / "conf")
TEXT = "".join(
    f"The people of county {i} sent {i * 7 % 31} letters to the Senate in {1800 + i}.\n"
    for i in range(400)
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a text of 400 lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def xtrain(*overrides: str, run: str = "tiny") -> int:
    fixed = ["--config-dir", CONF, f"run={run}", "data.path=text.txt", "device=cpu"]
    return main([*fixed, *overrides])


def runs(here: Path) -> list[Path]:
    return sorted(p.parent for p in here.glob("outputs/*/*/*/manifest.json"))


def spawn(here: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipelines", "--config-dir", CONF, "run=tiny"]
    return subprocess.Popen(
        [*command, "data.path=text.txt", "device=cpu", *overrides],
        cwd=here,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(pattern: str, here: Path, process: subprocess.Popen) -> None:
    """Until a file appears; the deadline only ends a test that has already failed."""
    deadline = time.monotonic() + 120
    while not list(here.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.01)


def test_a_run_that_meets_its_bars_is_promoted(here, capsys):
    assert xtrain() == 0
    (path,) = runs(here)
    assert read_run(path).manifest["status"] == "FINISHED"
    for name in ("config.yaml", "metrics.jsonl", "samples.txt", "gates.json", "curves.png"):
        assert (path / name).stat().st_size > 0
    assert (path / "export" / "model.safetensors").exists()
    assert "promoted as models:/xtrain-tiny@promoted" in capsys.readouterr().out

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{here / 'mlflow.db'}")
    version = client.get_model_version_by_alias("xtrain-tiny", "promoted")
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(version.run_id, "train/loss")) == 30
    # A second, refused run does not move the alias.
    assert xtrain("seed=1", run="unreachable") == 3
    assert client.get_model_version_by_alias("xtrain-tiny", "promoted").version == version.version


def test_a_run_that_misses_a_bar_is_refused_with_the_table(here, capsys):
    assert xtrain(run="unreachable") == 3
    out = capsys.readouterr().out
    assert "val_loss" in out and "<= 1" in out and "REFUSED" in out
    (path,) = runs(here)
    assert read_run(path).manifest["status"] == "FINISHED"
    assert not (path / "registry.json").exists()


def disturbed(here, plain, options, pattern, number) -> tuple[int, str]:
    """Train in `plain` undisturbed; in `here` signal the run once a file appears, then resume it.

    Returns the exit code of the signalled process and the status it was left with, after
    checking that both runs hold the same values, bit for bit.
    """
    (plain / "text.txt").write_text(TEXT)
    undisturbed = spawn(plain, *options)
    undisturbed.communicate()
    assert undisturbed.returncode == 0

    process = spawn(here, *options)
    wait_for(pattern, here, process)
    process.send_signal(number)
    process.communicate()
    status = read_run(runs(here)[0]).manifest["status"]
    resumed = spawn(here, *options, "resume=auto")
    resumed.communicate()
    assert resumed.returncode == 0
    assert compare(run_directory(plain), run_directory(here)) == []
    return process.returncode, status


def test_sigterm_keeps_a_checkpoint_and_the_resumed_run_has_the_same_bits(here, tmp_path_factory):
    options = ("train.max_tokens=19200", "train.save_every_steps=20", "promote=false")
    pattern = "outputs/tiny/pretrain/*/checkpoints/20"
    plain = tmp_path_factory.mktemp("plain")
    code, status = disturbed(here, plain, options, pattern, signal.SIGTERM)
    if code != 0:  # else it was faster than the signal
        assert (code, status) == (143, "KILLED")


def test_sigkill_while_every_step_saves_loses_nothing(here, tmp_path_factory):
    options = ("train.max_tokens=6400", "train.save_every_steps=1", "promote=false")
    pattern = "outputs/tiny/pretrain/*/checkpoints/2[0-9]"
    disturbed(here, tmp_path_factory.mktemp("plain"), options, pattern, signal.SIGKILL)


def test_a_run_killed_before_its_first_checkpoint_doubles_nothing(here, tmp_path_factory):
    options = ("train.max_tokens=12800", "train.save_every_steps=1000", "promote=false")
    pattern = "outputs/tiny/pretrain/*/metrics.jsonl"
    disturbed(here, tmp_path_factory.mktemp("plain"), options, pattern, signal.SIGKILL)


@pytest.mark.slow
def test_a_job_of_several_that_fails_hides_no_other_and_is_the_exit_code(here, capsys):
    fixed = ["--config-dir", CONF, "device=cpu", "run=tiny,unreachable"]
    assert main(["-m", *fixed, "data.path=gone.txt,text.txt"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("xtrain: data.path=gone.txt") == 2
    assert "tiny PASS: promoted" in shown.out and "tiny REFUSED" in shown.out
    assert [read_run(path).manifest["status"] for path in runs(here)] == ["FINISHED"] * 2


@pytest.fixture
def interrupted(here):
    """A run that stopped after ten steps, as a kill leaves it."""
    process = spawn(here, "train.max_tokens=192000", "promote=false")
    wait_for("outputs/tiny/pretrain/*/checkpoints/10", here, process)
    process.kill()
    process.communicate()
    return runs(here)[0]


@pytest.mark.parametrize("named", [False, True])
def test_a_run_goes_on_when_its_host_has_another_name(here, interrupted, named):
    manifest = interrupted / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "host": "pod-a", "process": "another-boot:7"}))
    resume = f"resume={interrupted}" if named else "resume=auto"
    process = spawn(here, "train.max_tokens=192000", "promote=false", resume)
    assert any("resuming from checkpoint" in line for line in process.stderr)
    process.kill()
    process.wait()
    process.stderr.close()
    assert runs(here) == [interrupted]


def test_resuming_with_another_config_or_text_is_refused_by_name(here, interrupted, capsys):
    budget = "train.max_tokens=192000"
    assert xtrain(budget, "promote=false", "optim.lr=0.5", "resume=auto") == 2
    assert "optim.lr was 0.01, is 0.5" in capsys.readouterr().err
    (here / "text.txt").write_text(TEXT + "One more line of text.\n")
    assert xtrain(budget, "promote=false", f"resume={interrupted}") == 2
    assert "data fingerprint" in capsys.readouterr().err
    assert runs(here) == [interrupted]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(here, interrupted, capsys):
    steps = sorted((interrupted / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    weights = steps[-1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert xtrain("train.max_tokens=192000", "promote=false", f"resume={steps[-1]}") == 2
    err = capsys.readouterr().err
    assert str(weights.parent) in err and "damaged" in err
    weights.write_bytes(content[: len(content) // 2])
    process = spawn(here, "train.max_tokens=192000", "promote=false", "resume=auto")
    wait_for(f"outputs/tiny/pretrain/*/checkpoints/{int(steps[-1].name) + 5}", here, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert f"passed over: checkpoint {steps[-1]}" in err
    assert f"resuming from checkpoint {steps[-2]}" in err


def test_a_second_process_does_not_take_a_run_that_is_alive(here, capsys):
    process = spawn(here, "train.max_tokens=1920000", "promote=false")
    wait_for("outputs/tiny/pretrain/*/checkpoints/5", here, process)
    (path,) = runs(here)
    assert xtrain("train.max_tokens=1920000", "promote=false", f"resume={path}") == 2
    assert "RUNNING" in capsys.readouterr().err
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.path=absent.txt", "absent.txt"),
        ("resume=absent", "absent"),
        ("init_from=absent", "absent"),
        ("init_from=models:/none@promoted", "models:/none@promoted"),
        ("out=text.txt", "text.txt"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_writes_nothing(here, capsys, override, told):
    code = xtrain(override, "promote=false")
    err = capsys.readouterr().err
    assert code == 2
    refusals = [line for line in err.splitlines() if line.startswith("xtrain: ")]
    assert len(refusals) == 1 and told in refusals[0]
    assert runs(here) == []


def test_a_sequence_longer_than_the_text_is_refused(here, capsys):
    (here / "text.txt").write_text("The people of the county sent letters to the Senate. " * 2)
    assert xtrain("train.seq_len=32", "promote=false") == 2
    assert "seq_len=32" in capsys.readouterr().err
    assert runs(here) == []


def test_a_gpu_that_is_not_there_is_one_line(here, capsys):
    from xtrain.engine.device import _why_no_cuda

    if _why_no_cuda() is None:
        pytest.skip("this machine has a GPU")
    assert main(["--config-dir", CONF, "run=tiny", "data.path=text.txt", "device=cuda"]) == 2
    assert "device=cuda" in capsys.readouterr().err
    assert runs(here) == []


def test_metrics_hold_every_step_once_and_tokens_match_the_clock(here):
    assert xtrain("promote=false") == 0
    (path,) = runs(here)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == list(range(1, 31))
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 10, 20, 30]
    assert train[-1]["tokens"] == 1920


@pytest.mark.slow
def test_with_a_server_the_last_line_on_stdout_is_the_verdict(here, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    store = ["--backend-store-uri", "sqlite:///server.db", "--artifacts-destination", "served"]
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    with subprocess.Popen([*command, *store], start_new_session=True) as server:
        try:
            deadline = time.monotonic() + 120
            while not answers(port):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            command = [sys.executable, "-m", "pipelines", "--config-dir", CONF, "run=tiny"]
            command += ["data.path=text.txt", "device=cpu"]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert done.returncode == 0
    last = "tiny PASS: promoted as models:/xtrain-tiny@promoted version 1"
    assert done.stdout.splitlines()[-1] == last
    assert "http://" not in done.stdout + done.stderr
    assert not (here / "mlflow.db").exists()


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
