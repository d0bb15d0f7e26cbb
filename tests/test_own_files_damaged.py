"""Any damage to the project's own files ends in one line: no traceback, no endless wait.

Seeded mutations of a root with a promoted, a killed and a dead run, their ledger and evidence;
after each, everything that a new run, a resumed one, a gate and the report read is read. A refusal
is a UsageError or a WriteError; what is passed over is said.
"""

import copy
import json
import os
import random
import shutil
import signal
import sqlite3
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from gates.judging.evidence import read_evidence, write_evidence
from gates.judging.judge import judge
from gates.judging.ledger import Ledger, recorded_results, recorded_values, verdict_entry
from gates.judging.signing import content_hash
from pipelines.evaluate import read_result, row
from pipelines.report.evolution import plot_losses, run_row
from pipelines.report.plots import plot_run
from xtrain.config.check import Check
from xtrain.config.compose import compose, load_run, resolved_yaml
from xtrain.data.eval_set import read_eval_set
from xtrain.data.shards import ShardWriter
from xtrain.errors import UsageError, WriteError
from xtrain.track.mirror import Mirror, catch_up, reap_stale
from xtrain.track.registry import register_or_owe, register_owed
from xtrain.track.resume import choose_run, continue_run, take_over
from xtrain.track.run_dir import all_runs, open_run, read_metrics, read_run
from xtrain.train.checkpoint import load_manifest

CHECKS = [Check("error", "<=", 1e-6, unit="rel"), Check("speed", ">=", 2.0, device="cuda")]
CONFIG = {"seed": 1, "optim": {"lr": 0.004}}
LONGEST_S = 60  # of one reading of everything; it takes a tenth of a second
EVAL = {
    "loss": 2.0,
    "standard_error": 0.1,
    "perplexity": 7.4,
    "bits_per_byte": 1.0,
    "bits_per_byte_standard_error": 0.1,
    "tokens": 9,
    "model": {"from": "x"},
    "set": {"name": "sotu_v1", "sha256": "a" * 64},
}
STRANGE = [
    None,
    True,
    0,
    -1,
    7,
    2**63,
    10**400,
    0.5,
    -1e308,
    "",
    "abc",
    "../../x",
    "\0",
    "\ud800",
    "NaN",
    "9" * 300,
    "'; DROP TABLE runs; --",
    "\x1b[2J",
    [],
    [1],
    [[]],
    {},
    {"a": {"b": 1}},
    [None, {"path": "/etc/passwd", "folder": "x", "is_sent": False}],
]


def train_records(run):
    for step in (1, 2, 3):
        run.log(step, {"loss": 1 / step, "tokens": step * 8, "epoch": 0.1, "lr": 0.1, "tok_s": 9.0})
    run.log(3, {"loss": 0.5}, kind="eval")


def a_run(root, config_text, status):
    prints = {"config": "c0", "data": "d0"}
    run = open_run(
        root, "v0", "t6", CONFIG, config_text=config_text, fingerprints=prints, facts={"cores": 2}
    )
    train_records(run)
    (run.path / "checkpoints" / "2").mkdir(parents=True)
    run.close()
    if status != "RUNNING":
        run.set_status(status)
    return run


@pytest.fixture
def sound(here):
    """A root whose every own file is sound."""
    root = here / "outputs"
    text = resolved_yaml(load_run(compose(["run=v0", "device=cpu"])))
    finished = a_run(root, text, "RUNNING")
    (finished.path / "export").mkdir()
    (finished.path / "export" / "config.json").write_text("{}")
    mirror = Mirror(finished, interval_s=0.05).start()
    mirror.artifact(finished.path / "export", "export")
    mirror.flush()
    register_or_owe(finished, {"xtrain.verdict": "PASS"})
    finished.write_json("eval.json", EVAL)
    finished.set_status("FINISHED")
    assert mirror.close("FINISHED") == ""
    killed = a_run(root, text, "KILLED")
    note = json.loads((finished.path / "mirror.json").read_text())
    killed.write_json("mirror.json", {**note, "run_id": None, "status": "BEHIND"})
    a_run(root, text, "RUNNING").update(process="another-boot:1", resumes=[])
    results = judge(CHECKS, {"error": 1e-7}, "cpu")
    entry = verdict_entry("T5", results, device="cpu", fingerprint={"code": "a"}, facts={})
    ledger = Ledger(root / "ledger.jsonl")
    ledger.append(entry)
    ledger.waive("T7", who="Ada", why="no GPU", until=date(9999, 1, 1))
    ledger.append({"kind": "promotion", "gate": "v0", "verdict": "PASS", "device": "cpu"})
    ledger.append(entry)
    write_evidence(entry, root / "evidence")
    return root


