"""A checkpoint is complete or it is not one: kills, truncation, flipped bits, other models."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gates.instruments import tiny_run
from xtrain.engine import device
from xtrain.errors import UsageError
from xtrain.models.hf import named_tensors
from xtrain.train import checkpoint

CPU = device.use("cpu")
ROOT = Path(__file__).resolve().parents[1]
FILES = (*checkpoint.FILES, "manifest.json")


def made(seed=1, config=tiny_run.MODEL):
    """A model whose weights and moments are all drawn."""
    tiny = tiny_run.build(CPU, seed=seed, config=config)
    source = np.random.default_rng(seed)
    for buffer in (tiny.buffers.moment1, tiny.buffers.moment2):
        for view in named_tensors(tiny.buffers, buffer).values():
            view[...] = source.random(view.shape, np.float32)
    tiny.optimizer.updates[...] = 40
    tiny.optimizer.skipped[...] = 2
    return tiny


def save(directory, step, tiny, **facts):
    return checkpoint.save(directory, step, tiny.buffers, tiny.optimizer, CPU, facts)


def restore(found, tiny):
    checkpoint.restore(found, tiny.buffers, tiny.optimizer, CPU)


def flip(file, position, bit=0):
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def steps_in(directory):
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


# Round trip


def test_a_checkpoint_brings_back_every_bit(tmp_path):
    tiny, fresh = made(), tiny_run.build(CPU, seed=2)
    save(tmp_path, 7, tiny)
    found, damaged = checkpoint.latest(tmp_path)
    restore(found, fresh)
    assert (found.step, damaged) == (7, [])
    for buffer in ("master", "moment1", "moment2"):
        assert getattr(fresh.buffers, buffer).tobytes() == getattr(tiny.buffers, buffer).tobytes()
    assert (int(fresh.optimizer.updates), int(fresh.optimizer.skipped)) == (40, 2)


def test_facts_are_kept_in_the_manifest(tmp_path):
    save(tmp_path, 7, made(), tokens=1234, data="abc")
    manifest = checkpoint.load_manifest(tmp_path / "7").manifest
    assert (manifest["tokens"], manifest["data"]) == (1234, "abc")


def test_the_same_training_has_the_same_hash(tmp_path):
    one, other = (save(tmp_path / name, 7, made()) for name in "ab")
    assert one.sha256 == other.sha256
    for name in FILES:
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_the_hash_covers_weights_moments_and_counts(tmp_path):
    reference = save(tmp_path / "a", 7, made()).sha256
    changes = [
        lambda t: t.buffers.master.__setitem__(0, 9.0),
        lambda t: t.buffers.moment1.__setitem__(0, 9.0),
        lambda t: t.buffers.moment2.__setitem__(0, 9.0),
        lambda t: t.optimizer.updates.__setitem__((), 41),
    ]
    for i, change in enumerate(changes):
        tiny = made()
        change(tiny)
        assert save(tmp_path / str(i), 7, tiny).sha256 != reference


def test_weights_can_be_read_alone(tmp_path):
    tiny, fresh = made(), tiny_run.build(CPU, seed=2)
    found = save(tmp_path, 7, tiny)
    checkpoint.load_weights(found.path / checkpoint.FILES[0], fresh.buffers, CPU)
    assert fresh.buffers.master.tobytes() == tiny.buffers.master.tobytes()
    assert (fresh.buffers.moment1 == 0).all()


def test_a_complete_checkpoint_is_not_written_again(tmp_path):
    first = save(tmp_path, 7, made(seed=1))
    again = save(tmp_path, 7, made(seed=3))
    assert again.sha256 == first.sha256 == checkpoint.load_manifest(first.path).sha256


# Damage


def test_the_last_complete_checkpoint_is_used_and_the_damaged_one_named(tmp_path):
    for step in (4, 8, 12):
        save(tmp_path, step, made())
    flip(tmp_path / "12" / "model.safetensors", 900)
    found, damaged = checkpoint.latest(tmp_path)
    assert found.step == 8
    assert len(damaged) == 1
    assert str(tmp_path / "12") in damaged[0]
    assert "model.safetensors is damaged" in damaged[0]


@pytest.mark.parametrize("name", checkpoint.FILES)
@pytest.mark.parametrize("place", [0, 9, 0.5, -1])
def test_one_flipped_bit_anywhere_is_found(tmp_path, name, place):
    file = save(tmp_path, 4, made()).path / name
    size = file.stat().st_size
    flip(file, int(size * place) if isinstance(place, float) else place, bit=5)
    with pytest.raises(UsageError, match=f"{name} is damaged"):
        checkpoint.load_manifest(tmp_path / "4")


def test_no_flipped_bit_of_the_manifest_changes_what_it_says(tmp_path):
    found = save(tmp_path, 4, made(), tokens=1234, data="f00d")
    file = found.path / "manifest.json"
    sound = file.read_bytes()
    for position in range(len(sound)):
        flip(file, position, bit=position % 8)
        try:
            manifest = checkpoint.load_manifest(found.path, verify=False).manifest
        except UsageError as error:
            assert str(found.path) in str(error)
        else:
            assert manifest == found.manifest, position
        file.write_bytes(sound)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, name, kept):
    file = save(tmp_path, 4, made()).path / name
    size = file.stat().st_size
    os.truncate(file, int(size * kept) if isinstance(kept, float) else kept)
    with pytest.raises(UsageError, match=name):
        checkpoint.load_manifest(tmp_path / "4")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path, name):
    found = save(tmp_path, 4, made())
    (found.path / name).unlink()
    with pytest.raises(UsageError, match=name):
        checkpoint.load_manifest(found.path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '"text"', '{"format": "xtrain checkpoint 9"}', "{"]
)
def test_a_foreign_manifest_is_not_a_checkpoint(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=str(tmp_path)):
        checkpoint.load_manifest(tmp_path)


def test_a_directory_without_a_manifest_is_not_a_checkpoint(tmp_path):
    with pytest.raises(UsageError, match="is not a checkpoint: it has no manifest"):
        checkpoint.load_manifest(tmp_path)


def test_a_checkpoint_under_the_number_of_another_step_is_refused(tmp_path):
    save(tmp_path, 4, made()).path.rename(tmp_path / "8")
    with pytest.raises(UsageError, match="step 4"):
        checkpoint.load_manifest(tmp_path / "8")


def test_without_any_checkpoint_there_is_none(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") == (None, [])


def test_saving_over_a_damaged_checkpoint_moves_it_aside(tmp_path):
    tiny = made()
    file = save(tmp_path, 4, tiny).path / "model.safetensors"
    flip(file, 900)
    damaged = file.read_bytes()
    found = save(tmp_path, 4, tiny)
    assert checkpoint.load_manifest(found.path).step == 4
    assert (tmp_path / "4.damaged" / "model.safetensors").read_bytes() == damaged


# Another model


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 3},
        {"intermediate_size": 32},
        {"vocab_size": 98},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, change):
    found = save(tmp_path, 4, made())
    other = tiny_run.build(CPU, config=replace(tiny_run.MODEL, **change))
    with pytest.raises(UsageError, match=str(found.path)):
        restore(found, other)
    with pytest.raises(UsageError, match=str(found.path)):
        checkpoint.load_weights(found.path / checkpoint.FILES[0], other.buffers, CPU)


def test_a_refused_checkpoint_leaves_the_model_as_it_was(tmp_path):
    found = save(tmp_path, 4, made())
    other = tiny_run.build(CPU, config=replace(tiny_run.MODEL, intermediate_size=32))
    before = other.buffers.master.tobytes()
    with pytest.raises(UsageError):
        restore(found, other)
    assert other.buffers.master.tobytes() == before


# Kills. The child saves step 4, then forks one process for each line that a save of step 8 runs;
# each ends itself by SIGKILL just before that line.
KILLED_AT_EVERY_LINE = """
import os, shutil, signal, sys
from pathlib import Path
from gates.instruments import tiny_run
from xtrain.engine.device import Device
from xtrain.train import checkpoint

