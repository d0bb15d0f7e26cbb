"""Run directories: what is written survives kills and full disks, and reads back bit for bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from xtrain.errors import UsageError, WriteError
from xtrain.track.run_dir import all_runs, open_run, read_metrics, read_run


def make_run(root, config=None, run="v0", phase="t6"):
    return open_run(
        root,
        run,
        phase,
        config or {"seed": 1, "optim": {"lr": 0.004}},
        config_text="seed: 1\n",
        fingerprints={"config": "c0", "data": "d0"},
        facts={"device": "cpu"},
    )


def test_a_run_directory_holds_its_config_and_manifest(tmp_path):
    run = make_run(tmp_path)

    assert run.path.parent == tmp_path / "v0" / "t6"
    assert (run.path / "config.yaml").read_text() == "seed: 1\n"
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["status"] == "RUNNING" and manifest["pid"] == os.getpid()
    assert manifest["fingerprints"] == {"config": "c0", "data": "d0"}
    assert manifest["config"]["optim"]["lr"] == 0.004
    assert manifest["ended"] is None


def test_many_runs_of_one_second_get_directories_of_their_own(tmp_path):
    assert len({make_run(tmp_path).path for _ in range(20)}) == 20


def test_metrics_read_back_bit_for_bit(tmp_path):
    run = make_run(tmp_path)
    values = {
        "loss": np.float32(0.1),
        "lr": 0.1 + 0.2,
        "tiny": 5e-324,
        "tokens": np.int64(2**53 + 1),
        "mfu": None,
        "worst": float("nan"),
        "most": math.inf,
        "least": -math.inf,
    }

    run.log(3, values)

    record = read_metrics(run.path / "metrics.jsonl")[0]
    assert record["loss"] == float(np.float32(0.1)) and record["lr"] == 0.1 + 0.2
    assert record["tiny"] == 5e-324 and record["tokens"] == 2**53 + 1 and record["mfu"] is None
    assert math.isnan(record["worst"])
    assert record["most"] == math.inf and record["least"] == -math.inf


def test_metrics_lines_are_valid_json_even_with_nan(tmp_path):
    run = make_run(tmp_path)
    run.log(1, {"loss": float("nan")})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] == "NaN" and line["step"] == 1 and line["kind"] == "train"


DAMAGE = [
    (b"spoilt", "not JSON"),
    (b'{"step": 2, "kind": "train", "loss": 0.5}\x00\x00', "NUL bytes"),
    (b"\x00" * 60, "NUL bytes"),
    (b'{"step": 2, "kind": "tr\xff\xfein"}', "byte 23 is not UTF-8"),
    (b'{"step": "2", "kind": "train"}', 'step is "2", not a whole number'),
    (b'{"step": -2, "kind": "train"}', "step is -2"),
    (b'{"step": 2.5, "kind": "train"}', "step is 2.5"),
    (b'{"step": 2, "kind": ["train"]}', "kind is"),
    (b'{"step": 2, "kind": "train", "time": "noon"}', "time is"),
    (b'{"step": 2, "kind": "train", "loss": "low"}', "loss is no number"),
    (b'{"step": 2, "kind": "train", "loss": {}}', "loss is no number"),
    (b'{"step": 2, "kind": "train", "loss": 1e999}', "a number is too large"),
    (b'{"step": 2, "kind": "train", "tokens": 1' + b"0" * 400 + b"}", "tokens is no number"),
    (b"[1, 2]", "not an object"),
    (b"", "not JSON"),
]


@pytest.mark.parametrize(("line", "reason"), DAMAGE)
def test_a_line_that_is_no_record_is_named_with_its_number_and_why(tmp_path, line, reason):
    run = make_run(tmp_path)
    run.log(1, {"loss": 1.0})
    run.close()
    metrics = run.path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + line + b"\n" + metrics.read_bytes())
    with pytest.raises(UsageError) as refused:
        read_metrics(metrics)
    assert str(refused.value).startswith(f"{metrics} line 2 is damaged: ")
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", "abc"),
        ("started", 7),
        ("status", "DONE"),
        ("run", "../../elsewhere"),
        ("id", ""),
        ("fingerprints", {"data": 1}),
        ("resumes", None),
        ("resumes", [7]),
        ("config", [1]),
        ("facts", "x"),
    ],
)
def test_a_manifest_of_the_wrong_types_is_named_with_its_field_and_passed_over(
    tmp_path, field, value
):
    run = make_run(tmp_path)
    sound = make_run(tmp_path)
    run.write_json("manifest.json", {**run.manifest, field: value})
    with pytest.raises(UsageError, match=rf"manifest\.json is damaged: {field}"):
        read_run(run.path)
    said = []
    assert [each.path for each in all_runs(tmp_path, say=said.append)] == [sound.path]
    assert len(said) == 1 and f"damaged: {field}" in said[0] and "passed over" in said[0]


@pytest.mark.parametrize("values", [{"loss": "low"}, {"loss": [1.0]}, {"step": 3}])
def test_a_value_that_is_no_number_is_refused_by_name(tmp_path, values):
    with pytest.raises(TypeError, match=next(iter(values))):
        make_run(tmp_path).log(1, values)


def test_truncating_drops_every_later_record(tmp_path):
    run = make_run(tmp_path)
    for step in range(1, 7):
        run.log(step, {"loss": 1 / step})
        if step % 2 == 0:
            run.log(step, {"loss": 2 / step}, kind="eval")

    run.truncate_after(4)
    run.log(5, {"loss": 0.2})

    records = read_metrics(run.path / "metrics.jsonl")
    assert [(r["step"], r["kind"]) for r in records] == [
        (1, "train"),
        (2, "train"),
        (2, "eval"),
        (3, "train"),
        (4, "train"),
        (4, "eval"),
        (5, "train"),
    ]
    assert [r["step"] for r in read_metrics(run.path / "metrics.jsonl", "eval")] == [2, 4]


def test_a_torn_last_line_is_dropped_when_the_run_goes_on(tmp_path):
    run = make_run(tmp_path)
    run.log(1, {"loss": 1.0})
    run.close()
    metrics = run.path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 2, "kind": "tr')

    assert [r["step"] for r in read_metrics(metrics)] == [1]
    read_run(run.path).log(2, {"loss": 2.0})

    assert [r["step"] for r in read_metrics(metrics)] == [1, 2]


def test_a_line_broken_in_the_middle_is_named(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "kind": "train"}\nspoilt\n{"step": 3, "kind": "train"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(metrics)


CHILD = """
import sys
import time
from xtrain.track.run_dir import open_run
run = open_run(sys.argv[1], "v0", "t6", {"seed": 1}, config_text="", fingerprints={}, facts={})
step = 0
while True:
    step += 1
    run.log(step, {"loss": 1 / step})
    if step == 50:
        print(run.path, flush=True)
