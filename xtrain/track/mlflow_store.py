"""The MLflow store: where it is, and how several processes open it without breaking it.

`sqlite:///<working directory>/mlflow.db` unless MLFLOW_TRACKING_URI names another. Processes that
create one sqlite database at once break it, so the first use in each is serialised by a file lock.
MLflow is imported inside functions only: it takes seconds that `xtrain --help` does not have.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

LOCK_WAIT_S = 1.0  # MLflow itself waits 20 s for a locked database


def store_uri() -> str:
    """The tracking URI: MLFLOW_TRACKING_URI, else the sqlite file in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI, None for any other store."""
    scheme, _, path = uri.partition(":///")
    return Path(path).absolute() if scheme == "sqlite" else None


def import_mlflow() -> None:
    """Import what a client needs, quietly, with short waits for a server that does not answer."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking  # noqa: F401

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def open_store(uri: str):
    """An MlflowClient (tracking and registry) on the store, which is created if need be.

    Raises sqlite3.OperationalError when a sqlite store is locked by another program.
    """
    import_mlflow()
    from mlflow.tracking import MlflowClient

    database = sqlite_path(uri)
    if database is None:
        return MlflowClient(uri, registry_uri=uri)
    with _first_use(database):
        refuse_locked(uri)
        client = MlflowClient(uri, registry_uri=uri)
        client.search_experiments(max_results=1)
        with closing(sqlite3.connect(database, timeout=LOCK_WAIT_S)) as connection:
            connection.execute(
                "PRAGMA journal_mode=WAL"
            )  # readers (the UI) do not block the writer
    return client


def experiment_id(client, uri: str, name: str) -> str:
    """The experiment of this name, made with an explicit artifact place beside a sqlite store."""
    database = sqlite_path(uri)
    if database is None:
        found = client.get_experiment_by_name(name)
        return found.experiment_id if found else client.create_experiment(name)
    with _first_use(database):
        found = client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        place = (database.parent / "mlruns" / name).as_uri()
        return client.create_experiment(name, artifact_location=place)


def refuse_locked(uri: str) -> None:
    """Raise within a second when a sqlite store is locked for writing, rather than in twenty."""
    database = sqlite_path(uri)
    if database is None or not database.exists():
        return
    with closing(sqlite3.connect(database, timeout=LOCK_WAIT_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def one_line(error: Exception) -> str:
    """An MLflow or database error, which may span pages, as one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _first_use(database: Path) -> Iterator[None]:
    descriptor = os.open(f"{database}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