root, cpu = Path(sys.argv[1]), Device()
tiny = tiny_run.build(cpu)

def save(directory, step):
    checkpoint.save(directory, step, tiny.buffers, tiny.optimizer, cpu, {})

def killed_before_line(count, directory):
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != checkpoint.__file__:
            return None
        if event == "line":
            count -= 1
            if count < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    save(directory, 8)
    sys.settrace(None)

save(root / "start", 4)
tiny.optimizer.updates[...] = 1
count, alive = 0, False
while not alive:
    directory = root / str(count)
    shutil.copytree(root / "start", directory)
    child = os.fork()
    if child == 0:
        killed_before_line(count, directory)
        os._exit(0)
    alive = os.waitpid(child, 0)[1] == 0
    count += 1
"""


def test_a_kill_at_any_line_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_LINE, tmp_path],
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    instants = [p for p in tmp_path.iterdir() if p.name != "start"]
    instants.sort(key=lambda p: int(p.name))
    found = [checkpoint.latest(directory) for directory in instants]
    assert all(damaged == [] for _, damaged in found)
    steps = [each.step for each, _ in found]
    assert steps == sorted(steps)  # the old one until an instant, the new one from there on
    assert {steps[0], steps[-1]} == {4, 8}
    assert len(steps) > 30
    for directory in instants[:-1]:
        save(directory, 12, made())
        checkpoint.prune(directory, saved=12, keep_last=1, best_step=None)
        assert [p.name for p in directory.iterdir()] == ["12"]


@pytest.mark.parametrize("name", FILES)
def test_a_half_written_checkpoint_is_passed_over_and_cleared_away(tmp_path, name):
    save(tmp_path, 4, made())
    leftover = tmp_path / ".writing-8-1"
    leftover.mkdir()
    (leftover / name).write_bytes(b"half")
    assert checkpoint.latest(tmp_path)[0].step == 4
    checkpoint.prune(tmp_path, saved=4, keep_last=1, best_step=None)
    assert not leftover.exists()


# Pruning


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in (2, 4, 6, 8, 10):
        save(tmp_path, step, made())
    checkpoint.prune(tmp_path, saved=10, keep_last=2, best_step=4)
    assert steps_in(tmp_path) == [4, 8, 10]


@pytest.mark.parametrize("keep_last", [0, 1])
def test_pruning_never_deletes_the_newest(tmp_path, keep_last):
    for step in (2, 4):
        save(tmp_path, step, made())
    checkpoint.prune(tmp_path, saved=4, keep_last=keep_last, best_step=None)
    assert steps_in(tmp_path) == [4]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path):
    for step in (4, 8, 12):
        save(tmp_path, step, made())
    flip(tmp_path / "12" / "model.safetensors", 900)
    found, _ = checkpoint.latest(tmp_path)
    save(tmp_path, found.step + 2, made())  # continued from 8, saving at 10
    checkpoint.prune(tmp_path, saved=10, keep_last=1, best_step=None)
    assert checkpoint.latest(tmp_path)[0].step == 10
    assert (tmp_path / "12").exists()


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path):
    save(tmp_path, 4, made())
    (tmp_path / "notes").mkdir()
    (tmp_path / "4.damaged").mkdir()
    checkpoint.prune(tmp_path, saved=4, keep_last=1, best_step=None)
    assert {p.name for p in tmp_path.iterdir()} == {"4", "notes", "4.damaged"}


def test_manifests_hold_no_time_host_or_path(tmp_path):
    found = save(tmp_path, 4, made())
    text = (found.path / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert set(json.loads(text)) == {"format", "step", "sha256", "manifest_sha256"}
