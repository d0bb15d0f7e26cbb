"""A disk that is full, over its quota or read-only, and a run directory that was deleted.

Each case has a small file system of its own, in a mount namespace that ends with it.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kill_and_resume import environment
from safetensors import SafetensorError

from xtrain.errors import WriteError, is_of_the_disk, write_error

CONF = str(Path(__file__).parent / "conf")
TEXT = "".join(f"County {i} sent {i * 7 % 31} letters to the Senate.\n" for i in range(400))
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount() -> bool:
    try:
        asked = "mount -t tmpfs -o size=64k tmpfs /tmp"
        return subprocess.run([*NAMESPACE, "sh", "-c", asked], capture_output=True).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not may_mount(), reason="no file system may be mounted here")


def on_a_disk(here: Path, size: str, script: str) -> list:
    """Run Python in `here` with a file system of that size at `full/`; its last line is JSON."""
    (here / "full").mkdir()
    (here / "text.txt").write_text(TEXT)
    mounted = f'mount -t tmpfs -o size={size} tmpfs full && exec "$0" -c "$1"'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", mounted, sys.executable, script],
        cwd=here,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("xtrain: ")]
    return [*json.loads(done.stdout.splitlines()[-1]), lines]


SHARDS = """
import hashlib, json, pathlib
import numpy as np
from xtrain.data.shards import ShardWriter
from xtrain.command.ending import guarded

def write():
    path = pathlib.Path("full/train.bin")
    with ShardWriter(path, vocab_size=9, tokenizer=hashlib.sha256(b"").hexdigest()) as writer:
        for _ in range(100):
            writer.append(np.arange(9).repeat(COUNT))
    return 0

print(json.dumps([guarded("xtrain", write), [p.name for p in pathlib.Path("full").iterdir()]]))
"""


@needs_mounts
@pytest.mark.parametrize("count", [30, 3000])  # the writes fail at the end, or at once
def test_a_full_disk_leaves_no_part_of_a_shard(tmp_path, count):
    code, left, lines = on_a_disk(tmp_path, "40k", SHARDS.replace("COUNT", str(count)))
    assert (code, left) == (1, [])
    assert len(lines) == 1 and "No space left on device" in lines[0]


SAVE = """
import json, pathlib
from gates.instruments import tiny_run
from xtrain.command.ending import guarded
from xtrain.engine import device
from xtrain.train import checkpoint

cpu = device.use("cpu")
tiny = tiny_run.build(cpu)
directory = pathlib.Path("full/checkpoints")

def save(step):
    checkpoint.save(directory, step, tiny.buffers, tiny.optimizer, cpu, {})
    return 0

codes = [guarded("xtrain", save, step) for step in (1, 2)]
print(json.dumps([codes, [p.name for p in directory.iterdir()]]))
"""


@needs_mounts
def test_a_full_disk_leaves_no_part_of_a_checkpoint_and_the_one_before(tmp_path):
    codes, left, lines = on_a_disk(tmp_path, "200k", SAVE)
    assert (codes, left) == ([0, 1], ["1"])
    assert len(lines) == 1 and "checkpoints/2: No space left on device" in lines[0]


APPEND = """
import contextlib, json
from gates.judging.ledger import Ledger
from xtrain.command.ending import guarded

ledger = Ledger("full/outputs/ledger.jsonl")
ledger.append({"kind": "note", "text": "short"})
with contextlib.suppress(OSError), open("full/filler", "wb", buffering=0) as file:
    while file.write(bytes(1024)):
        pass

def append():
    ledger.append({"kind": "note", "text": "long" * 5000})
    return 0

print(json.dumps([guarded("xtrain", append), [entry["text"] for entry in ledger.entries()]]))
"""


@needs_mounts
def test_a_full_disk_leaves_no_part_of_a_ledger_entry(tmp_path):
    code, left, lines = on_a_disk(tmp_path, "100k", APPEND)
    assert (code, left) == (1, ["short"])
    assert len(lines) == 1 and "outputs/ledger.jsonl: No space left on device; free" in lines[0]


RUN = """
import json, os, pathlib, shutil, subprocess, sys
from pipelines.__main__ import main
from xtrain.train import checkpoint