def read_everything(root: Path, *, draws: bool, mirrors: bool = True) -> list[str]:
    """Read as the commands do; the refusals. Anything else that is raised is a bug.

    draws: whether the report is made and the curves are drawn too, which takes a second. mirrors:
    whether MLflow is brought up to date, most of the time of the rest.
    """
    said: list[str] = []
    ledger = Ledger(root / "ledger.jsonl")

    def verdicts():
        entry = ledger.latest("T5", "cpu")
        if entry is not None:
            recorded_results(entry)
            judge(CHECKS, recorded_values(entry), "cpu")

    def evidence():
        entry = read_evidence("T5", "cpu", root / "evidence")
        if entry is not None:
            judge(CHECKS, recorded_values(entry), "cpu")

    def report():
        rows = [run_row(run, ledger) for run in all_runs(root)]
        plot_losses(all_runs(root), root / "losses.png")
        return rows

    def choose(resume="auto"):
        return choose_run(
            root, "v0", "t6", CONFIG, resume=resume, typed=False, ignore=(), fingerprints={}
        )

    def go_on():
        found, _ = choose()
        if found is not None:
            continue_run(take_over(found), from_step=2, facts={}).release()
            if draws:
                plot_run(found)

    attempts = [
        lambda: reap_stale(root, said.append),
        *([lambda: catch_up(root, said.append)] if mirrors else []),
        *([lambda: register_owed(root, lambda run: None, said.append)] if mirrors else []),
        verdicts,
        evidence,
        lambda: ledger.waiver("T7", date(2026, 1, 1)),
        lambda: ledger.append({"kind": "promotion", "gate": "v", "verdict": "x", "device": "cpu"}),
        *([report] if draws else []),
    ]
    for directory in sorted(root.glob("v0/t6/*")):
        attempts += [
            lambda path=directory: read_run(path),
            lambda path=directory: choose(str(path)),
            lambda path=directory: read_metrics(path / "metrics.jsonl"),
            lambda path=directory: row(read_result(str(path))),
        ]
    for attempt in [*attempts, go_on]:
        try:
            attempt()
        except (UsageError, WriteError) as refusal:
            said.append(str(refusal))
    return said


def mutate(path: Path, random: random.Random) -> str:
    """Damage a file in one way; its description."""
    content = path.read_bytes()
    kind = random.choice(["bytes", "bytes", "value", "value", "value", "value", "cut", "file"])
    at = random.randrange(len(content) + 1)
    if kind == "cut":
        path.write_bytes(content[:at])
    elif kind == "bytes":
        noise = random.choice(
            [b"\0", b"\xff\xfe", b"\n", b"\n\n", b'"', b"{", b"1e999", b"\x1b[2J"]
        )
        path.write_bytes(content[:at] + noise + content[at + random.randrange(9) :])
    elif kind == "file":
        path.unlink()
        other = random.choice(["empty", "folder", "pipe", "endless", "loop", "nothing"])
        kind = other
        match other:
            case "empty":
                path.touch()
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "endless":
                path.symlink_to("/dev/zero")
            case "loop":
                path.symlink_to(path)
    else:
        path.write_text(change_a_value(path, content.decode(), random), "utf-8")
    return kind


