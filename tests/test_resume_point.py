"""Where training goes on: the last complete checkpoint whose records are all there."""

import dataclasses
import os
from pathlib import Path

import pytest

from pipelines import pretrain
from pipelines.pretrain import resume_point
from xtrain.assemble.learner import build
from xtrain.config.compose import compose, load_run
from xtrain.data.dataset import prepare
from xtrain.errors import UsageError
from xtrain.track.resume import continue_run, take_over
from xtrain.track.run_dir import open_run, read_metrics
from xtrain.train import checkpoint

CONF = str(Path(__file__).parent / "conf")


@pytest.fixture(scope="module")
def tiny():
    """A run that logs every step, evaluates every 10 and saves every 5, and its model."""
    run = load_run(compose(["run=tiny", "device=cpu", "data.path=text.txt"], config_dir=CONF))
    return run, build(run, initialize=True)


@pytest.fixture
def stopped(tiny, tmp_path):
    """A run directory as after twelve steps: checkpoints 5 and 10, a record of every step."""
    run, learner = tiny
    out = open_run(
        tmp_path,
        run.name,
        "pretrain",
        dataclasses.asdict(run),
        config_text="",
        fingerprints={},
        facts={},
    )
    for step in range(13):
        if step:
            out.log(step, {"loss": 1.0})
        if step % 10 == 0:
            out.log(step, {"loss": 1.0}, kind="eval")
        if step in (5, 10):
            saved = (learner.buffers, learner.optimizer, learner.device, {})
            checkpoint.save(out.path / "checkpoints", step, *saved)
    out.close()
    return out


def keep_lines(out, count, tail=b""):
    """Lose all but the first lines of the metrics, as a power cut does."""
    metrics = out.path / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(True)[:count]) + tail)


def line_of(out, step, kind="train"):
    """How many lines there are up to and with a record."""
    records = read_metrics(out.path / "metrics.jsonl")
    return [(r["step"], r["kind"]) for r in records].index((step, kind)) + 1


def point(tiny, out, wanted=None):
    return resume_point(*(tiny[0], out, tiny[1], wanted))


def test_it_is_the_step_of_the_last_checkpoint(tiny, stopped):
    step, notices = point(tiny, stopped)
    assert step == 10
    assert notices == [f"resuming from checkpoint {stopped.path / 'checkpoints' / '10'}"]


@pytest.mark.parametrize(("step", "kind"), [(9, "train"), (10, "train")])
def test_lost_records_take_it_back_to_the_checkpoint_before_them(tiny, stopped, step, kind):
    keep_lines(stopped, line_of(stopped, step, kind))  # of step 10, the evaluation is lost
    found, notices = point(tiny, stopped)
    assert found == 5
    assert "passed over: checkpoint" in notices[0] and "metrics.jsonl ends at step" in notices[0]


def test_without_the_records_of_any_checkpoint_it_is_the_beginning(tiny, stopped):
    keep_lines(stopped, 3)
    found, notices = point(tiny, stopped)
    assert found == 0 and "starting at step 0" in notices[-1]


def test_a_checkpoint_that_was_asked_for_is_taken_and_what_is_missing_said(tiny, stopped):
    keep_lines(stopped, 3)
    found, notices = point(tiny, stopped, stopped.path / "checkpoints" / "10")
    assert found == 10 and "ends at step" in notices[0]


@pytest.mark.parametrize(
    ("spoilt", "says"), [(b"\0" * 300 + b"\n", "NUL bytes"), (b"garbage\n", "not JSON")]
)
def test_a_damaged_line_is_named_once_with_its_number_and_ends_what_is_trusted(
    tiny, stopped, spoilt, says
):
    kept = line_of(stopped, 7)
    metrics = stopped.path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(True)
    metrics.write_bytes(b"".join([*lines[:kept], spoilt, *lines[kept:]]))
    with pytest.raises(UsageError, match=f"line {kept + 1} is damaged: {says}"):
        read_metrics(metrics)

    found, notices = point(tiny, stopped)

    assert found == 5
    named = [line for line in notices if f"line {kept + 1} is damaged: {says}" in line]
    assert len(named) == 1 and "dropped" in named[0]
    continue_run(take_over(stopped), from_step=found, facts={})
    assert [r["step"] for r in read_metrics(metrics, "train")] == [1, 2, 3, 4, 5]


def test_another_interval_of_records_than_the_run_began_with_is_no_loss(tiny, stopped):
    keep_lines(stopped, 0)
    for step in (4, 8):
        stopped.log(step, {"loss": 1.0})
    stopped.log(0, {"loss": 1.0}, kind="eval")
    stopped.log(10, {"loss": 1.0}, kind="eval")
    stopped.manifest["config"]["train"]["log_every_steps"] = 4
    assert point(tiny, stopped)[0] == 10


def test_records_are_on_the_disk_before_the_checkpoint_that_relies_on_them(
    tiny, tmp_path, monkeypatch
):
    """Seen in the order of the system's calls."""
    run, learner = tiny
    text = tmp_path / "text.txt"
    text.write_text("".join(f"County {i} sent {i * 7 % 31} letters.\n" for i in range(400)))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(text)))
    out = open_run(tmp_path, "tiny", "pretrain", {}, config_text="", fingerprints={}, facts={})
    synced, sound = [], os.fsync

    def fsync(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sound(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    prepared = prepare(run.data, cache_dir=tmp_path / "data")
    synced.clear()
    pretrain.train(run, learner, prepared, out, start=28, stop=lambda: None)
    names = [name for name in synced if name.endswith((".jsonl", ".safetensors"))]
    assert names == ["metrics.jsonl", "model.safetensors", "optimizer.safetensors"]