"""


def test_a_kill_mid_log_loses_no_complete_record(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    path = child.stdout.readline().strip()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()

    run = read_run(path)
    before = read_metrics(run.path / "metrics.jsonl")
    run.log(len(before) + 1, {"loss": 0.0})

    steps = [r["step"] for r in read_metrics(run.path / "metrics.jsonl")]
    assert len(before) >= 50 and steps == list(range(1, len(before) + 2))
    assert before[6]["loss"] == 1 / 7


def test_a_status_is_one_of_four_and_ends_the_run(tmp_path):
    run = make_run(tmp_path)
    run.set_status("FAILED")
    assert read_run(run.path).manifest["status"] == "FAILED"
    assert read_run(run.path).manifest["ended"]
    with pytest.raises(ValueError, match="STOPPED"):
        run.set_status("STOPPED")


def test_a_file_in_the_way_of_the_outputs_is_a_usage_error(tmp_path):
    (tmp_path / "outputs").write_text("not a directory")
    with pytest.raises(UsageError, match=r"out=.*outputs: cannot write"):
        make_run(tmp_path / "outputs")


FULL_DISK = """
import resource, sys
from xtrain.errors import WriteError
from xtrain.track.run_dir import open_run, read_metrics
run = open_run(sys.argv[1], "v0", "t6", {"seed": 1}, config_text="", fingerprints={}, facts={})
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    for step in range(1, 1000):
        run.log(step, {"loss": 1 / step})
except WriteError as error:
    print(step, len(read_metrics(run.path / "metrics.jsonl")), error, sep="|")
"""


def test_a_full_disk_is_one_clear_line_and_keeps_every_complete_record(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    failed_step, kept, message = done.stdout.strip().split("|")
    assert int(kept) == int(failed_step) - 1
    assert message.startswith("cannot write ") and "metrics.jsonl" in message


def test_files_are_replaced_whole(tmp_path):
    run = make_run(tmp_path)
    run.write_json("gates.json", {"verdict": "PASS"})
    run.write_json("gates.json", {"verdict": "FAIL"})
    assert json.loads((run.path / "gates.json").read_text()) == {"verdict": "FAIL"}
    assert not list(Path(run.path).glob(".*.tmp"))


def test_what_dead_processes_left_of_a_file_goes_with_its_next_writing(tmp_path):
    run = make_run(tmp_path)
    abandoned, fresh = (run.path / f".gates.json.{name}.tmp" for name in ("a", "b"))
    for each in (abandoned, fresh):
        each.write_text("{")
    os.utime(abandoned, (time.time() - 7200, time.time() - 7200))
    run.write_json("gates.json", {})
    assert fresh.exists() and not abandoned.exists()


def test_a_failed_replacement_leaves_the_old_file_and_no_temporary_one(tmp_path):
    run = make_run(tmp_path)
    (run.path / "gates.json").mkdir()
    with pytest.raises(WriteError, match=r"gates\.json"):
        run.write_text("gates.json", "{}")
    assert not list(Path(run.path).glob(".*.tmp"))


def test_records_that_are_missing_are_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"metrics.jsonl is missing"):
        read_metrics(tmp_path / "metrics.jsonl")
