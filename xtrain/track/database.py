"""MLflow's sqlite database, whole or not there: it is made and migrated under another name.

MLflow makes its tables in hundreds of steps, each of its own transaction, and a process that is
killed between two leaves a file that no later MLflow can open or mend. So a missing database is
made beside its place and renamed when whole, and an older one is migrated as a copy. One that is
half-made all the same (by another program, or an earlier MLflow) is moved aside by name and a
whole one takes its place; the mirror fills it again from the run directories.
"""

import os
import secrets
import sqlite3
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from xtrain.disk import sync
from xtrain.errors import UsageError
from xtrain.track.store_address import sqlite_uri

LOCK_WAIT_S = 1.0  # MLflow itself waits 20 s for a locked database
# While another program makes the same database, it is half-made and changes several times a second.
QUIET_S = 10.0

Say = Callable[[str], None]


def make_whole(database: Path, say: Say) -> None:
    """Make, migrate or replace the database, if it has to be; the caller holds the first-use lock.

    Raises sqlite3.OperationalError while another program has it, OSError, and UsageError for a
    database of a later MLflow.
    """
    for leftover in database.parent.glob(f".{database.name}.making-*"):
        leftover.unlink(missing_ok=True)  # its maker held the lock, and is dead
    if not database.exists() or database.stat().st_size == 0:
        _refuse_in_the_making(database)
        _put_in_place(_make(database), database)
        return
    revision = _revision(database)
    if revision == _head():
        return
    if revision is not None and not _is_known(revision):
        raise UsageError(
            f"{database} is of another version of MLflow (schema {revision}): install that one, "
            "or set MLFLOW_TRACKING_URI to another store"
        )
    _refuse_in_the_making(database)
    _migrate(database, say)


def was_rebuilt(database: Path) -> bool:
    """Whether a half-made database lies aside: its runs may have to be copied again."""
    return any(database.parent.glob(f"{database.name}.half-made-*"))


def refuse_locked(database: Path) -> None:
    """Raise within a second when a database is locked for writing, rather than in twenty."""
    if not database.exists():
        return
    with closing(sqlite3.connect(database, timeout=LOCK_WAIT_S)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


def _make(database: Path) -> Path:
    """An empty, whole database beside its place."""
    making = _making(database)
    _upgrade(making)
    return making


def _put_in_place(making: Path, database: Path) -> None:
    """Rename; what a deleted database left behind would be replayed into the one that is put here.

    Sqlite takes a -wal or -journal file of that name for its own, whatever database it was of.
    """
    if database.exists() and database.stat().st_size == 0:
        database.unlink()
    for suffix in ("-wal", "-shm", "-journal"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)
    sync(making)
    try:
        os.link(making, database)  # unlike a rename it never replaces what another program made
    except FileExistsError:
        making.unlink()
        raise sqlite3.OperationalError(f"another program is making {database}") from None
    except OSError:  # a file system without links
        os.rename(making, database)
    making.unlink(missing_ok=True)
    sync(database.parent)


def _migrate(database: Path, say: Say) -> None:
    """Bring a copy up to date and put it in place; the old one stays aside by name."""
    making = _making(database)
    with closing(sqlite3.connect(database, timeout=LOCK_WAIT_S, isolation_level=None)) as old:
        # Fails while another program has it open: its writes to the old file would be lost.
        mode = old.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
        if mode != "delete":
            raise sqlite3.OperationalError(f"{database} is of an older MLflow, and locked")
        old.execute("BEGIN IMMEDIATE")  # nobody writes from here on
        _copy(database, making)
        try:
            _upgrade(making)
            kind, verb = "before", "migrated"
        except Exception as error:
            if not _is_of_schema(error):
                raise
            making.unlink()
            making, kind, verb = _make(database), "half-made", "made anew"
        aside = _aside(database, kind)
        sync(making)
        _keep(database, aside)
        os.replace(making, database)
        sync(database.parent)
    was = "without some of MLflow's tables" if kind == "before" else "half-made"
    say(f"{database} was {was}: it is {verb}, the old one is kept as {aside.name}")


def _copy(database: Path, making: Path) -> None:
    # By a connection of its own: a backup waits for ever for the one that holds the lock.
    with closing(sqlite3.connect(database)) as old, closing(sqlite3.connect(making)) as copy:
        copy.execute("PRAGMA synchronous=OFF")
        old.backup(copy)


def _keep(database: Path, aside: Path) -> None:
    """Give the old file its second name; on a file system without links, its only one."""
    try:
        os.link(database, aside)
    except OSError:
        os.rename(database, aside)


def _refuse_in_the_making(database: Path) -> None:
    age = time.time() - database.stat().st_mtime if database.exists() else QUIET_S
    if 0 <= age < QUIET_S:
        raise sqlite3.OperationalError(
            f"{database} is not whole and changed {age:.0f} s ago: another program may be making it"
        )


def _upgrade(database: Path) -> None:
    """Let MLflow make or migrate all tables of a file that nobody else has."""
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import create_engine, event

    engine = create_engine(sqlite_uri(database))
    # It is synced once, when whole: until then a crash leaves nothing that anybody opens.
    event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what MLflow's own migrations could do better
            _initialize_tables(engine)
    finally:
        engine.dispose()


def _revision(database: Path) -> str | None:
    """The schema that the database says it has, None before its first."""
    with closing(sqlite3.connect(database, timeout=LOCK_WAIT_S)) as connection:
        try:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return None
            raise
    return rows[0][0] if rows else None


@cache
def _scripts():
    """MLflow's migrations, read once: they are those of the installed package."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    return ScriptDirectory.from_config(_get_alembic_config(""))


def _head() -> str:
    return _scripts().get_current_head()


def _is_known(revision: str) -> bool:
    from alembic.util import CommandError

    try:
        return _scripts().get_revision(revision) is not None
    except CommandError:
        return False


def _is_of_schema(error: Exception) -> bool:
    """Whether a migration met tables that are not as its schema says: half of a step was done."""
    cause = getattr(error, "orig", error)
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT) or isinstance(error, KeyError)


def _making(database: Path) -> Path:
    return database.with_name(f".{database.name}.making-{secrets.token_hex(4)}")


def _aside(database: Path, kind: str) -> Path:
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return database.with_name(f"{database.name}.{kind}-{stamp}-{secrets.token_hex(2)}")
