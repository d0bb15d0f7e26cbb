"""Promotion: a run becomes `models:/xtrain-<run>@promoted` when its checks and phases all PASS.

The local ledger decides, each time: MLflow gets a registered version with the fingerprints as tags,
and the alias, only after a PASS; when it cannot be reached the promotion stands, and registry.json
in the run directory asks for what is owed, which `register_owed` pays once the ledger `grants` it
again. A refused run is not registered. MLflow is told the head of the ledger with every decision,
so that entries cut off its end are missed by `xtrain-gate audit`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gates.judging.judge import FAIL, NOT_MEASURED, PASS, REPORTED, CheckResult
from gates.judging.ledger import Ledger, check_record
from gates.judging.measure import Standing
from gates.judging.signing import (
    KEY_VARIABLE,
    TRUST_VARIABLE,
    configured_signer,
    trusted_keys,
)
from xtrain.track.mirror import Mirror
from xtrain.track.registry import Grant, export_digest, register_or_owe
from xtrain.track.run_dir import RunDir


@dataclass(frozen=True)
class Promotion:
    """Whether a run was promoted, why not, what else to say, and its registered version if any."""

    promoted: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    version: str | None = None


def promote_or_refuse(
    run: RunDir,
    results: Sequence[CheckResult],
    *,
    requires: Mapping[str, Standing],
    device: str,
    ledger: Ledger,
    fingerprints: Mapping[str, str],
    bars: str = "",
    beside: Sequence[str] = (),
    mirror: Mirror | None = None,
    wait_s: float = 10.0,
) -> Promotion:
    """Decide, record the decision in the ledger, and on promotion register the run's export.

    results: the run's own checks. requires: what stands for each phase that the run names, on the
    device class it trained on. fingerprints: `config`, `code`, `data`, `checkpoint`. bars: whose
    bars they were. beside: what else refuses, a reason each. mirror: the run's open mirror, waited
    for up to wait_s; without one the registry is left alone.
    Raises UsageError when the ledger cannot be written.
    """
    reasons, notes, waivers = decide(results, requires, device=device, ledger=ledger)
    reasons = [*beside, *reasons]
    name = run.manifest["run"]
    fingerprints = {**fingerprints, "export": export_digest(run.path)}
    decision = {
        "kind": "promotion",
        "gate": name,
        "verdict": FAIL if reasons else PASS,
        "device": device,
        "run": str(run.path),
        "id": run.id,
        "fingerprint": dict(fingerprints),
        "bars": bars,
        "checks": [check_record(result) for result in results],
        "requires": {gate: known.verdict for gate, known in requires.items()},
        "waivers": waivers,
        "reasons": reasons,
    }
    entry = _made_before(ledger, decision) or ledger.append(decision)
    tags = _tags(entry)
    if mirror is not None:
        for key, value in {**tags, **_head(entry, ledger)}.items():
            mirror.tag(key, value)
    if reasons or mirror is None:
        return Promotion(not reasons, tuple(reasons), tuple(notes))
    mirror.flush(wait_s)
    promoted = [each for each in decisions(ledger, name) if each["verdict"] == PASS]
    is_newest = not promoted or promoted[-1]["id"] == run.id  # no alias moves back
    version, note = register_or_owe(run, tags, is_newest=is_newest)
    return Promotion(True, (), tuple(filter(None, [*notes, note])), version)


def _made_before(ledger: Ledger, decision: Mapping) -> dict | None:
    """The promotion of the same weights and export that stands, for one that is made again.

    A run that was stopped after it was promoted is measured once more when it goes on.
    """
    known = last_decision(ledger, decision["gate"], decision["id"])
    if known is None or known["verdict"] != PASS or decision["verdict"] != PASS:
        return None
    same = all(
        known["fingerprint"].get(part) == decision["fingerprint"].get(part)
        for part in ("checkpoint", "export")
    )
    return known if same and known["bars"] == decision["bars"] else None


def granted_by(ledger: Ledger) -> Callable[[RunDir], Grant | None]:
    """What a ledger grants to a run: asked before anything is registered.

    A run is granted its registration when the last decision on it is a promotion and its export is
    still the one that was judged. A ledger that does not hold grants nothing.
    """

    def granted(run: RunDir) -> Grant | None:
        name = run.manifest["run"]
        decision = last_decision(ledger, name, run.id)
        if decision is None or decision["verdict"] != PASS:
            return None
        if decision["fingerprint"].get("export") != export_digest(run.path):
            return None
        promoted = [e for e in decisions(ledger, name) if e["verdict"] == PASS]
        return Grant(_tags(decision), is_newest=promoted[-1]["id"] == run.id)

    return granted


def decisions(ledger: Ledger, name: str) -> list[dict]:
    """The promotions and refusals under a name that count; none when the ledger does not hold."""
    if ledger.verify():
        return []
    found = (e for e in ledger.believed() if e["kind"] == "promotion" and e.get("gate") == name)
    needed = {"id", "verdict", "fingerprint", "bars", "requires"}
    return [entry for entry in found if needed <= entry.keys()]


def last_decision(ledger: Ledger, name: str, run_id: str) -> dict | None:
    """The last promotion or refusal of a run that counts, None when there is none."""
    return next((e for e in reversed(decisions(ledger, name)) if e["id"] == run_id), None)


def decide(
    results: Sequence[CheckResult],
    requires: Mapping[str, Standing],
    *,
    device: str,
    ledger: Ledger,
) -> tuple[list[str], list[str], list[str]]:
    """(reasons to refuse, notes, hashes of the waivers used); no reason means promotion."""
    broken = ledger.verify()
    if broken:
        return [f"{broken}; move the file away and measure again"], [], []
    unsigned = _why_unsigned()
    if unsigned:
        return [unsigned], [], []
    own = [result for result in results if result.check.applies_to(device)]
    reasons = [
        f"{each.check.name}: {each.verdict}" + (f" ({each.reason})" if each.reason else "")
        for each in own
        if each.verdict not in (PASS, REPORTED)
    ]
    if not any(each.verdict == PASS for each in own) and not reasons:
        reasons.append(f"no check of the run was measured on {device}")
    notes, waivers = [], []
    today = datetime.now(UTC).date()
    for gate, known in requires.items():
        if known.device != device:
            reasons.append(f"gate {gate}: measured on {known.device}, not on {device}")
        elif known.verdict != PASS:
            waiver = ledger.waiver(gate, today)
            if waiver is None:
                reasons.append(_why_not(gate, known))
            else:
                who, why, until = waiver["who"], waiver["why"], waiver["until"]
                notes.append(f"gate {gate}: {known.verdict}, waived by {who} until {until}: {why}")
                waivers.append(waiver["hash"])
    return reasons, notes, waivers


def _tags(decision: Mapping) -> dict[str, str]:
    """What the registered version and the MLflow run say of a decision of the ledger."""
    promoted = decision["verdict"] == PASS
    tags = {"xtrain.verdict": PASS if promoted else "REFUSED", "xtrain.bars": decision["bars"]}
    tags |= {f"fingerprint.{name}": str(each) for name, each in decision["fingerprint"].items()}
    tags |= {f"gate.{gate}": verdict for gate, verdict in decision["requires"].items()}
    return tags | {"ledger.entry": decision["hash"]}


def _head(decision: Mapping, ledger: Ledger) -> dict[str, str]:
    """Tags by which a ledger that was shortened since is found."""
    if ledger.verify():
        return {}
    hashes = [entry["hash"] for entry in ledger.entries()]
    return {
        "ledger.head": decision["hash"],
        "ledger.length": str(hashes.index(decision["hash"]) + 1),
        "ledger.start": hashes[0],
        "ledger.path": str(ledger.path.resolve()),
    }


def _why_unsigned() -> str | None:
    """Where only signed verdicts count, this promotion must be signed by a key that counts."""
    trusted = trusted_keys()
    signer = None if trusted is None else configured_signer()
    if trusted is None or (signer is not None and signer.public in trusted):
        return None
    return f"{TRUST_VARIABLE} accepts signed verdicts only: {KEY_VARIABLE} names none of its keys"


def _why_not(gate: str, known: Standing) -> str:
    bad = [each for each in known.results if each.check.applies_to(known.device)]
    first = next((each for each in bad if each.verdict == known.verdict), None)
    detail = f" ({first.check.name}: {first.reason})" if first else ""
    if known.verdict == NOT_MEASURED and first is None:
        detail = f" on {known.device}; run xtrain-gate {gate}"
    return f"gate {gate}: {known.verdict}{detail}"
