"""Where the MLflow store is, and whether it ever can be there.

`sqlite:///<working directory>/mlflow.db` unless MLFLOW_TRACKING_URI names another. A URI is read by
the libraries that open it: SQLAlchemy says which file a database URI means, so that a check or a
lock is on the very file that MLflow opens. What can never work is a UsageError before a run
starts; a server that does not answer may come back, and then the mirror is merely behind.
"""

import os
import re
import sqlite3
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from xtrain.errors import UsageError

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # those that MLflow knows
_FORMS = "sqlite:///PATH (sqlite:////ABSOLUTE/PATH) or http://HOST:PORT"
_VARIABLE = "MLFLOW_TRACKING_URI"


def store_uri() -> str:
    """The tracking URI: MLFLOW_TRACKING_URI, else the sqlite file in the working directory."""
    given = os.environ.get(_VARIABLE)
    return given if given else sqlite_uri(Path.cwd() / "mlflow.db")


def sqlite_uri(path: Path) -> str:
    """The URI of a database file, whatever characters its path has."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def sqlite_path(uri: str) -> Path | None:
    """The file that a sqlite URI opens, None for any other store. UsageError if it opens none."""
    if _scheme(uri) != "sqlite":
        return None
    from sqlalchemy.exc import ArgumentError

    try:
        url = _parsed(uri)
        opened, _ = url.get_dialect()().create_connect_args(url)
    except ArgumentError:  # such as sqlite://x.db, whose x.db is a host
        raise _unusable(uri, "it names no file") from None
    if url.query.get("uri"):
        raise _unusable(uri, "uri=true is not supported")
    if opened[0] == ":memory:":
        raise _unusable(uri, "what is in memory only is gone with the process")
    return Path(opened[0])


def check_store(uri: str) -> None:
    """Raise UsageError for a store that can never work, whatever is waited for; writes nothing."""
    scheme = _scheme(uri)
    if scheme in ("", "file"):
        raise _unusable(uri, "MLflow keeps no runs in plain directories any more")
    if scheme in ("http", "https"):
        _check_server(uri)
    elif scheme in DATABASES:
        _check_driver(uri)
        database = sqlite_path(uri)
        if database is not None:
            _check_file(uri, database)
    elif scheme != "databricks" and scheme not in _of_plugins():
        raise _unusable(uri, f"MLflow has no store of the kind {scheme!r}")


def without_credentials(uri: str) -> str:
    """The URI as it may be written down: without user, password and query; a file as its path."""
    if _scheme(uri) == "sqlite":
        return sqlite_uri(sqlite_path(uri))
    return re.sub(r"[?#].*", "", re.sub(r"://.*@", "://", uri))


def redacted(text: str, uri: str) -> str:
    """A message with what is secret in the URI, or looks so in any other, replaced by ***."""
    user = re.search(r"://(.*)@", uri) if _scheme(uri) != "sqlite" else None
    secrets = [user[1], user[1].partition(":")[2]] if user else []
    secrets += re.findall(r"[?&][^=&]*(?:pass|pwd|token|secret|key)[^=&]*=([^&#]+)", uri)
    for secret in sorted(filter(None, [*secrets, *map(unquote, secrets)]), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return re.sub(r"://[^/\s'\"][^\s'\"]*@", "://***@", text)


def _scheme(uri: str) -> str:
    """sqlite of sqlite+pysqlite:///x.db; "" of a path."""
    if uri == "databricks":
        return uri
    found = re.match(r"([A-Za-z][A-Za-z0-9.-]*)(\+[A-Za-z0-9_.-]+)?:", uri)
    return found[1] if found else ""


def _parsed(uri: str):
    """The SQLAlchemy URL; its dialect exists. Raises UsageError and ArgumentError."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    try:
        url = make_url(uri)
    except (ArgumentError, ValueError):
        raise _unusable(uri, "it is no database URI") from None
    try:
        url.get_dialect()
    except NoSuchModuleError:
        raise _unusable(uri, f"SQLAlchemy has no driver {url.drivername}") from None
    return url


def _check_driver(uri: str) -> None:
    try:
        _parsed(uri).get_dialect().import_dbapi()
    except ImportError as error:
        why = f"its driver {error.name} is not installed; install that"
        raise _unusable(uri, why) from error


def _check_server(uri: str) -> None:
    try:
        parts = urlsplit(uri)
        is_sound = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_sound = False
    if not is_sound:
        raise _unusable(uri, "it names no server")


def _check_file(uri: str, database: Path) -> None:
    """Refuse what is no place for a database, or holds something else."""
    above = database.parent
    while not above.exists() and not above.is_symlink():
        above = above.parent
    if not above.is_dir():
        raise _unusable(uri, f"{above} is not a directory")
    if database.exists() and not database.is_file():
        raise _unusable(uri, f"{database} is not a file")
    for place in (above, database) if database.exists() else (above,):
        if not os.access(place, os.R_OK | os.W_OK):
            raise _unusable(uri, f"{place} cannot be written")
    if database.exists():
        try:
            _read_schema(database)
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise _unusable(uri, f"{database} is not an sqlite database: {error}") from error


def _read_schema(database: Path) -> None:
    # Through sqlite: closing a descriptor of the file would drop the locks that this process holds.
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _of_plugins() -> set[str]:
    return {each.name for each in entry_points(group="mlflow.tracking_store")}


def _unusable(uri: str, why: str) -> UsageError:
    if not os.environ.get(_VARIABLE):
        return UsageError(
            f"mlflow.db in the working directory cannot be used: {why}; move it away, or set "
            f"{_VARIABLE} to {_FORMS}"
        )
    shown = "".join(each if each.isprintable() else "?" for each in redacted(uri, uri))
    return UsageError(f"{_VARIABLE}={shown}: {redacted(why, uri)}; write {_FORMS}")