def change_a_value(path: Path, text: str, random: random.Random) -> str:
    """The text with one value of one of its JSON objects replaced, lost or moved."""
    if path.suffix != ".jsonl":
        return json.dumps(changed(json.loads(text), random))
    entries = [json.loads(line) for line in text.splitlines()]
    at = random.randrange(len(entries))
    entries[at] = changed(entries[at], random)
    if path.name == "ledger.jsonl" and random.random() < 0.7:
        reseal(entries)
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def changed(value: object, random: random.Random) -> object:
    value = copy.deepcopy(value)
    places = list(every_place(value))
    if not places or random.random() < 0.05:
        return random.choice(STRANGE)
    inside, key = random.choice(places)
    match random.randrange(5):
        case 0:
            del inside[key]
        case 1:
            inside[key] = [[inside[key]]] * 2
        case _:
            inside[key] = random.choice(STRANGE)
    return value


def every_place(value: object):
    """(container, key) of every value below."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield value, key
        yield from every_place(inner)


def reseal(entries: list) -> None:
    """Chain the entries again, as somebody would who can run the same program."""
    previous = "0" * 64
    for entry in entries:
        if isinstance(entry, dict):
            try:
                entry["previous"] = previous
                entry["hash"] = previous = content_hash(entry)
            except ValueError:
                return


@contextmanager
def at_most(seconds: int):
    def late(number, frame):
        raise TimeoutError("reading does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def own_files(root: Path) -> list[Path]:
    names = ("manifest.json", "metrics.jsonl", "mirror.json", "registry.json", "eval.json")
    found = [path for name in names for path in root.glob(f"v0/t6/*/{name}")]
    return sorted([*found, root / "ledger.jsonl", root / "evidence" / "t5.json"])


def damage(sound: Path, seeds: range) -> list[str]:
    """What went wrong in reading the root with one of its files damaged, a seed after the other."""
    kept = sound.with_name("kept")
    shutil.copytree(sound, kept, symlinks=True)
    names = [path.relative_to(kept) for path in own_files(kept)]
    wrong = []
    for seed in seeds:
        shutil.rmtree(sound)
        shutil.copytree(kept, sound, symlinks=True)
        chosen = random.Random(seed)
        name = chosen.choice(names)
        kind = mutate(sound / name, chosen)
        try:
            with at_most(LONGEST_S):
                said = read_everything(
                    sound,
                    draws=seed % 100 == 0,
                    mirrors=seed % 4 == 0 or name.name in ("mirror.json", "registry.json"),
                )
            wrong += [f"{seed} {name} {kind}: {line!r}" for line in said if "\n" in line]
        except Exception as error:
            wrong.append(f"{seed} {name} {kind}: {type(error).__name__}: {error}")
    return wrong


def test_nothing_is_said_of_sound_files(sound):
    said = read_everything(sound, draws=True)
    assert all("not a result of phase=eval" in each or "FINISHED" in each for each in said), said


def test_a_damaged_own_file_ends_in_a_line(sound):
    assert damage(sound, range(40)) == []


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "folder"])
def test_no_manifest_that_is_no_file_is_read_or_waited_for(here, target):
    """A device never ends and fills the memory, a pipe is waited for."""
    manifest = here / "7" / "manifest.json"
    manifest.parent.mkdir()
    match target:
        case "pipe":
            os.mkfifo(manifest)
        case "folder":
            manifest.mkdir()
        case _:
            manifest.symlink_to(target)
    manifest.with_name("eval.json").symlink_to("manifest.json")
    with ShardWriter(manifest.with_name("tokens.bin"), vocab_size=9, tokenizer="a" * 64) as writer:
        writer.append(np.arange(9))
    for read in (load_manifest, lambda path: read_result(str(path)), read_eval_set):
        with at_most(LONGEST_S), pytest.raises(UsageError):
            read(manifest.parent)


@pytest.mark.slow
def test_five_thousand_damaged_own_files_end_in_a_line(sound):
    assert damage(sound, range(1_000, 6_000)) == []
    with closing(sqlite3.connect(sound.parent / "mlflow.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
