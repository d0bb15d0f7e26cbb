"""The model registry: promoted runs as `models:/xtrain-<run>@promoted`, in MLflow.

The ledger has decided before anything is registered. What MLflow cannot take at the time is owed:
registry.json in the run directory says what, and `register_owed` pays it later.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from xtrain.errors import UsageError
from xtrain.track.mirror import read_note
from xtrain.track.mlflow_store import one_line, open_store, sqlite_path, store_uri
from xtrain.track.run_dir import RunDir, all_runs

ALIAS = "promoted"


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


def register_or_owe(
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


def register_owed(root: str | Path) -> list[Path]:
    """Register promoted runs that MLflow could not take at the time; return those registered."""
    paid = []
    for run in all_runs(root):
        owed = _read_registry(run.path)
        if owed.get("tags") and not owed.get("version"):
            version, _ = register_or_owe(run, owed["tags"], is_newest=_is_newest(run, root))
            paid += [run.path] if version else []
    return paid


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
