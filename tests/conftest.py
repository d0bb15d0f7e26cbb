"""Fixtures that several files share: a working directory with an MLflow store of its own."""

import shutil
import sqlite3
from contextlib import closing

import pytest


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """One empty MLflow database; making one takes a second, copying it nothing."""
    from xtrain.track.mlflow_store import open_store

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_store(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch, empty_store):
    """A working directory with an empty mlflow.db."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path
