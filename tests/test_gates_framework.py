"""Judging, finding, measuring and proving gates, on toy gates in a directory of the test."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from gates.__main__ import main
from gates.judging.command import exit_code
from gates.judging.evidence import read_evidence, write_evidence
from gates.judging.find import choose_gates, find_gates
from gates.judging.gate import Failed, NotMeasured
from gates.judging.judge import judge, verdict_of, verdict_on
from gates.judging.ledger import Ledger
from gates.judging.measure import Setting, measure_gate, prove_gate, record, settle, standing
from xtrain.config.check import Check
from xtrain.errors import UsageError

TOY = """
from contextlib import contextmanager
from gates.judging.gate import Defect, Gate, NotMeasured

SLOPE = 2.0


def measure_line(device):
    return {"slope": SLOPE, "rank": NotMeasured("no second device")}


@contextmanager
def flat_slope():
    global SLOPE
    SLOPE, kept = 0.0, SLOPE
    try:
        yield
    finally:
        SLOPE = kept


GATE = Gate(
    "T1",
    "a line",
    measures=(measure_line,),
    defects=(Defect("flat", "slope", measure_line, flat_slope),),
)
"""
SLOPE = Check("slope", ">=", 1.5, original="1.9", unit="x")
SPEED = Check("speed", ">=", 3.0, device="cuda")
RANK = Check("rank", "==", 0.0)


class Toys:
    """A directory of toy gates, their bars, and where they record."""

    def __init__(self, root):
        self.directory = root / "toys"
        self.directory.mkdir()
        self.out = root / "outputs"
        self.bars = {}
        self.ledger = Ledger(self.out / "ledger.jsonl")

    def add(self, name, text, checks):
        (self.directory / name).write_text(text)
        self.bars[name.split("_")[0]] = checks
        return find_gates(self.directory)[name.split("_")[0]]

    def load_checks(self, name, data=None):
        return self.bars[name], f"title of {name}", f"claim of {name}"

    def setting(self, device="cpu"):
        return Setting(device, self.out, self.ledger, self.load_checks, self.directory / "evidence")

    def run(self, *arguments):
        arguments = [*arguments, "--out", str(self.out)]
        return main(arguments, directory=self.directory, load_checks=self.load_checks)


@pytest.fixture
def toys(tmp_path):
    return Toys(tmp_path)


def judged(value, check=SLOPE, device="cpu"):
    return judge([check], {check.name: value}, device)[0]


# judging


@pytest.mark.parametrize(
    ("op", "value", "verdict"),
    [
        ("<=", 1.0, "PASS"),
        ("<=", 1.1, "FAIL"),
        (">=", 1.0, "PASS"),
        (">=", 0.9, "FAIL"),
        ("==", 1.0, "PASS"),
        ("==", math.nextafter(1.0, 2.0), "FAIL"),
        ("<", 1.0, "FAIL"),
        ("<", 0.9, "PASS"),
        (">", 1.0, "FAIL"),
        (">", 1.1, "PASS"),
    ],
)
def test_a_value_is_judged_by_its_bar(op, value, verdict):
    assert judged(value, Check("x", op, 1.0)).verdict == verdict


@pytest.mark.parametrize("op", ["<=", ">=", "==", "<", ">"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_value_that_is_not_finite_fails_every_bar_with_the_reason(op, value):
    result = judged(value, Check("x", op, 1.0))
    assert result.verdict == "FAIL"
    assert str(float(value)) in result.reason


def test_an_absent_value_fails_with_the_reason():
    result = judge([SLOPE], {"slop": 2.0}, "cpu")[0]
    assert (result.verdict, result.reason) == ("FAIL", "no value was measured")


def test_what_is_no_number_fails():
    assert judged("high").verdict == "FAIL"


def test_a_check_of_another_device_class_is_not_measured():
    result = judged(99.0, SPEED, "cpu")
    assert result.verdict == "NOT MEASURED" and "cuda" in result.reason and result.value is None


def test_reasons_of_not_measured_and_failed_values_are_kept():
    assert judged(NotMeasured("no torch")).reason == "no torch"
    result = judged(Failed("KeyError: 'x'"))
    assert (result.verdict, result.reason) == ("ERROR", "KeyError: 'x'")


def test_the_worst_verdict_is_the_verdict_of_all():
    every = [judged(2.0), judged(NotMeasured("")), judged(1.0), judged(Failed(""))]
    assert [verdict_of(every[: count + 1]) for count in range(4)] == [
        "PASS",
        "NOT MEASURED",
        "FAIL",
        "ERROR",
    ]
    assert verdict_of([]) == "NOT MEASURED"


def test_the_verdict_on_a_device_class_leaves_out_what_cannot_be_measured_there():
    results = judge([SLOPE, SPEED], {"slope": 2.0}, "cpu")
    assert verdict_of(results) == "NOT MEASURED"
    assert verdict_on("cpu", results) == "PASS"
    assert verdict_on("cpu", judge([SPEED], {}, "cpu")) == "NOT MEASURED"


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"op": "=<"}, "=<"), ({"device": "gpu"}, "gpu"), ({"bar": math.nan}, "nan")],
)
def test_a_malformed_check_is_refused_by_name(fields, named):
    with pytest.raises(UsageError, match=named):
        Check(**{"name": "x", "op": "<=", "bar": 1.0, **fields})


def test_a_number_without_a_bar_is_reported_and_counts_neither_way():
    reported = Check("ratio", "reported")
    found = judged(1.3, reported)
    assert (found.verdict, found.value) == ("REPORTED", 1.3)
    assert verdict_of([found]) == "NOT MEASURED"
    assert verdict_of([found, judged(2.0)]) == "PASS"
    assert judged(math.nan, reported).verdict == judge([reported], {}, "cpu")[0].verdict == "FAIL"
    with pytest.raises(UsageError, match="has no bar"):
        Check("ratio", "reported", 1.0)


# finding


def test_gates_are_found_by_file_name_without_importing_them(toys):
    for name in ("t13_recompute.py", "t2_tensor.py", "v0_run.py", "m2a_ops.py", "judge.py"):
        (toys.directory / name).write_text("raise RuntimeError('imported')")
    assert list(find_gates(toys.directory)) == ["t2", "t13", "v0", "m2a"]


def test_names_are_chosen_in_any_case_and_once(toys):
    for name in ("t13_recompute.py", "m2a_ops.py"):
        (toys.directory / name).write_text("")
    found = find_gates(toys.directory)
    assert [each.id for each in choose_gates(["M2a", "T13", "t13"], found)] == ["m2a", "t13"]
    assert [each.id for each in choose_gates(["ALL"], found)] == ["t13", "m2a"]


def test_an_unknown_gate_is_refused_with_the_nearest(toys):
    (toys.directory / "t13_recompute.py").write_text("")
    with pytest.raises(UsageError, match=r"unknown gate 'T31'; did you mean t13\?"):
        choose_gates(["T31"], find_gates(toys.directory))


def test_two_files_of_one_id_are_refused(toys):
    (toys.directory / "t1_a.py").write_text("")
    (toys.directory / "t1_b.py").write_text("")
    with pytest.raises(UsageError, match="both gate T1"):
        find_gates(toys.directory)


def test_a_gate_file_must_declare_its_own_id(toys):
    file = toys.add("t2_line.py", TOY, [])
    with pytest.raises(UsageError, match="declares no GATE with id T2"):
        file.load()


# measuring


def test_a_gate_is_measured_and_judged_by_its_bars(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED, RANK])
    report = measure_gate(file, toys.setting())
    assert [each.verdict for each in report.results] == ["PASS", "NOT MEASURED", "NOT MEASURED"]
    assert report.results[0].value == 2.0 and report.results[2].reason == "no second device"
    assert report.verdict == "NOT MEASURED" and len(report.fingerprint["code"]) == 64


def test_an_exception_is_the_error_of_the_checks_that_miss_their_value(toys):
    broken = "\ndef explode(device):\n    raise KeyError('q_norm')\n"
    text = TOY.replace("measures=(measure_line,)", "measures=(explode, measure_line)")
    file = toys.add("t1_line.py", text.replace("GATE =", f"{broken}\nGATE ="), [SLOPE, SPEED])
    toys.bars["t1"] = [SLOPE, Check("depth", "<=", 1.0)]
    results = measure_gate(file, toys.setting()).results
    assert [each.verdict for each in results] == ["PASS", "ERROR"]
    assert results[1].reason == "KeyError: 'q_norm'"


def test_a_measurement_of_runs_gets_the_outputs_root_and_names_its_artifact(toys):
    text = """
