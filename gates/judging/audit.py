"""`xtrain-gate audit`: whether the ledger, MLflow and the committed evidence tell one story.

What a chain alone cannot show is looked for here: entries cut off the ledger's end (MLflow keeps
the head of every decision), a registered version or an alias that the ledger never promoted, an
alias that was moved, an export that is not the one that was judged, an entry or an evidence file
that no trusted key signed. Nothing is changed, and a store that does not exist is not made.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gates.judging.evidence import HERE as EVIDENCE
from gates.judging.evidence import unbelieved_evidence
from gates.judging.judge import PASS
from gates.judging.ledger import Ledger
from gates.judging.promote import decisions
from gates.judging.signing import is_believed, trusted_keys
from xtrain.errors import UsageError
from xtrain.track.mlflow_store import one_line, open_store
from xtrain.track.registry import (
    ALIAS,
    PREFIX,
    directory_digest,
    model_directory,
    parse_model_uri,
)
from xtrain.track.store_address import sqlite_path, store_uri


@dataclass(frozen=True)
class Audit:
    """What was found wrong, a line each, and what was looked at."""

    problems: tuple[str, ...]
    seen: tuple[str, ...]


def audit(ledger: Ledger, evidence: Path = EVIDENCE) -> Audit:
    """Compare ledger, MLflow and evidence. Raises UsageError when MLflow cannot be asked."""
    broken = ledger.verify()
    entries = [] if broken else ledger.entries()
    problems = [broken] if broken else []
    seen = [f"{ledger.path}: {len(entries)} entries"]
    trusted = trusted_keys()
    if trusted is not None:
        problems += [
            f"{ledger.path} line {number}: not signed by a trusted key"
            for number, entry in enumerate(entries, 1)
            if not is_believed(entry, trusted)
        ]
        problems += unbelieved_evidence(trusted, evidence)
        seen.append(f"{len(trusted)} trusted keys")
    client = _client()
    if client is None:
        return Audit(tuple(problems), (*seen, "no MLflow store"))
    try:
        heads = list(_heads(client, ledger, entries))
        versions = list(_registered(client))
    except Exception as error:  # MLflow raises many types, and all mean the same to the user
        raise UsageError(f"MLflow cannot be asked: {one_line(error)}") from error
    problems += _cut_off(heads, ledger, entries)
    for version, has_alias in versions:
        wrong = _why_foreign(version, ledger, has_alias=has_alias)
        problems += [wrong] if wrong else []
    seen += [f"{len(heads)} decisions known to MLflow", f"{len(versions)} registered versions"]
    return Audit(tuple(problems), tuple(seen))


def why_foreign(uri: str, ledger: Ledger) -> str | None:
    """Why `models:/xtrain-RUN@ALIAS` (or /VERSION) is not what the ledger promoted, else None.

    Names of other models are nobody's promotions and always None. Raises UsageError when there is
    no such model or MLflow cannot be asked.
    """
    name, key, by_alias = parse_model_uri(uri)
    if not name.startswith(PREFIX):
        return None
    client = _client()
    if client is None:
        raise UsageError(f"{uri}: there is no MLflow store here to look it up in")
    try:
        find = client.get_model_version_by_alias if by_alias else client.get_model_version
        version = find(name, key)
    except Exception as error:  # as above
        raise UsageError(f"{uri}: {one_line(error)}") from error
    return _why_foreign(version, ledger, has_alias=by_alias and key == ALIAS)


def refuse_foreign(origin: str | None, ledger: Ledger) -> None:
    """Raise UsageError when weights to train from are called promoted and the ledger denies it."""
    if origin is None or not origin.startswith("models:/"):
        return
    wrong = why_foreign(origin, ledger)
    if wrong:
        raise UsageError(f"init_from={origin}: {wrong}; init_from=DIR takes weights at their word")


def _why_foreign(version, ledger: Ledger, *, has_alias: bool) -> str | None:
    name = version.name.removeprefix(PREFIX)
    what = f"models:/{version.name}/{version.version}"
    promoted = [entry for entry in decisions(ledger, name) if entry["verdict"] == PASS]
    hashes = [entry["hash"] for entry in promoted]
    entry = version.tags.get("ledger.entry")
    if entry not in hashes:
        return f"{what} is foreign: {ledger.path} promoted no such run"
    decision = promoted[hashes.index(entry)]
    if version.tags.get("xtrain.id") != decision["id"]:
        return f"{what} says it is of run {version.tags.get('xtrain.id')}, not {decision['id']}"
    exported = directory_digest(model_directory(what))
    if exported != decision["fingerprint"].get("export"):
        return f"{what} holds another export than the one that was judged"
    if has_alias and decision["id"] != promoted[-1]["id"]:
        return f"@{ALIAS} was moved: it is on {what}, not on run {promoted[-1]['id']}"
    return None


def _heads(client, ledger: Ledger, entries: list[Mapping]) -> Iterator[Mapping[str, str]]:
    """The tags of MLflow runs that name a head of this ledger: the same file or the same start."""
    start = entries[0]["hash"] if entries else ""
    place = str(ledger.path.resolve())
    experiments = [each.experiment_id for each in client.search_experiments()]
    token = None
    while True:
        found = client.search_runs(experiments, "tags.`ledger.head` != ''", page_token=token)
        for run in found:
            tags = run.data.tags
            if tags.get("ledger.path") == place or tags.get("ledger.start") == start:
                yield tags
        token = found.token
        if not token:
            return


def _cut_off(heads: list[Mapping[str, str]], ledger: Ledger, entries: list[Mapping]) -> list[str]:
    """A line for each head that the ledger no longer has where it was."""
    problems = []
    for tags in heads:
        number = int(tags["ledger.length"])
        here = entries[number - 1]["hash"] if number <= len(entries) else ""
        if here != tags["ledger.head"]:
            was = f"MLflow knows entry {number}, {tags['ledger.head'][:12]}"
            problems.append(f"{ledger.path} was shortened or replaced: {was}; it is not there")
    return problems


def _registered(client) -> Iterator[tuple[object, bool]]:
    """Every registered version of a run, and whether it has the alias `promoted`."""
    for model in client.search_registered_models(max_results=1000):
        if model.name.startswith(PREFIX):
            promoted = str(model.aliases.get(ALIAS, ""))
            for version in client.search_model_versions(f"name='{model.name}'"):
                yield version, str(version.version) == promoted


def _client():
    database = sqlite_path(store_uri())
    if database is not None and not database.exists():
        return None
    try:
        return open_store(store_uri())
    except Exception as error:  # as above
        raise UsageError(f"MLflow cannot be asked: {one_line(error)}") from error