FAULT
def xtrain(*overrides):
    fixed = ["--config-dir", CONF, "run=tiny", "data.path=text.txt", "device=cpu", "promote=false"]
    return main([*fixed, "out=full/outputs", *overrides])

codes, found = [], []
def keep(code):
    codes.append(code)
    runs = pathlib.Path("full/outputs").glob("*/*/*/manifest.json")
    found.append([json.loads(path.read_text())["status"] for path in runs])

keep(xtrain())
AFTER
print(json.dumps([codes, found]))
"""


def run_on_a_disk(here: Path, size: str, empty_store: Path, fault: str = "", after: str = ""):
    (here / "mlflow.db").write_bytes(empty_store.read_bytes())
    script = RUN.replace("FAULT", fault).replace("AFTER", after).replace("CONF", repr(CONF))
    return on_a_disk(here, size, script)


GROW = """
subprocess.run(["mount", "-o", "remount,size=90m", "full"], check=True)
keep(xtrain("resume=auto"))
"""


@needs_mounts
@pytest.mark.slow
def test_a_run_whose_disk_is_full_keeps_its_checkpoint_is_failed_and_goes_on(tmp_path, empty_store):
    codes, found, lines = run_on_a_disk(tmp_path, "16m", empty_store, after=GROW)
    assert (codes, found) == ([1, 0], [["FAILED"], ["FINISHED"]])
    assert "checkpoints/10: No space left on device; checkpoint" in lines[-1]
    assert "checkpoints/5 is kept; free space" in lines[-1]


def at_a_save(step: int, what: str) -> str:
    return f"""
sound = checkpoint.save
def save(directory, step, *arguments):
    if step == {step}:
        {what}
    return sound(directory, step, *arguments)
checkpoint.save = save
"""


FILLED = "open('full/filler', 'wb').write(bytes(100 << 20))"
READ_ONLY = """for options in (["--bind", "full"], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *options, "full"], check=True)"""


@needs_mounts
@pytest.mark.slow
def test_a_disk_that_others_have_filled_to_the_last_byte_still_lets_the_run_be_marked(
    tmp_path, empty_store
):
    fill = f"import contextlib\n        with contextlib.suppress(OSError): {FILLED}"
    codes, found, lines = run_on_a_disk(tmp_path, "40m", empty_store, at_a_save(10, fill))
    assert (codes, found) == ([1], [["FAILED"]])
    assert "No space left on device" in lines[-1]


@needs_mounts
@pytest.mark.slow
def test_a_disk_that_became_read_only_is_one_line_and_the_next_start_marks_the_run(
    tmp_path, empty_store
):
    codes, found, lines = run_on_a_disk(tmp_path, "40m", empty_store, at_a_save(10, READ_ONLY))
    assert (codes, found) == ([1], [["RUNNING"]])
    assert "Read-only file system; checkpoint" in lines[-1] and "mount it writable" in lines[-1]


@needs_mounts
@pytest.mark.slow
def test_a_run_directory_that_was_deleted_is_one_line_and_is_not_made_again(tmp_path, empty_store):
    delete = "shutil.rmtree(directory.parent)"
    codes, found, lines = run_on_a_disk(tmp_path, "40m", empty_store, at_a_save(10, delete))
    assert (codes, found) == ([1], [[]])
    assert len(lines) == 1 and "was deleted or moved away" in lines[0]


def test_a_quota_and_what_safetensors_says_are_of_the_disk():
    over = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    for error, says in ((over, "quota"), (full, "No space left on device")):
        line = str(write_error(Path("checkpoints/4"), error, "checkpoint 2 is kept"))
        assert is_of_the_disk(error) and says in line and "; checkpoint 2 is kept; free" in line
    assert not is_of_the_disk(FileNotFoundError(errno.ENOENT, "x"))
    assert not is_of_the_disk(SafetensorError("header too large"))


def test_what_is_kept_is_said_once_however_often_an_error_passes():
    first = write_error(Path("a"), OSError(errno.ENOSPC, "x"))
    again = write_error(Path("b"), first, "checkpoint 2 is kept")
    assert isinstance(again, WriteError) and again.errno == errno.ENOSPC
    assert str(again).startswith("cannot write a: No space") and "2 is kept; free" in str(again)
