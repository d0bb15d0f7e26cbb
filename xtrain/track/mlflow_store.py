"""The MLflow store, opened: its client, its experiments, and how several processes share it.

Processes that create one sqlite database at once break it, so the first use in each is serialised
by a file lock. MLflow is imported inside functions only: it takes seconds that `xtrain --help`
does not have.
"""

import fcntl
import logging
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from xtrain.track.database import LOCK_WAIT_S, make_whole, refuse_locked
from xtrain.track.store_address import redacted, sqlite_path, store_uri

# What MLflow says the experiment is. Which pages its interface opens is, in 3.17, a setting of the
# browser (GenAI at first) or of the address: ?workflowType=machine_learning.
KIND = {"mlflow.experimentKind": "custom_model_development"}


def import_mlflow() -> None:
    """Import what a client needs, quietly, with short waits for a server that does not answer."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    # The last line on stdout is the verdict, not where a server shows the run.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking  # noqa: F401

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def open_store(uri: str, say: Callable[[str], None] | None = None):
    """An MlflowClient (tracking and registry) on the store, which is created if need be.

    say receives a line when a database had to be migrated or replaced; by default it is printed on
    stderr. Raises sqlite3.OperationalError when a sqlite store is locked by another program, and
    UsageError when it can never be opened.
    """
    import_mlflow()
    from mlflow.tracking import MlflowClient

    database = sqlite_path(uri)
    if database is None:
        return MlflowClient(uri, registry_uri=uri)
    with _first_use(database):
        refuse_locked(database)
        make_whole(database, say or (lambda line: print(f"xtrain: {line}", file=sys.stderr)))
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
        return _experiment_id(client, name)
    with _first_use(database):
        return _experiment_id(client, name, (database.parent / "mlruns" / name).as_uri())


def _experiment_id(client, name: str, place: str | None = None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        return client.create_experiment(name, artifact_location=place, tags=KIND)
    for key, value in KIND.items():
        if key not in found.tags:  # else somebody chose
            client.set_experiment_tag(found.experiment_id, key, value)
    return found.experiment_id


def one_line(error: Exception, uri: str | None = None) -> str:
    """An MLflow or database error, which may span pages, as one short line without secrets."""
    text = redacted(" ".join(str(error).split()), uri or store_uri())
    return text[:200] or type(error).__name__


@contextmanager
def _first_use(database: Path) -> Iterator[None]:
    database.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(f"{database}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
