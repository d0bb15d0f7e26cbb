"""The model registry: promoted runs as `models:/xtrain-<run>@promoted`, in MLflow.

The ledger has decided before anything is registered. What MLflow cannot take at the time is owed:
registry.json in the run directory asks for it, and `register_owed` pays it later, but only what the
ledger grants at that time: the file itself is a request that anybody could write.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xtrain.errors import UsageError
from xtrain.track.mlflow_copy import ID, Say, get_run, read_note, send_files
from xtrain.track.mlflow_store import one_line, open_store
from xtrain.track.run_dir import RunDir, all_runs
from xtrain.track.store_address import check_store, sqlite_path, store_uri
from xtrain.typed_json import NAME, read_json

ALIAS = "promoted"
REGISTRY = {"name": NAME, "tags": {str: str}, "version": (str, None), "run_id?": (str, None)}

PREFIX = "xtrain-"  # of the registered names that are runs


@dataclass(frozen=True)
class Grant:
    """What the ledger says of a run that may be registered: its tags, and whether it is the last
    that was promoted under its name, which is where the alias belongs."""

    tags: Mapping[str, str]
    is_newest: bool


# What the ledger grants to a run, None when it has not promoted what the directory holds.
Granted = Callable[[RunDir], Grant | None]


def model_directory(uri: str) -> Path:
    """The local directory of `models:/NAME@ALIAS` (or /VERSION), fetched if need be.

    Raises UsageError when there is no such model, or MLflow cannot be reached.
    """
    name, alias, has_alias = parse_model_uri(uri)
    check_store(store_uri())
    database = sqlite_path(store_uri())
    if database is not None and not database.exists():  # asking must not create one
        raise UsageError(f"{uri}: there is no {database.name} in this directory to look it up in")
    try:
        client = open_store(store_uri())
        find = client.get_model_version_by_alias if has_alias else client.get_model_version
        version = find(name, alias)
        from mlflow.artifacts import download_artifacts

        return Path(download_artifacts(version.source, tracking_uri=store_uri()))
    except Exception as error:  # MLflow raises many types, and all mean the same to the user
        raise UsageError(f"{uri}: {one_line(error)}") from error


def parse_model_uri(uri: str) -> tuple[str, str, bool]:
    """(name, alias or version, whether it is an alias). Raises UsageError for any other text."""
    name, has_alias, key = uri.removeprefix("models:/").partition("@")
    if not has_alias:
        name, _, key = name.partition("/")
    if not uri.startswith("models:/") or not name or not key:
        raise UsageError(f"{uri}: write models:/NAME@ALIAS or models:/NAME/VERSION")
    return name, key, bool(has_alias)


def register_or_owe(
    run: RunDir, tags: Mapping[str, str], *, is_newest: bool = True
) -> tuple[str | None, str]:
    """(version, "") or (None, a line that says that the registry is behind)."""
    registry = {"name": f"{PREFIX}{run.manifest['run']}", "tags": dict(tags), "version": None}
    run.write_json("registry.json", registry)
    try:
        run_id = read_note(run.path).get("run_id")
        version = _register(run, registry["name"], tags, is_newest, run_id)
    except Exception as error:  # the ledger has decided; MLflow follows when it can
        return None, f"promoted, but the MLflow registry is behind ({one_line(error)})"
    run.write_json("registry.json", {**registry, "version": version, "run_id": run_id})
    return version, ""


def register_owed(root: str | Path, granted: Granted, say: Say | None = None) -> list[Path]:
    """Register promoted runs that MLflow could not take at the time; return those registered.

    So is one whose copy in MLflow had to be made anew. granted: asked for each run that says it is
    owed a version; what it denies is left alone. say receives a line for each registry.json that is
    passed over because it is damaged.
    """
    paid = []
    for run in all_runs(root):
        try:
            owed = _read_registry(run.path)
        except UsageError as error:
            if say is not None:
                say(f"{error}; it is passed over")
            continue
        if not owed.get("tags") or (owed.get("version") and _is_of_copy(run, owed)):
            continue
        grant = granted(run)
        if grant is not None:
            version, _ = register_or_owe(run, grant.tags, is_newest=grant.is_newest)
            paid += [run.path] if version else []
    return paid


def export_digest(run_path: Path) -> str:
    """The digest of a run's export, "" when it has none."""
    return directory_digest(run_path / "export")


def directory_digest(root: Path) -> str:
    """sha256 over the names and contents of the files of a directory, "" when there are none."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return total.hexdigest() if files else ""


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
    known = client.search_model_versions(f"name='{name}' and run_id='{run_id}'")
    made_before = [each for each in known if each.tags.get(ID) == run.id]
    version = (
        made_before[0].version
        if made_before  # by a process that was stopped before it wrote so down
        else client.create_model_version(
            name,
            source=f"{mlflow_run.info.artifact_uri}/export",
            run_id=run_id,
            tags={**tags, ID: run.id},
        ).version
    )
    if is_newest:
        client.set_registered_model_alias(name, ALIAS, version)
    return str(version)


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
