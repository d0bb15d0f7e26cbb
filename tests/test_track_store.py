"""The MLflow store: what can never work is refused at once, and a database is whole or not there.

A killed process is a forked child that ends at its n-th event: an SQL statement, or an operation on
a file. Children are forked from one process that has imported MLflow, which takes seconds.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import xtrain
from pipelines.__main__ import main
from xtrain.errors import UsageError
from xtrain.track.mirror import catch_up
from xtrain.track.mlflow_copy import read_note
from xtrain.track.mlflow_store import open_store
from xtrain.track.registry import Grant, model_directory, register_owed
from xtrain.track.store_address import check_store, sqlite_path, store_uri

CHILD_ENV = {**os.environ, "PYTHONPATH": str(Path(xtrain.__file__).resolve().parents[1])}
NEVER = [
    "file:mlruns",
    "file:///tmp/mlruns",
    "/tmp/mlruns",
    "mlruns",
    "sqlite://x.db",
    "sqlite:x.db",
    "sqlite:/x.db",
    "sqlite://",
    "sqlite:///",
    "sqlite:///:memory:",
    "sqlite:///file:x.db?uri=true",
    "sqlite:////dev/null/x.db",
    "sqlite:///.",
    "sqlite:///text.txt",
    "postgresql://ada:pa55word@nowhere/db",
    "postgresql+none://nowhere/db",
    "oracle://nowhere/db",
    "http://",
    "http:/nowhere",
    "http://nowhere:99999",
    "http://[::1",
    "nonsense://nowhere",
    "uc:nowhere",
    " sqlite:///x.db",
]


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A working directory without a store."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "text.txt").write_text("this is not a database " * 100)
    return tmp_path


@pytest.mark.parametrize("uri", NEVER)
def test_a_store_that_can_never_work_is_refused_with_a_form_that_does(bare, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UsageError) as refused:
        check_store(store_uri())
    message = str(refused.value)
    assert message.startswith("MLFLOW_TRACKING_URI=") and "sqlite:///PATH" in message
    assert "pa55word" not in message and "\n" not in message
    assert os.listdir(bare) == ["text.txt"]


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:9", "https://a:b@nowhere/x", "sqlite:///new/dir/x.db", "databricks"]
)
def test_a_store_that_may_come_or_be_made_is_not_refused(bare, monkeypatch, uri):
    check_store(uri)
    assert os.listdir(bare) == ["text.txt"]


@pytest.mark.parametrize("phase", ["pretrain", "eval", "decode"])
def test_the_command_refuses_such_a_store_before_it_writes_anything(
    bare, monkeypatch, capsys, phase
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite://x.db")
    conf = str(Path(__file__).parent / "conf")
    arguments = ["--config-dir", conf, "run=tiny", "data.path=text.txt", "device=cpu"]
    assert main([*arguments, f"phase={phase}", "prompt=x"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("xtrain: MLFLOW_TRACKING_URI=sqlite://x.db: ")
    assert os.listdir(bare) == ["text.txt"]


def test_what_is_no_database_in_the_default_place_is_refused(bare):
    shutil.copy("text.txt", "mlflow.db")
    with pytest.raises(UsageError, match=r"mlflow\.db .*is not an sqlite database.*move it away"):
        check_store(store_uri())


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:///x.db", "x.db"),
        ("sqlite:///./new/../deep/x.db", "deep/x.db"),
        ("sqlite+pysqlite:///x.db", "x.db"),
        ("sqlite:///x.db?timeout=3", "x.db"),
        ("sqlite:///a%41b/x y.db", None),  # SQLAlchemy 2.1 reads %41 as A, 2.0 as it stands
        (None, "mlflow.db"),
    ],
)
def test_every_check_is_on_the_file_that_mlflow_opens(bare, monkeypatch, uri, file):
    here = bare / "a b#c%41?d"  # a working directory may be called anything
    here.mkdir()
    monkeypatch.chdir(here)
    if uri is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    path = sqlite_path(store_uri())

    client = open_store(store_uri())
    client.create_experiment("mine")

    assert file is None or path.resolve() == (here / file).resolve()
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name FROM experiments").fetchall()
    assert ("mine",) in rows
    assert Path(f"{path}.lock").exists()


# One child a line of stdin: what it does, and before which of its events it dies.
FORKS = """
import os, signal, sys
from pathlib import Path
from xtrain.track.mlflow_store import import_mlflow, open_store
from xtrain.track.store_address import sqlite_uri
import_mlflow()
import mlflow.store.db.utils as plain
import sqlalchemy

