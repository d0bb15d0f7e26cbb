"""What `xtrain-gate` does, after its options were read."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gates.judging.evidence import write_evidence
from gates.judging.find import HERE, GateFile, choose_gates, find_gates
from gates.judging.fingerprint import walking_once
from gates.judging.judge import ERROR, FAIL, NOT_MEASURED, PASS, STALE
from gates.judging.ledger import Ledger, check_record
from gates.judging.measure import (
    LoadChecks,
    Report,
    Setting,
    load_bars,
    measure_gate,
    prove_gate,
    record,
    standing,
)
from gates.judging.signing import KEY_VARIABLE, TRUST_VARIABLE, make_key
from gates.judging.table import CHECK_COLUMNS, check_rows, print_table
from xtrain.command.streams import shown
from xtrain.engine.device import resolve
from xtrain.errors import UsageError


def run(
    options: argparse.Namespace,
    *,
    directory: Path = HERE,
    load_checks: LoadChecks | None = None,
) -> int:
    """Run the options of `gates.__main__` on the gates of a directory; return the exit code.

    load_checks: where bars come from; by default conf/, without any override of a command line.
    Raises UsageError.
    """
    ledger = Ledger.of(options.out)
    if options.verify_ledger:
        return _verify(ledger)
    match [name.lower() for name in options.names[:1]]:
        case ["audit"]:
            return _audit(ledger, options, directory / "evidence")
        case ["make-key"]:
            return _make_key(options.names[1:])
    found = find_gates(directory)
    if not options.names and not options.list:
        raise UsageError(f"name a gate, or all: {', '.join(found) or 'there are none'}")
    files = choose_gates(options.names or ["all"], found)
    if options.waive is not None:
        return _waive(files, options, ledger)
    setting = Setting(
        resolve(options.device),
        options.out,
        ledger,
        load_checks or _load_checks(),
        directory / "evidence",
    )
    if options.list:
        with walking_once():
            return _list(files, setting, options.json)
    if options.prove:
        return _prove(files, setting, options.json)
    return _measure(files, setting, options)


def exit_code(verdicts: Iterable[str]) -> int:
    """0 all PASS, 1 some FAIL or ERROR, 3 some NOT MEASURED or STALE."""
    seen = set(verdicts)
    if seen & {FAIL, ERROR}:
        return 1
    return 3 if seen & {NOT_MEASURED, STALE} else 0


def report_record(report: Report) -> dict:
    """A report as `--json` prints it."""
    return {
        "gate": report.gate,
        "verdict": report.verdict,
        "device": report.device,
        "fingerprint": dict(report.fingerprint),
        "checks": [check_record(result) for result in report.results],
    }


def _measure(files: Sequence[GateFile], setting: Setting, options: argparse.Namespace) -> int:
    reports = []
    for file in files:
        with _only_stderr():
            print(f"measuring {file.id} on {setting.device}", file=sys.stderr)
            report = measure_gate(file, setting)
        record(report, setting)
        if options.evidence:
            write_evidence(report.entry(), setting.evidence)
        reports.append(report)
    if options.json:
        print(json.dumps([report_record(each) for each in reports], indent=1, allow_nan=False))
    else:
        rows = [row for each in reports for row in check_rows(each.results, each.gate)]
        print_table(CHECK_COLUMNS, rows)
        print()
        for each in reports:
            print(f"{each.gate} {each.verdict} on {each.device}: {each.title}")
    return exit_code(each.verdict for each in reports)


def _prove(files: Sequence[GateFile], setting: Setting, as_json: bool) -> int:
    proofs = {}
    for file in files:
        with _only_stderr():
            print(f"proving {file.id} on {setting.device}", file=sys.stderr)
            proofs[file.load().id] = prove_gate(file, setting)
    empty = [gate for gate, found in proofs.items() if not found]
    if as_json:
        fields = ("defect", "rejects", "control", "verdict", "outcome", "reason")
        listed = [
            {
                "gate": gate,
                "device": setting.device,
                "defects": [{name: getattr(each, name) for name in fields} for each in found],
            }
            for gate, found in proofs.items()
        ]
        print(json.dumps(listed, indent=1))
    else:
        rows = [
            [gate, p.defect, p.rejects, p.control, p.verdict, _rejected(p.outcome), p.reason]
            for gate, found in proofs.items()
            for p in found
        ]
        columns = ("gate", "defect", "check", "without it", "with it", "rejected", "why")
        print_table(columns, rows)
    for gate in empty:
        print(f"xtrain-gate: {gate} has no seeded defect", file=sys.stderr)
    outcomes = [proof.outcome for found in proofs.values() for proof in found]
    return exit_code([*outcomes, *(FAIL for _ in empty)])


def _rejected(outcome: str) -> str:
    return {PASS: "yes", FAIL: "NO"}.get(outcome, outcome)


def _list(files: Sequence[GateFile], setting: Setting, as_json: bool) -> int:
    rows, listed = [], []
    for file in files:
        _, title, claim = load_bars(file, setting)
        devices = ("cpu", "cuda")
        known = {device: standing(file, replace(setting, device=device)) for device in devices}
        gate = file.load()
        listed.append(
            {
                "gate": gate.id,
                "title": title or gate.title,
                "claim": claim,
                "files": [_shown(file.path), _shown(_conf_file(file.id))],
                "verdicts": {device: each.verdict for device, each in known.items()},
            }
        )
        verdicts = [f"{each.verdict} {each.date[:10]}".rstrip() for each in known.values()]
        rows.append([gate.id, *verdicts, *listed[-1]["files"], claim or title or gate.title])
    if as_json:
        print(json.dumps(listed, indent=1))
    else:
        print_table(("gate", "cpu", "cuda", "measures", "bars", "claim"), rows)
    return 0


def _conf_file(gate: str) -> Path | None:
    from xtrain.config.files import file_of

    places = (file_of(group, gate) for group in ("phase", "run", "gate"))
    return next(filter(None, places), None)


def _shown(path: Path | None) -> str:
    if path is None:
        return ""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _verify(ledger: Ledger) -> int:
    broken = ledger.verify()
    if broken:
        print(broken)
        return 1
    print(f"{ledger.path}: {len(ledger.entries())} entries, the chain holds")
    return 0


def _audit(ledger: Ledger, options: argparse.Namespace, evidence: Path) -> int:
    from gates.judging.audit import audit

    if len(options.names) > 1:
        raise UsageError(f"audit takes no name, not {options.names[1]!r}")
    found = audit(ledger, evidence)
    if options.json:
        print(json.dumps({"problems": found.problems, "seen": found.seen}, indent=1))
    else:
        print(shown("\n".join([*found.problems, f"looked at {', '.join(found.seen)}"])))
        print("audit " + (f"{FAIL}: {len(found.problems)} problems" if found.problems else PASS))
    return 1 if found.problems else 0


def _make_key(names: Sequence[str]) -> int:
    if len(names) != 1:
        raise UsageError("make-key takes one FILE, which the private key is written to")
    public = make_key(Path(names[0]))
    print(public)
    print(
        f"{KEY_VARIABLE}={names[0]} signs with it; put the line above into the file that "
        f"{TRUST_VARIABLE} names to accept what it signed",
        file=sys.stderr,
    )
    return 0


def _waive(files: Sequence[GateFile], options: argparse.Namespace, ledger: Ledger) -> int:
    if not options.who or not options.until:
        raise UsageError("--waive WHY needs --who NAME and --until YYYY-MM-DD")
    for file in files:
        ledger.waive(file.id, who=options.who, why=options.waive, until=options.until)
        print(shown(f"{file.id} is waived until {options.until} by {options.who}: {options.waive}"))
    return 0


def _load_checks() -> LoadChecks:
    from xtrain.config.bars import gate_checks

    return gate_checks


@contextlib.contextmanager
def _only_stderr() -> Iterator[None]:
    """What measurements print goes to stderr: stdout is the table's or the JSON list's."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
