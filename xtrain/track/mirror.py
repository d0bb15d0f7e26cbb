"""MLflow as the mirror of a run directory: it reads metrics.jsonl and copies it, never the reverse.

One background thread tails metrics.jsonl and writes it in batches, so a training step pays nothing
and a slow, locked or unreachable database stops nothing. A resumed run goes on under its MLflow
run id, and a mirror that fell behind is completed later by the same code (`catch_up`).
"""

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from xtrain.command.streams import shown
from xtrain.errors import UsageError
from xtrain.track.database import was_rebuilt
from xtrain.track.mlflow_copy import BEHIND, Artifact, Copy, Say, get_run, read_note
from xtrain.track.mlflow_store import import_mlflow, one_line, open_store
from xtrain.track.resume import mark_killed, stale_runs
from xtrain.track.run_dir import ENDED, RUNNING, RunDir, all_runs
from xtrain.track.store_address import sqlite_path, store_uri, without_credentials


class Mirror:
    """The MLflow run of one run directory; every method returns at once except flush and close."""

    def __init__(
        self,
        run: RunDir,
        *,
        params: Mapping | None = None,
        tags: Mapping[str, str] | None = None,
        say: Say | None = None,
        interval_s: float = 1.0,
    ):
        """params: the config, nested or flat; default the manifest's.

        say receives the one warning line there may be; the default prints it on stderr.
        """
        self._say = say or (lambda line: print(f"xtrain: {shown(line)}", file=sys.stderr))
        self._copy = Copy(
            run, store_uri(), params or run.manifest.get("config", {}), tags or {}, self._say
        )
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._asked = self._answered = 0
        self._problem = ""
        self._warned = self._closing = False
        self._thread = threading.Thread(target=self._work, name="mlflow-mirror", daemon=True)

    @property
    def run_id(self) -> str | None:
        """The MLflow run id, None until the store was reached."""
        return self._copy.run_id

    def start(self) -> "Mirror":
        """Import MLflow in the calling thread (two threads importing may deadlock), then go."""
        import_mlflow()
        self._copy.write_note(RUNNING)
        self._thread.start()
        return self

    def tag(self, key: str, value: str) -> None:
        """Set a tag of the MLflow run."""
        self._copy.tags[key] = str(value)

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """Copy a file or directory of the run to the MLflow artifacts, soon.

        Raises FileNotFoundError, and ValueError for one that is not inside the run directory.
        """
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such file to copy to MLflow")
        inside = Path(path).resolve().relative_to(self._copy.run.path.resolve())
        self._copy.artifacts.append(Artifact(str(inside), folder))

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything up to now is in MLflow; False when it is not by then."""
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._answered >= wanted, timeout_s)

    def close(self, status: str, timeout_s: float = 10.0) -> str:
        """Copy the rest, set the MLflow run's status (FINISHED, FAILED or KILLED) and stop.

        Returns "" or one line that says what is not in MLflow; `catch_up` completes it later.
        """
        self._copy.status = status
        done = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if done:
            self._thread.join()
            return self._copy.left_out()
        self._copy.write_note(BEHIND)
        reason = self._problem or "it has not answered yet"
        lines = f"MLflow is {self._copy.lines_behind()} lines behind ({reason})"
        return "; ".join(
            filter(None, [f"{lines}; the next start completes it", self._copy.left_out()])
        )

    def _work(self) -> None:
        while not self._closing:
            with self._changed:
                asked = self._asked
            try:
                self._copy.bring_up_to_date()
                self._problem = ""
            except Exception as error:  # whatever MLflow raises, training goes on
                self._problem = one_line(error)
                if not self._warned:
                    self._say(f"MLflow cannot be written ({self._problem}); training goes on")
                self._warned = True
            with self._changed:
                if not self._problem:
                    self._answered = asked
                self._changed.notify_all()
                ahead = self._asked > self._answered and not self._problem
                if not ahead and not self._closing:
                    self._changed.wait(self._interval_s)


def reap_stale(root: str | Path, say: Say | None = None) -> list[Path]:
    """Mark runs whose process is gone KILLED, here and in MLflow; return their directories."""
    stale = [run for run in stale_runs(root, say) if mark_killed(run)]
    for run in stale:
        _complete(run, say)
    return [run.path for run in stale]


def catch_up(root: str | Path, say: Say | None = None) -> list[Path]:
    """Complete the MLflow copies of ended runs that fell behind; return those completed."""
    _mend(say)
    return [run.path for run in all_runs(root) if _is_behind(run) and _complete(run, say)]


def _mend(say: Say | None) -> None:
    """Replace a half-made database before it is asked what it holds; a missing one stays so."""
    database = sqlite_path(store_uri())
    if database is not None and database.exists():
        try:
            open_store(store_uri(), say)
        except UsageError:  # it is of another version of MLflow, for good
            raise
        except Exception as error:  # whatever MLflow raises, the run goes on without
            if say:
                say(f"MLflow cannot be read ({one_line(error)})")


def _is_behind(run: RunDir) -> bool:
    status = run.manifest["status"]
    if status not in ENDED:
        return False
    try:
        note = read_note(run.path)
    except UsageError:
        return True
    return note.get("status", status) != status or (bool(note) and _is_missing(run, note))


def _is_missing(run: RunDir, note: Mapping) -> bool:
    """Whether the copy was in a database that has been replaced since."""
    database = sqlite_path(store_uri())
    if database is None or not was_rebuilt(database) or not _is_told(note):
        return False
    try:
        client = open_store(store_uri())
        return note["run_id"] is not None and get_run(client, note["run_id"]) is None
    except Exception:  # asked again by the next start
        return False


def _complete(run: RunDir, say: Say | None) -> bool:
    """Bring the MLflow copy of an ended run up to date; a run that was never mirrored stays so.

    Nor is one touched that is in another store than this process was told.
    """
    say = say or (lambda line: None)
    if not (run.path / "mirror.json").exists():
        return False
    try:
        note = read_note(run.path)
    except UsageError:
        note = {}
    if note and (not _is_told(note) or _store_is_gone(note)):
        return False
    copy = Copy(run, store_uri(), run.manifest.get("config", {}), {}, say)
    copy.status = run.manifest["status"]
    try:
        copy.bring_up_to_date()
    except Exception as error:  # whatever MLflow raises, the local directory stands
        say(f"the MLflow copy of {run.path} is still behind: {one_line(error)}")
        return False
    if copy.left_out():
        say(copy.left_out())
    return True


def _is_told(note: Mapping) -> bool:
    return note["store"] == without_credentials(store_uri())


def _store_is_gone(note: Mapping) -> bool:
    """Whether the database was deleted, which says that nobody wants its runs."""
    database = sqlite_path(store_uri())
    if database is None or database.exists():
        return False
    return note["run_id"] is not None and not was_rebuilt(database)
