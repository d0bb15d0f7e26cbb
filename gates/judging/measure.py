"""Measuring a gate, what stands recorded for it, and proving that it can fail.

measure_gate  -> Report: measured now
standing      -> Standing: the newest record that still holds, judged by the bars of today
settle        -> Standing by gate, measuring those that nothing holds for
prove_gate    -> Proof by defect: the check passes without the defect and rejects it
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gates.judging.evidence import HERE as EVIDENCE
from gates.judging.evidence import read_evidence
from gates.judging.find import GateFile
from gates.judging.fingerprint import code_fingerprint
from gates.judging.gate import Defect, Failed, Gate, Measure, Measured
from gates.judging.judge import (
    ERROR,
    FAIL,
    NOT_MEASURED,
    PASS,
    STALE,
    CheckResult,
    judge,
    verdict_of,
    verdict_on,
)
from gates.judging.ledger import Ledger, recorded_values, verdict_entry
from gates.judging.versions import changed_versions
from xtrain.config.check import Check
from xtrain.errors import UsageError
from xtrain.track.machine import device_facts

# (gate id, name of the data or None for all) -> (checks, title, claim), from a phase or run file
LoadChecks = Callable[[str, str | None], tuple[list[Check], str, str]]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Setting:
    """Where gates are measured: device class, outputs root, ledger, bars, committed evidence.

    say receives a line for each file that cannot be read.
    """

    device: str
    out: Path
    ledger: Ledger
    load_checks: LoadChecks
    evidence: Path = EVIDENCE
    say: Callable[[str], None] = _to_stderr


@dataclass(frozen=True)
class Report:
    """A gate measured now; fingerprint has `code` and, for a trained run, what was judged.

    bars: whose they were, of a trained run.
    """

    gate: str
    title: str
    device: str
    fingerprint: Mapping[str, str]
    results: Sequence[CheckResult]
    bars: str = ""

    @property
    def verdict(self) -> str:
        """The worst verdict of all checks, those of another device class included."""
        return verdict_of(self.results)

    def entry(self) -> dict:
        """The ledger entry of this report."""
        entry = verdict_entry(
            self.gate,
            self.results,
            device=self.device,
            fingerprint=self.fingerprint,
            facts=device_facts(self.device),
        )
        return {**entry, "bars": self.bars} if self.bars else entry


@dataclass(frozen=True)
class Standing:
    """What is known of a gate on a device class; date and source are "" when nothing is."""

    gate: str
    device: str
    verdict: str
    results: Sequence[CheckResult] = field(default_factory=tuple)
    date: str = ""
    source: str = ""


@dataclass(frozen=True)
class Proof:
    """What a seeded defect did to the check that must reject it."""

    defect: str
    rejects: str
    control: str  # the verdict without the defect
    verdict: str  # the verdict with it, "" when the defect could not be seeded
    reason: str = ""

    @property
    def outcome(self) -> str:
        """PASS when the check tells the defect from the sound code, FAIL when not."""
        if NOT_MEASURED in (self.control, self.verdict):
            return NOT_MEASURED
        return PASS if self.control == PASS and self.verdict in (FAIL, ERROR) else FAIL


def measure_gate(file: GateFile, setting: Setting) -> Report:
    """Run a gate's measurements on the setting's device and judge them; records nothing.

    Checks of the other device class take what stands recorded there.
    """
    gate = file.load()
    checks, title, _ = load_bars(file, setting)
    measured = _measure_all(gate, checks, setting)
    results = judge(checks, measured, setting.device)
    return Report(
        gate.id,
        title or gate.title,
        setting.device,
        gate_fingerprint(file, setting),
        _with_recorded(results, file, setting),
    )


def load_bars(file: GateFile, setting: Setting) -> tuple[list[Check], str, str]:
    """A gate's checks, those of the data its run was trained on, and its title and claim."""
    trained_on = file.load().trained_on
    data = trained_on(setting.device, setting.out) if trained_on else None
    return setting.load_checks(file.id, data)


def gate_fingerprint(file: GateFile, setting: Setting) -> dict[str, str]:
    """The gate's code fingerprint, and for a gate of a run those of the run it judges."""
    gate = file.load()
    fingerprint = {"code": code_fingerprint(file.path, gate.composes, device=setting.device)}
    if gate.artifact is not None:
        fingerprint |= gate.artifact(setting.device, setting.out)
    return fingerprint


def standing(file: GateFile, setting: Setting) -> Standing:
    """The newest record of the gate on the setting's device class that still holds.

    A ledger entry holds while code, config, data, checkpoint and export are the same; committed
    evidence while the code is; both while the deciding versions are. Without one that holds, the
    newest is STALE; without any, NOT MEASURED.
    """
    device = setting.device
    fingerprint = gate_fingerprint(file, setting)
    entry = setting.ledger.latest(file.id, device)
    committed = _committed(file, setting)
    records = []
    if entry:
        changed = [*_changed(entry, fingerprint), *changed_versions(entry, device)]
        records.append((changed, "ledger", entry))
    if committed:
        code = {"code": fingerprint["code"]}
        changed = [*_changed(committed, code), *changed_versions(committed, device)]
        records.append((changed, "evidence", committed))
    name = file.load().id
    if not records:
        return Standing(name, device, NOT_MEASURED)
    changed, source, newest = max(records, key=lambda each: (not each[0], each[2]["date"]))
    checks, _, _ = load_bars(file, setting)
    results = judge(checks, recorded_values(newest), device)
    if changed:
        reason = f"{' and '.join(changed)} changed since {newest['date']}"
        results = [replace(result, verdict=STALE, reason=reason) for result in results]
    return Standing(name, device, verdict_on(device, results), results, newest["date"], source)