from gates.judging.gate import Gate
GATE = Gate(
    "V0",
    "a run",
    run_measures=(lambda device, out: {"slope": float(len(out.name))},),
    artifact=lambda device, out: {"checkpoint": "abc"},
)
"""
    file = toys.add("v0_run.py", text, [SLOPE])
    report = measure_gate(file, toys.setting())
    assert report.results[0].value == len("outputs")
    assert report.fingerprint["checkpoint"] == "abc"


# what stands


def test_nothing_recorded_is_not_measured(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE])
    assert standing(file, toys.setting()).verdict == "NOT MEASURED"


def test_a_record_holds_until_the_code_changes(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED])
    record(measure_gate(file, toys.setting()), toys.setting())
    assert standing(file, toys.setting()).verdict == "PASS"

    file.path.write_text(TOY + "\nCHANGED = True\n")

    stale = standing(file, toys.setting())
    assert stale.verdict == "STALE" and "code changed since" in stale.results[0].reason


def test_a_record_is_judged_by_the_bars_of_today(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE])
    record(measure_gate(file, toys.setting()), toys.setting())
    toys.bars["t1"] = [replace(SLOPE, bar=2.5)]
    assert standing(file, toys.setting()).verdict == "FAIL"


def test_settling_measures_only_what_does_not_stand(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE])
    said = []
    assert settle([file], toys.setting(), said.append)["T1"].verdict == "PASS"
    assert settle([file], toys.setting(), said.append)["T1"].verdict == "PASS"
    assert said == ["measuring gate T1 on cpu"]
    assert len(toys.ledger.entries()) == 1


def commit_cuda_evidence(toys, file, speed=4.0):
    setting = toys.setting("cuda")
    report = measure_gate(file, setting)
    results = judge(toys.bars[file.id], {"slope": 2.0, "speed": speed}, "cuda")
    write_evidence(replace(report, results=results).entry(), setting.evidence)


def test_evidence_counts_only_on_its_device_class(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED])
    commit_cuda_evidence(toys, file)
    assert standing(file, toys.setting("cuda")).verdict == "PASS"
    assert standing(file, toys.setting("cuda")).source == "evidence"
    assert standing(file, toys.setting("cpu")).verdict == "NOT MEASURED"


def test_evidence_speaks_for_the_checks_that_this_device_cannot_measure(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED])
    commit_cuda_evidence(toys, file)
    report = measure_gate(file, toys.setting())
    assert report.verdict == "PASS"
    assert report.results[1].value == 4.0 and "evidence of 20" in report.results[1].reason


def test_evidence_is_judged_by_the_bars_of_today(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED])
    commit_cuda_evidence(toys, file, speed=2.0)
    assert measure_gate(file, toys.setting()).verdict == "FAIL"


def test_evidence_of_other_code_is_stale(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED])
    commit_cuda_evidence(toys, file)
    file.path.write_text(TOY + "\nCHANGED = True\n")
    assert standing(file, toys.setting("cuda")).verdict == "STALE"
    assert [each.verdict for each in measure_gate(file, toys.setting()).results] == [
        "PASS",
        "STALE",
    ]


def test_evidence_keeps_one_entry_a_device_class_without_its_chain(toys):
    entry = {"gate": "T1", "verdict": "PASS", "date": "2026-01-01T00:00:00+00:00"}
    entry |= {"fingerprint": {}, "checks": [], "hash": "x"}
    for device in ("cuda", "cpu", "cuda"):
        path = write_evidence({**entry, "device": device}, toys.directory)
    stored = json.loads(path.read_text())
    assert path.name == "t1.json"
    assert [each["device"] for each in stored] == ["cpu", "cuda"] and "hash" not in stored[0]


def test_a_malformed_evidence_file_is_named(tmp_path):
    (tmp_path / "t1.json").write_text('{"device": "cuda"}')
    with pytest.raises(UsageError, match=r"t1\.json"):
        read_evidence("T1", "cuda", tmp_path)


@pytest.mark.parametrize("checks", [None, [{}], [[]], "text"])
def test_evidence_that_cannot_be_read_is_said_and_does_not_count(toys, checks):
    file = toys.add("t1_line.py", TOY, [SLOPE, SPEED])
    said = []
    setting = replace(toys.setting("cuda"), say=said.append)
    commit_cuda_evidence(toys, file)
    path = next(setting.evidence.glob("*.json"))
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([{**entry, "checks": checks}]))

    assert standing(file, setting).verdict == "NOT MEASURED"
    assert len(said) == 1 and f"{path.name} is damaged: [0].checks" in said[0]


# proving


def test_a_seeded_defect_is_rejected_and_undone(toys):
    file = toys.add("t1_line.py", TOY, [SLOPE])
    proof = prove_gate(file, toys.setting())[0]
    assert (proof.control, proof.verdict, proof.outcome) == ("PASS", "FAIL", "PASS")
    assert measure_gate(file, toys.setting()).verdict == "PASS"


def test_a_defect_that_the_bar_lets_through_is_no_proof(toys):
    file = toys.add("t1_line.py", TOY, [replace(SLOPE, bar=-1.0)])
    assert prove_gate(file, toys.setting())[0].outcome == "FAIL"


def test_a_check_that_rejects_the_sound_code_too_is_no_proof(toys):
    file = toys.add("t1_line.py", TOY, [replace(SLOPE, bar=9.0)])
    assert prove_gate(file, toys.setting())[0].outcome == "FAIL"


def test_a_defect_that_makes_the_measurement_raise_is_rejected(toys):
    text = TOY.replace("SLOPE, kept = 0.0, SLOPE", "SLOPE, kept = 1 / 0.0, SLOPE")
    raising = TOY.replace('{"slope": SLOPE,', '{"slope": 4 / SLOPE,')
    assert (
        prove_gate(toys.add("t1_line.py", raising, [SLOPE]), toys.setting())[0].verdict == "ERROR"
    )
    (toys.directory / "t1_line.py").unlink()
    broken_patch = toys.add("t1_patch.py", text, [SLOPE])
    assert prove_gate(broken_patch, toys.setting())[0].outcome == "FAIL"


def test_a_defect_must_name_a_check_of_its_gate(toys):
    file = toys.add("t1_line.py", TOY, [RANK])
    assert prove_gate(file, toys.setting())[0].outcome == "FAIL"


# the command


@pytest.mark.parametrize(
    ("checks", "code"),
    [([SLOPE], 0), ([replace(SLOPE, bar=9.0)], 1), ([SLOPE, SPEED], 3), ([SLOPE, RANK], 3)],
)
def test_exit_codes_follow_the_verdict(toys, capsys, checks, code):
    toys.add("t1_line.py", TOY, checks)
    assert toys.run("T1") == code
    assert len(toys.ledger.entries()) == 1


def test_a_failure_outweighs_what_was_not_measured():
    assert exit_code(["PASS", "NOT MEASURED", "FAIL"]) == 1
    assert exit_code(["PASS", "STALE"]) == 3


def test_the_table_is_plain_text_and_cuts_nothing(toys, capsys):
    long = replace(SLOPE, name="slope of the line " * 10)
    text = TOY.replace('"slope": SLOPE', f'"{long.name}": SLOPE')
    toys.add("t1_line.py", text, [long, SPEED])
    toys.run("T1")
    table = capsys.readouterr().out.splitlines()
    row = next(line for line in table if long.name in line)
    assert "2 x" in row and ">= 1.5" in row and "1.9" in row and "PASS" in row
    assert "\x1b" not in row and table[0].split()[:4] == ["gate", "check", "measured", "bar"]
    assert table[-1] == "T1 NOT MEASURED on cpu: title of t1"


def test_json_is_one_list_of_the_documented_form(toys, capsys):
    text = TOY.replace("    return {", '    print("noise")\n    return {')
    text = text.replace('"slope": SLOPE', '"slope": float("nan")')
    toys.add("t1_line.py", text, [SLOPE])
    assert toys.run("T1", "--json") == 1
    [report] = json.loads(capsys.readouterr().out)
    assert (report["gate"], report["verdict"], report["device"]) == ("T1", "FAIL", "cpu")
    [check] = report["checks"]
    wanted = {"name": "slope", "value": "NaN", "op": ">=", "bar": 1.5, "original": "1.9"}
    assert wanted.items() <= check.items() and check["verdict"] == "FAIL"


def test_prove_exits_0_when_every_defect_is_rejected(toys, capsys):
    toys.add("t1_line.py", TOY, [SLOPE])
    assert toys.run("t1", "--prove") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "flat" in line)
    assert row.split()[:6] == ["T1", "flat", "slope", "PASS", "FAIL", "yes"]
    assert not toys.ledger.path.exists()


def test_prove_exits_1_for_a_defect_that_is_let_through(toys):
    toys.add("t1_line.py", TOY, [replace(SLOPE, bar=-1.0)])
    assert toys.run("t1", "--prove") == 1


def test_prove_exits_1_for_a_gate_without_any_defect(toys, capsys):
    toys.add("t1_line.py", TOY.replace("defects=", "composes=() and "), [SLOPE])
    assert toys.run("t1", "--prove") == 1
    assert "T1 has no seeded defect" in capsys.readouterr().err


def test_list_names_claim_files_and_last_verdict(toys, capsys):
    toys.add("t1_line.py", TOY, [SLOPE])
    toys.run("T1")
    capsys.readouterr()
    assert toys.run("--list") == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith("T1") and "PASS 20" in row and "NOT MEASURED" in row
    assert "t1_line.py" in row and "claim of t1" in row


def test_verify_ledger_names_the_broken_line(toys, capsys):
    toys.add("t1_line.py", TOY, [SLOPE])
    toys.run("T1")
    assert toys.run("--verify-ledger") == 0
    text = toys.ledger.path.read_text()
    toys.ledger.path.write_text(text.replace('"value": 2.0', '"value": 3.0'))
    assert toys.run("--verify-ledger") == 1
    assert "line 1 is broken" in capsys.readouterr().out


def test_a_waiver_is_recorded_with_who_why_and_until(toys, capsys):
    toys.add("t1_line.py", TOY, [SLOPE])
    assert toys.run("T1", "--waive", "no GPU", "--who", "Ada", "--until", "2026-05-01") == 0
    [entry] = toys.ledger.entries()
    assert (entry["kind"], entry["who"], entry["until"]) == ("waiver", "Ada", "2026-05-01")
    assert toys.run("T1", "--waive", "no GPU") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["T99"], "unknown gate 'T99'"), ([], "name a gate"), (["T1", "--device", "cuda"], "cuda")],
)
def test_usage_errors_are_one_line_and_exit_2(toys, capsys, arguments, message):
    toys.add("t1_line.py", TOY, [SLOPE])
    assert toys.run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("xtrain-gate: ") and error.count("\n") == 1 and message in error
    assert not toys.ledger.path.exists()


def test_help_imports_nothing_slow():
    code = (
        "import sys\nfrom gates.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "slow = {'numpy', 'numba', 'mlflow', 'hydra', 'rich', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prove" in done.stdout


def test_evidence_names_the_command_and_not_where_it_lay(tmp_path):
    command = "/somewhere/gates/__main__.py T1 --device cuda"
    entry = {"gate": "T1", "verdict": "PASS", "device": "cuda", "date": "2026-01-01T00:00:00Z"}
    entry |= {"fingerprint": {}, "checks": []}
    write_evidence({**entry, "facts": {"command": command}}, tmp_path)
    kept = read_evidence("T1", "cuda", tmp_path)
    assert kept["facts"]["command"] == "python -m gates T1 --device cuda"
