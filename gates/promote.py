"""Promotion: a run becomes `models:/xtrain-<run>@promoted` when its checks and phases all PASS.

The local ledger decides. MLflow gets a registered version with the fingerprints as tags, and the
alias, only after a PASS; when it cannot be reached the promotion stands, registry.json in the run
directory says what is owed, and `register_owed` pays it later. A refused run is not registered.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gates.judge import FAIL, NOT_MEASURED, PASS, CheckResult
from gates.ledger import Ledger, check_record
from gates.measure import Standing
from xtrain.errors import UsageError
from xtrain.mirror import Mirror, read_note
from xtrain.mlflow_store import one_line, open_store, sqlite_path, store_uri
from xtrain.track import RunDir, all_runs

ALIAS = "promoted"


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
    version, note = _register_or_owe(run, tags)
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


def register_owed(root: str | Path) -> list[Path]:
    """Register promoted runs that MLflow could not take at the time; return those registered."""
    paid = []
    for run in all_runs(root):
        owed = _read_registry(run.path)
        if owed.get("tags") and not owed.get("version"):
            version, _ = _register_or_owe(run, owed["tags"], is_newest=_is_newest(run, root))
            paid += [run.path] if version else []
    return paid


def model_directory(uri: str) -> Path:
    """The local directory of `models:/NAME@ALIAS` (or /VERSION), fetched if need be.

    Raises UsageError when there is no such model, or MLflow cannot be reached.
    """
    name, found, alias = uri.removeprefix("models:/").partition("@")
    if not found:
        name, found, alias = name.partition("/")
    if not uri.startswith("models:/") or not name or not alias:
        raise UsageError(f"{uri}: write models:/NAME@ALIAS or models:/NAME/VERSION")
    database = sqlite_path(store_uri())
    if database is not None and not database.exists():  # asking must not create one
        raise UsageError(f"{uri}: there is no {database.name} in this directory to look it up in")
    try:
        client = open_store(store_uri())
        by_alias = client.get_model_version_by_alias if "@" in uri else client.get_model_version
        version = by_alias(name, alias)
        from mlflow.artifacts import download_artifacts

        return Path(download_artifacts(version.source, tracking_uri=store_uri()))
    except Exception as error:  # MLflow raises many types, and all mean the same to the user
        raise UsageError(f"{uri}: {one_line(error)}") from error


def _register_or_owe(
    run: RunDir, tags: Mapping[str, str], *, is_newest: bool = True
) -> tuple[str | None, str]:
    """(version, "") or (None, a line that says that the registry is behind)."""
    registry = {"name": f"xtrain-{run.manifest['run']}", "tags": dict(tags), "version": None}
    run.write_json("registry.json", registry)
    try:
        version = _register(run, registry["name"], tags, is_newest)
    except Exception as error:  # the ledger has decided; MLflow follows when it can
        return None, f"promoted, but the MLflow registry is behind ({one_line(error)})"
    run.write_json("registry.json", {**registry, "version": version})
    return version, ""


def _register(run: RunDir, name: str, tags: Mapping[str, str], is_newest: bool) -> str:
    from mlflow.exceptions import MlflowException

    note = read_note(run.path)
    if not note.get("run_id"):
        raise ConnectionError("the run is not in MLflow yet")
    client = open_store(note["store"])
    mlflow_run = client.get_run(note["run_id"])
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if not client.list_artifacts(note["run_id"], "export"):
        client.log_artifacts(note["run_id"], str(run.path / "export"), "export")
    version = client.create_model_version(
        name,
        source=f"{mlflow_run.info.artifact_uri}/export",
        run_id=note["run_id"],
        tags={**tags, "xtrain.id": run.id},
    ).version
    if is_newest:
        client.set_registered_model_alias(name, ALIAS, version)
    return str(version)


def _is_newest(run: RunDir, root: str | Path) -> bool:
    """Whether no run of that name that started later is registered: no alias moves back."""
    others = all_runs(root, run.manifest["run"])
    later = [each for each in others if each.manifest["started"] > run.manifest["started"]]
    return not any(_read_registry(each.path).get("version") for each in later)


def _read_registry(path: Path) -> dict:
    try:
        return json.loads((path / "registry.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


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
