"""Promotion: a run becomes `models:/xtrain-<run>@promoted` when its checks and phases all PASS.

The local ledger decides. MLflow gets a registered version with the fingerprints as tags, and the
alias, only after a PASS; when it cannot be reached the promotion stands, registry.json in the run
directory says what is owed, and `register_owed` pays it later. A refused run is not registered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gates.judging.judge import FAIL, NOT_MEASURED, PASS, CheckResult
from gates.judging.ledger import Ledger, check_record
from gates.judging.measure import Standing
from xtrain.track.mirror import Mirror
from xtrain.track.registry import register_or_owe
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
    mirror: Mirror | None = None,
    wait_s: float = 10.0,
) -> Promotion:
    """Decide, record the decision in the ledger, and on promotion register the run's export.

    results: the run's own checks. requires: what stands for each phase that the run names, on the
    device class it trained on. fingerprints: `config`, `code`, `data`, `checkpoint`. mirror: the
    run's open mirror, waited for up to wait_s; without one the registry is left alone.
    Raises UsageError when the ledger cannot be written.
    """
    reasons, notes, waivers = decide(results, requires, device=device, ledger=ledger)
    name = run.manifest["run"]
    ledger.append(
        {
            "kind": "promotion",
            "gate": name,
            "verdict": FAIL if reasons else PASS,
            "device": device,
            "run": str(run.path),
            "fingerprint": dict(fingerprints),
            "checks": [check_record(result) for result in results],
            "requires": {gate: known.verdict for gate, known in requires.items()},
            "waivers": waivers,
            "reasons": reasons,
        }
    )
    tags = _tags(requires, fingerprints, promoted=not reasons)
    if mirror is not None:
        for key, value in tags.items():
            mirror.tag(key, value)
    if reasons or mirror is None:
        return Promotion(not reasons, tuple(reasons), tuple(notes))
    mirror.flush(wait_s)
    version, note = register_or_owe(run, tags)
    return Promotion(True, (), tuple(filter(None, [*notes, note])), version)


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
    own = [result for result in results if result.check.applies_to(device)]
    reasons = [
        f"{each.check.name}: {each.verdict}" + (f" ({each.reason})" if each.reason else "")
        for each in own
        if each.verdict != PASS
    ]
    if not own:
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


def _tags(
    requires: Mapping[str, Standing], fingerprints: Mapping[str, str], *, promoted: bool
) -> dict[str, str]:
    tags = {"xtrain.verdict": PASS if promoted else "REFUSED"}
    tags |= {f"fingerprint.{name}": str(digest) for name, digest in fingerprints.items()}
    return tags | {f"gate.{gate}": known.verdict for gate, known in requires.items()}


def _why_not(gate: str, known: Standing) -> str:
    bad = [each for each in known.results if each.check.applies_to(known.device)]
    first = next((each for each in bad if each.verdict == known.verdict), None)
    detail = f" ({first.check.name}: {first.reason})" if first else ""
    if known.verdict == NOT_MEASURED and first is None:
        detail = f" on {known.device}; run xtrain-gate {gate}"
    return f"gate {gate}: {known.verdict}{detail}"
