"""The model registry: promoted runs as `models:/xtrain-<run>@promoted`, in MLflow.

The ledger has decided before anything is registered. What MLflow cannot take at the time is owed:
registry.json in the run directory says what, and `register_owed` pays it later.
"""

from collections.abc import Mapping
from pathlib import Path

from xtrain.errors import UsageError
from xtrain.track.mlflow_copy import ID, Say, get_run, read_note, send_files
from xtrain.track.mlflow_store import one_line, open_store
from xtrain.track.run_dir import RunDir, all_runs
from xtrain.track.store_address import check_store, sqlite_path, store_uri
from xtrain.typed_json import NAME, read_json

ALIAS = "promoted"
REGISTRY = {"name": NAME, "tags": {str: str}, "version": (str, None), "run_id?": (str, None)}


def model_directory(uri: str) -> Path:
    """The local directory of `models:/NAME@ALIAS` (or /VERSION), fetched if need be.

    Raises UsageError when there is no such model, or MLflow cannot be reached.
    """
    name, found, alias = uri.removeprefix("models:/").partition("@")
    if not found:
        name, found, alias = name.partition("/")
    if not uri.startswith("models:/") or not name or not alias:
        raise UsageError(f"{uri}: write models:/NAME@ALIAS or models:/NAME/VERSION")
    check_store(store_uri())
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
        run_id = read_note(run.path).get("run_id")
        version = _register(run, registry["name"], tags, is_newest, run_id)
    except Exception as error:  # the ledger has decided; MLflow follows when it can
        return None, f"promoted, but the MLflow registry is behind ({one_line(error)})"
    run.write_json("registry.json", {**registry, "version": version, "run_id": run_id})
    return version, ""


def register_owed(root: str | Path, say: Say | None = None) -> list[Path]:
    """Register promoted runs that MLflow could not take at the time; return those registered.

    So is one whose copy in MLflow had to be made anew. say receives a line for each registry.json
    that is passed over because it is damaged.
    """
    paid = []
    for run in all_runs(root):
        try:
            owed = _read_registry(run.path)
        except UsageError as error:
            if say is not None:
                say(f"{error}; it is passed over")
            continue
        if owed.get("tags") and not (owed.get("version") and _is_of_copy(run, owed)):
            version, _ = register_or_owe(run, owed["tags"], is_newest=_is_newest(run, root))
            paid += [run.path] if version else []
    return paid


def _register(
    run: RunDir, name: str, tags: Mapping[str, str], is_newest: bool, run_id: str | None
) -> str:
    from mlflow.exceptions import MlflowException

    if run_id is None:
        raise ConnectionError("the run is not in MLflow yet")
    client = open_store(store_uri())
    mlflow_run = get_run(client, run_id)
    if mlflow_run is None or mlflow_run.data.tags.get(ID) != run.id:
        raise ConnectionError("the run is not in this MLflow store")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    if not client.list_artifacts(run_id, "export"):
        send_files(client, run_id, run.path, "export", "export")
    version = client.create_model_version(
        name,
        source=f"{mlflow_run.info.artifact_uri}/export",
        run_id=run_id,
        tags={**tags, ID: run.id},
    ).version
    if is_newest:
        client.set_registered_model_alias(name, ALIAS, version)
    return str(version)


def _is_newest(run: RunDir, root: str | Path) -> bool:
    """Whether no run of that name that started later is registered: no alias moves back."""
    others = all_runs(root, run.manifest["run"])
    later = [each for each in others if each.manifest["started"] > run.manifest["started"]]
    return not any(_version(each.path) for each in later)


def _version(path: Path) -> str | None:
    try:
        return _read_registry(path).get("version")
    except UsageError:
        return None


def _is_of_copy(run: RunDir, registry: Mapping) -> bool:
    """Whether what was registered is the copy that MLflow has now."""
    try:
        run_id = read_note(run.path).get("run_id")
    except UsageError:
        return True  # which copy that is will be known when the note has been made anew
    return registry.get("run_id") in (None, run_id)


def _read_registry(path: Path) -> dict:
    """The registry.json of a run directory, {} when it has none. UsageError when it is damaged."""
    try:
        return read_json(path / "registry.json", REGISTRY)
    except FileNotFoundError:
        return {}
