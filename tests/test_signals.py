"""A signal at any moment of a command: its exit code, one line, and how the run is marked."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kill_and_resume import compare, environment, run_directory

from xtrain.track.run_dir import read_run

CONF = str(Path(__file__).parent / "conf")
TEXT = "".join(f"County {i} sent {i * 7 % 31} letters to the Senate.\n" for i in range(400))

# Sends itself signals: each of "MODULE NAME NUMBER" at the first call of NAME after the one before.
SIGNALLED = """
import importlib, os, sys
from functools import reduce
from pipelines.__main__ import main

plan = [line.split() for line in sys.argv[1].splitlines()]

def arm(module, name, number):
    *within, last = name.split(".")
    owner = reduce(getattr, within, importlib.import_module(module))
    sound = getattr(owner, last)

    def signalled(*arguments, **options):
        if plan and plan[0] == [module, name, number]:
            del plan[0]
            os.kill(os.getpid(), int(number))
        return sound(*arguments, **options)

    setattr(owner, last, signalled)

for each in list(plan):
    arm(*each)
sys.exit(main(sys.argv[2:]))
"""
TINY = ("run=tiny", "data.path=text.txt", "device=cpu", "promote=false")


@pytest.fixture(autouse=True)
def with_a_store(tmp_path, empty_store):
    """Making an MLflow database takes longer than the run."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")


def heed() -> None:
    """Under nohup or in the background of a script the signals would be ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def signalled(here: Path, *plan: str, arguments=TINY) -> subprocess.CompletedProcess:
    (here / "text.txt").write_text(TEXT)
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, "\n".join(plan), "--config-dir", CONF, *arguments],
        cwd=here,
        env=environment(),
        preexec_fn=heed,
        capture_output=True,
        text=True,
    )


def status(here: Path) -> str:
    return read_run(run_directory(here)).manifest["status"]


INT, TERM, HUP = (int(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


OTHER_MOMENTS = [
    ([f"pipelines.run open_run {HUP}"], 129),
    ([f"xtrain.track.run_dir write_atomically {INT}"], 130),  # the first is config.yaml
    ([f"xtrain.train.step TrainingStep.load {HUP}"], 129),
    (
        [f"xtrain.train.step TrainingStep.load {INT}", f"xtrain.train.checkpoint save {INT}"],
        130,
    ),
    (
        [
            f"xtrain.train.step TrainingStep.load {TERM}",
            f"xtrain.train.checkpoint _seal {TERM}",
        ],
        143,
    ),
    ([f"gates.judging.finished_run measure_run {INT}"], 130),
    ([f"gates.judging.finished_run measure_run {INT}", f"pipelines.run end_run {INT}"], 130),
]


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ([f"pipelines.run _introduce {TERM}"], 143),
        ([f"pipelines.verdict conclude {TERM}"], 143),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_MOMENTS),
    ],
    ids=str,
)
def test_a_signal_at_any_moment_of_a_run_marks_it_killed(tmp_path, plan, code):
    done = signalled(tmp_path, *plan)
    assert (done.returncode, status(tmp_path)) == (code, "KILLED"), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(f"xtrain: interrupted by signal {code - 128}\n")


@pytest.mark.slow
def test_a_run_ended_while_it_is_measured_is_measured_by_the_next_start(tmp_path):
    killed, plain = tmp_path / "killed", tmp_path / "plain"
    killed.mkdir()
    plain.mkdir()
    signalled(killed, f"gates.judging.finished_run measure_run {TERM}")
    again = signalled(killed, arguments=(*TINY, "resume=auto"))
    assert again.returncode == signalled(plain).returncode == 0
    assert "tiny PASS" in again.stdout and "resuming from checkpoint" in again.stderr
    assert status(killed) == "FINISHED"
    assert compare(run_directory(plain), run_directory(killed)) == []


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_a_signal_while_the_text_is_prepared_leaves_nothing(tmp_path, number):
    done = signalled(tmp_path, f"xtrain.data.dataset _write_shards {number}")
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


# Forks a process for every so many calls of a dry run; each sends itself SIGINT at that call.
INTERRUPTED_EVERYWHERE = """
import os, sys
from pipelines.__main__ import main

def interrupted_at(count):
    def watch(frame, event, argument):
        nonlocal count
        count -= event == "call"
        if count == 0:
            os.kill(os.getpid(), 2)
    sys.setprofile(watch)
    code = main(["dry_run=true"])
    sys.stdout.flush()
    os._exit(code)

count, code = 2000, None
while code != 0:
    child = os.fork()
    if child == 0:
        interrupted_at(count)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("code", code, file=sys.stderr, flush=True)
    count = count * 3 // 2
"""


def test_ctrl_c_while_a_run_is_composed_is_130_and_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_EVERYWHERE],
        cwd=tmp_path,
        env=environment(),
        preexec_fn=heed,
        capture_output=True,
        text=True,
    )
    lines = done.stderr.splitlines()
    assert lines.pop() == "code 0"  # it was done before the last of the calls
    assert len(lines) >= 16
    assert lines == ["xtrain: interrupted by signal 2", "code 130"] * (len(lines) // 2)
    assert [p.name for p in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
def test_what_was_ignored_at_the_start_stays_ignored(tmp_path):
    """As under nohup."""
    (tmp_path / "text.txt").write_text(TEXT)
    plan = f"xtrain.train.step TrainingStep.load {HUP}"
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, plan, "--config-dir", CONF, *TINY],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert (done.returncode, status(tmp_path)) == (0, "FINISHED")


@pytest.mark.slow
def test_a_terminal_that_was_closed_does_not_keep_a_run_from_its_checkpoint(tmp_path):
    """SIGHUP comes with a stderr that can no longer be written."""
    (tmp_path / "text.txt").write_text(TEXT)
    ours, theirs = os.openpty()
    plan = f"xtrain.train.step TrainingStep.load {HUP}"
    with subprocess.Popen(
        [sys.executable, "-c", SIGNALLED, plan, "--config-dir", CONF, *TINY],
        cwd=tmp_path,
        env=environment(),
        preexec_fn=heed,
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
    ) as process:
        os.close(theirs)
        os.close(ours)
    assert (process.returncode, status(tmp_path)) == (129, "KILLED")
    assert list(run_directory(tmp_path).glob("checkpoints/1/manifest.json"))