def _committed(file: GateFile, setting: Setting) -> dict | None:
    """The committed evidence; what cannot be read is said, and speaks for nothing."""
    try:
        return read_evidence(file.id, setting.device, setting.evidence)
    except UsageError as error:
        setting.say(f"{error}; it does not count")
        return None


def settle(
    files: Iterable[GateFile], setting: Setting, say: Callable[[str], None] = lambda line: None
) -> dict[str, Standing]:
    """The standing of each gate, measuring and recording those that have none that holds."""
    settled = {}
    for file in files:
        known = standing(file, setting)
        if known.verdict in (STALE, NOT_MEASURED, ERROR):
            say(f"measuring gate {known.gate} on {setting.device}")
            known = record(measure_gate(file, setting), setting)
        settled[known.gate] = known
    return settled


def record(report: Report, setting: Setting) -> Standing:
    """Append a report to the ledger; what then stands for the gate."""
    entry = setting.ledger.append(report.entry())
    verdict = verdict_on(report.device, report.results)
    return Standing(report.gate, report.device, verdict, report.results, entry["date"], "ledger")


def prove_gate(file: GateFile, setting: Setting) -> list[Proof]:
    """Run every seeded defect of a gate. An empty list means that the gate has none."""
    gate = file.load()
    checks = {check.name: check for check in load_bars(file, setting)[0]}
    controls: dict[Measure, dict[str, Measured]] = {}
    for defect in gate.defects:
        if defect.measure not in controls:
            controls[defect.measure] = _measure_one(defect.measure, setting.device)
    return [
        _prove(defect, checks.get(defect.rejects), controls[defect.measure], setting.device)
        for defect in gate.defects
    ]


def _changed(entry: Mapping, fingerprint: Mapping[str, str]) -> list[str]:
    """The parts of a fingerprint that are not those of an entry."""
    return [part for part in fingerprint if entry["fingerprint"].get(part) != fingerprint[part]]


def _prove(defect: Defect, check: Check | None, control: dict[str, Measured], device: str) -> Proof:
    if check is None:
        return Proof(
            defect.name, defect.rejects, ERROR, ERROR, "the gate has no check of that name"
        )
    sound = _judge_measured(check, control, device)
    if sound.verdict == NOT_MEASURED:
        return Proof(defect.name, check.name, NOT_MEASURED, NOT_MEASURED, sound.reason)
    try:
        with defect.patch():
            spoilt = _judge_measured(check, _measure_one(defect.measure, device), device)
    except Exception as error:  # a patch that cannot be applied proves nothing
        reason = f"the patch raised {_describe(error)}"
        return Proof(defect.name, check.name, sound.verdict, "", reason)
    reason = spoilt.reason if sound.verdict == PASS else f"without the defect: {sound.reason}"
    return Proof(defect.name, check.name, sound.verdict, spoilt.verdict, reason)


def _judge_measured(check: Check, values: dict[str, Measured], device: str) -> CheckResult:
    return judge([check], _fill_failed([check], values), device)[0]


def _measure_all(gate: Gate, checks: Sequence[Check], setting: Setting) -> dict[str, Measured]:
    parts = [_measure_one(measure, setting.device) for measure in gate.measures]
    parts += [_measure_one(measure, setting.device, setting.out) for measure in gate.run_measures]
    measured = {name: value for part in parts for name, value in part.items()}
    raised = [part[_RAISED].reason for part in parts if _RAISED in part]
    if raised:
        measured[_RAISED] = Failed("; ".join(raised))
    return _fill_failed(checks, measured)


_RAISED = "(raised)"  # the key of a measurement's exception, which names no check


def _measure_one(measure: Callable, *arguments: object) -> dict[str, Measured]:
    try:
        return dict(measure(*arguments))
    except Exception as error:  # it becomes the verdict ERROR of its checks
        return {_RAISED: Failed(_describe(error))}


def _fill_failed(checks: Sequence[Check], measured: dict[str, Measured]) -> dict[str, Measured]:
    """Give the exception of a measurement to the checks that no other measurement has."""
    failed = measured.get(_RAISED)
    if failed is None:
        return measured
    return {**{check.name: failed for check in checks}, **measured}


def _with_recorded(
    results: Sequence[CheckResult], file: GateFile, setting: Setting
) -> list[CheckResult]:
    """Results with those of another device class replaced by what stands recorded there."""
    others = {r.check.device for r in results if not r.check.applies_to(setting.device)}
    recorded = {
        device: {
            each.check.name: (known, each)
            for known in [standing(file, replace(setting, device=device))]
            for each in known.results
        }
        for device in others
    }
    final = []
    for result in results:
        found = recorded.get(result.check.device, {}).get(result.check.name)
        if found:
            known, other = found
            reason = other.reason or f"{known.source} of {known.date}"
            result = replace(other, reason=reason)
        final.append(result)
    return final


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