FILE_EVENTS = {"os.link", "os.rename", "os.remove", "sqlite3.connect", "open"}

def die_at(number):
    seen = 0
    def event(*arguments, **named):
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", event)
    def audit(name, arguments):
        if name in FILE_EVENTS and (name != "open" or ".db" in str(arguments[0])):
            event()
    sys.addaudithook(audit)
    return lambda: seen

for line in sys.stdin:
    what, number, database = line.split(maxsplit=2)
    database = database.strip()
    pid = os.fork()
    if pid == 0:
        seen = die_at(int(number))
        if what == "ours":
            open_store(sqlite_uri(Path(database)), say=lambda line: None)
        else:
            plain._initialize_tables(sqlalchemy.create_engine(sqlite_uri(Path(database))))
        print(seen(), flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        print("killed", flush=True)
"""


@pytest.fixture(scope="module")
def forks():
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        env=CHILD_ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def fork(what: str, number: int, database: Path) -> str:
            """ "killed" before that event, or the number of events when there are fewer."""
            process.stdin.write(f"{what} {number} {database}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield fork
        process.stdin.close()


def is_whole(database: Path) -> bool:
    with closing(sqlite3.connect(database)) as connection:
        (check,) = connection.execute("PRAGMA integrity_check").fetchone()
        versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        names = connection.execute("SELECT name FROM experiments").fetchall()
    from mlflow.store.db.utils import _get_latest_schema_revision

    return check == "ok" and versions == [(_get_latest_schema_revision(),)] and len(names) == 1


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "making" in name or "half-made" in name]


def kill_and_open_again(fork, database: Path, number: int) -> bool:
    """Kill a first start before an event, start again; False when it has fewer events."""
    database.parent.mkdir()
    if fork("ours", number, database) != "killed":
        return False
    assert fork("ours", 0, database) != "killed"
    assert is_whole(database) and leftovers(database.parent) == []
    shutil.rmtree(database.parent)
    return True


@pytest.mark.parametrize("number", [3, 800])
def test_a_kill_in_the_first_start_leaves_no_half_made_database(bare, forks, number):
    assert kill_and_open_again(forks, bare / "store" / "mlflow.db", number)


@pytest.mark.slow
def test_a_kill_at_any_event_of_the_first_start_leaves_no_half_made_database(bare, forks):
    database = bare / "store" / "mlflow.db"
    database.parent.mkdir()
    events = int(forks("ours", 0, database))
    shutil.rmtree(database.parent)
    last = range(events - 30, events + 1)  # where it is put in its place and opened
    for number in [*range(1, 20), *range(20, events - 30, 12), *last]:
        assert kill_and_open_again(forks, database, number), f"event {number} of {events}"


def age(database: Path) -> None:
    """As if nobody had touched it for a while."""
    for path in database.parent.glob(f"{database.name}*"):
        os.utime(path, (time.time() - 60, time.time() - 60))


def mend_half_made(fork, database: Path, number: int) -> bool:
    """Let MLflow alone be killed in making the database; False when that has fewer events."""
    database.parent.mkdir()
    if fork("plain", number, database) != "killed":
        return False
    age(database)
    said = []
    open_store(f"sqlite:///{database}", said.append)
    assert is_whole(database)
    aside = leftovers(database.parent)
    assert len(aside) <= 1 and all(name in said[0] for name in aside)
    shutil.rmtree(database.parent)
    return True


@pytest.mark.parametrize("number", [150, 300])
def test_a_database_that_mlflow_left_half_made_is_replaced(bare, forks, number):
    assert mend_half_made(forks, bare / "store" / "mlflow.db", number)


@pytest.mark.slow
def test_a_database_that_mlflow_left_half_made_anywhere_is_replaced(bare, forks):
    database = bare / "store" / "mlflow.db"
    number = 1
    while mend_half_made(forks, database, number):
        number += 9
    assert number > 200


def test_a_database_in_the_making_is_left_to_its_maker(bare, forks):
    database = bare / "mlflow.db"
    assert forks("plain", 150, database) == "killed"
    before = database.read_bytes()
    with pytest.raises(sqlite3.OperationalError, match="another program may be making it"):
        open_store(store_uri())
    assert database.read_bytes() == before


def set_revision(database: Path, revision: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    age(database)


PROMOTED = """
from xtrain.track.mirror import Mirror
from xtrain.track.registry import register_or_owe
from xtrain.track.run_dir import open_run
run = open_run("outputs", "v0", "t6", {}, config_text="", fingerprints={}, facts={})
(run.path / "export").mkdir()
(run.path / "export" / "config.json").write_text("{}")
mirror = Mirror(run, interval_s=0.05).start()
run.log(1, {"loss": 0.5})
mirror.artifact(run.path / "export", "export")
assert mirror.flush()
assert register_or_owe(run, {"xtrain.verdict": "PASS"}) == ("1", "")
run.set_status("FINISHED")
assert mirror.close("FINISHED") == ""
print(run.path, mirror.run_id)
"""


@pytest.mark.slow
def test_a_replaced_database_is_filled_again_from_the_run_directories(here):
    # A process of its own: one that has the database open keeps everybody from replacing it.
    command = [sys.executable, "-c", PROMOTED]
    done = subprocess.run(command, env=CHILD_ENV, stdout=subprocess.PIPE, text=True, check=True)
    path, first = done.stdout.split()
    set_revision(here / "mlflow.db", "451aebb31d03")  # its first: what follows exists already

    assert [str(each) for each in catch_up(here / "outputs")] == [path]

    client = open_store(store_uri())
    copy = client.get_run(read_note(Path(path))["run_id"])
    assert copy.info.run_id != first and copy.info.status == "FINISHED"
    assert copy.data.metrics == {"train/loss": 0.5}
    granted = Grant({"xtrain.verdict": "PASS"}, is_newest=True)
    paid = register_owed(here / "outputs", lambda run: granted)
    assert [str(each) for each in paid] == [path]
    assert (model_directory("models:/xtrain-v0@promoted") / "config.json").read_text() == "{}"
    assert catch_up(here / "outputs") == []
    assert register_owed(here / "outputs", lambda run: granted) == []
    assert len(leftovers(here)) == 1


def test_a_database_of_an_older_mlflow_is_migrated_as_a_copy_and_kept(bare):
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base
    from sqlalchemy import create_engine

    database = bare / "mlflow.db"
    engine = create_engine(f"sqlite:///{database}")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        config = _get_alembic_config(f"sqlite:///{database}")
        config.attributes["connection"] = connection
        command.upgrade(config, "0c779009ac13")
    engine.dispose()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("INSERT INTO experiments VALUES (7, 'old one', '/x', 'active')")
        connection.commit()
    age(database)
    said = []

    client = open_store(store_uri(), said.append)

    assert client.get_experiment("7").name == "old one"
    (kept,) = bare.glob("mlflow.db.before-*")
    assert len(said) == 1 and kept.name in said[0]


def test_a_database_of_a_later_mlflow_is_refused_and_left_alone(here, monkeypatch):
    set_revision(here / "mlflow.db", "ffffffffffff")
    with pytest.raises(UsageError, match="another version of MLflow"):
        open_store(store_uri())
    with pytest.raises(UsageError, match="another version of MLflow"):
        catch_up(here / "outputs")
    assert leftovers(here) == []


def test_what_a_deleted_database_left_behind_is_not_replayed_into_the_next(here, forks):
    with closing(sqlite3.connect(here / "mlflow.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE leftover (x)")
        connection.commit()
        shutil.copy("mlflow.db-wal", "kept")
    (here / "mlflow.db").unlink()
    (here / "kept").rename("mlflow.db-wal")

    assert forks("ours", 0, here / "mlflow.db") != "killed"

    assert is_whole(here / "mlflow.db")
    with closing(sqlite3.connect(here / "mlflow.db")) as connection:
        names = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert ("leftover",) not in names


def test_an_experiment_is_tagged_as_model_training_unless_somebody_chose(here):
    from xtrain.track.mlflow_store import experiment_id

    client = open_store(store_uri())
    older = client.create_experiment("xtrain-older")
    chosen = client.create_experiment("xtrain-chosen", tags={"mlflow.experimentKind": "mine"})
    kinds = []
    for name in ("xtrain-v0", "xtrain-older", "xtrain-chosen"):
        found = client.get_experiment(experiment_id(client, store_uri(), name))
        kinds.append(found.tags["mlflow.experimentKind"])
    assert kinds == ["custom_model_development", "custom_model_development", "mine"]
    assert {older, chosen} == {
        experiment_id(client, store_uri(), name) for name in ("xtrain-older", "xtrain-chosen")
    }
