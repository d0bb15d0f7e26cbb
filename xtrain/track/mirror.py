"""MLflow as the mirror of a run directory: it reads metrics.jsonl and copies it, never the reverse.

One background thread tails metrics.jsonl and writes it in batches, so a training step pays nothing
and a slow, locked or unreachable database stops nothing. What MLflow holds is asked of MLflow
itself (the last step of each kind of record), so a resumed run goes on under its MLflow run id,
nothing is doubled, and a mirror that fell behind is completed later by the same code (`catch_up`).

mirror.json in the run directory names the MLflow run, its store, and what is still owed to it.
MLflow stores NaN as 0, so values that are not finite are left out, and counted.
"""

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from xtrain.track.mlflow_store import (
    experiment_id,
    import_mlflow,
    one_line,
    open_store,
    refuse_locked,
    sqlite_path,
    store_uri,
)
from xtrain.track.resume import flatten, stale_runs
from xtrain.track.run_dir import ENDED, RUNNING, RunDir, all_runs, plain, write_atomically

BATCH_METRICS = 1000  # MLflow's limit for one log_batch
BATCH_PARAMS = 100  # likewise
PARAM_LENGTH = 6000  # likewise, in characters
TAG_LENGTH = 5000  # likewise

Say = Callable[[str], None]


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
        self._copy = _Copy(run, store_uri(), params or run.manifest.get("config", {}), tags or {})
        self._say = say or (lambda line: print(f"xtrain: {line}", file=sys.stderr))
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
        """Copy a file or directory to the MLflow artifacts, soon. Raises FileNotFoundError."""
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: no such file to copy to MLflow")
        self._copy.artifacts.append((str(path), folder))

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
        self._copy.write_note("BEHIND")
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


class _Copy:
    """What of a run directory is in MLflow, and the rest on its way there."""

    def __init__(self, run: RunDir, uri: str, params: Mapping, tags: Mapping[str, str]):
        note = read_note(run.path)
        self.run = run
        self.run_id: str | None = note.get("run_id")
        self.params = {key: str(value)[:PARAM_LENGTH] for key, value in _flat(params).items()}
        self.tags = {**_tags_of(run), **note.get("tags", {}), **tags}
        self.artifacts = deque((path, folder) for path, folder in note.get("artifacts", []))
        self.status: str | None = None
        self._uri = uri
        self._own_tags: dict[str, str] = _tags_of(run)
        self._sent_tags: dict[str, str] = {}
        self._client = None
        self._held: dict[str, int] = {}
        self._offset = 0
        self._copied = self._skipped = 0

    def bring_up_to_date(self) -> None:
        """Copy what is not in MLflow yet; raises what MLflow raises, and can be called again."""
        status = self.status  # read first: what was logged before it is then copied before it
        if self._client is not None and not self._has_news():
            return
        refuse_locked(self._uri)
        if self._client is None:
            self._connect()
        self._copy_metrics()
        for key, value in list(self.tags.items()):
            if self._sent_tags.get(key) != value:
                self._client.set_tag(self.run_id, key, value[:TAG_LENGTH])
                self._sent_tags[key] = value
        while self.artifacts:
            path, folder = self.artifacts[0]
            copy = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
            if Path(path).exists():  # what was owed by an earlier process may be gone
                copy(self.run_id, path, folder or None)
            self.artifacts.popleft()
        if status in ENDED:
            self._client.set_terminated(self.run_id, status)
            self.write_note(status)
            self.status = None

    def write_note(self, status: str) -> None:
        """Write mirror.json: the MLflow run, its status there, the tags and artifacts owed."""
        note = {
            "run_id": self.run_id,
            "store": self._uri,
            "status": status,
            "tags": {k: v for k, v in self.tags.items() if self._own_tags.get(k) != v},
            "artifacts": [] if status in ENDED else list(self.artifacts),
        }
        write_atomically(self.run.path / "mirror.json", json.dumps(note, indent=2) + "\n")

    def lines_behind(self) -> int:
        """Lines of metrics.jsonl that are not in MLflow."""
        path = self.run.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") - self._copied if path.exists() else 0

    def left_out(self) -> str:
        """ "" or a line that counts the values that MLflow cannot hold."""
        if not self._skipped:
            return ""
        return (
            f"{self._skipped} values that are not finite are only in metrics.jsonl, not in MLflow"
        )

    def _has_news(self) -> bool:
        path = self.run.path / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        owed = self.artifacts or self.status in ENDED
        return bool(owed) or size > self._offset or self.tags != self._sent_tags

    def _connect(self) -> None:
        client = open_store(self._uri)
        known = _find_run(client, self.run_id)
        if known is None:
            manifest = self.run.manifest
            experiment = experiment_id(client, self._uri, f"xtrain-{manifest['run']}")
            known = client.create_run(experiment, run_name=f"{manifest['phase']}/{self.run.id}")
        self.run_id = known.info.run_id
        self.write_note(RUNNING)
        if known.info.status != RUNNING:
            client.update_run(self.run_id, status=RUNNING)
        self._held = _last_steps(client, known)
        self._copy_params(client, known.data.params)
        self._client = client

    def _copy_params(self, client, known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        missing = [Param(key, value) for key, value in self.params.items() if key not in known]
        for start in range(0, len(missing), BATCH_PARAMS):
            client.log_batch(self.run_id, params=missing[start : start + BATCH_PARAMS])

    def _copy_metrics(self) -> None:
        """Send whole lines in batches; the offset moves only past lines that were sent."""
        batch, end, lines, skipped = [], self._offset, 0, 0
        for record, end_of_line in self._lines():
            metrics, not_finite = self._metrics(record)
            if len(batch) + len(metrics) > BATCH_METRICS:
                self._send(batch, end, lines, skipped)
                batch, lines, skipped = [], 0, 0
            batch, end, lines = batch + metrics, end_of_line, lines + 1
            skipped += not_finite
        if lines:
            self._send(batch, end, lines, skipped)

    def _send(self, batch: list, end: int, lines: int, skipped: int) -> None:
        if batch:
            self._client.log_batch(self.run_id, metrics=batch)
        self._offset = end
        self._copied += lines
        self._skipped += skipped

    def _lines(self) -> Iterator[tuple[dict, int]]:
        """(record, offset after it) of the complete lines past the offset."""
        path = self.run.path / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        end = self._offset
        for line in content.split(b"\n")[:-1]:
            end += len(line) + 1
            yield json.loads(line), end

    def _metrics(self, record: dict) -> tuple[list, int]:
        """MLflow metrics of a record that MLflow does not hold, and how many were not finite."""
        from mlflow.entities import Metric

        step, kind = record["step"], record["kind"]
        if step <= self._held.get(kind, -1):
            return [], 0
        values = {k: v for k, v in record.items() if k not in ("step", "kind", "time")}
        finite = {k: v for k, v in values.items() if isinstance(v, int | float)}
        stamp = int(record["time"] * 1000)
        metrics = [Metric(f"{kind}/{key}", float(v), stamp, step) for key, v in finite.items()]
        return metrics, sum(isinstance(value, str) for value in values.values())


def reap_stale(root: str | Path, say: Say | None = None) -> list[Path]:
    """Mark runs whose process is gone KILLED, here and in MLflow; return their directories."""
    stale = stale_runs(root)
    for run in stale:
        run.set_status("KILLED")
    for run in stale:
        _complete(run, say)
    return [run.path for run in stale]


def catch_up(root: str | Path, say: Say | None = None) -> list[Path]:
    """Complete the MLflow copies of ended runs that fell behind; return those completed."""
    return [run.path for run in all_runs(root) if _is_behind(run) and _complete(run, say)]


def read_note(path: Path) -> dict:
    """The mirror.json of a run directory: run_id, store, status; {} when it was never mirrored."""
    try:
        return json.loads((path / "mirror.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _is_behind(run: RunDir) -> bool:
    status = run.manifest["status"]
    return status in ENDED and read_note(run.path).get("status", status) != status


def _complete(run: RunDir, say: Say | None) -> bool:
    """Bring the MLflow copy of an ended run up to date; a run that was never mirrored stays so."""
    note = read_note(run.path)
    if not note or _store_is_gone(note):
        return False
    copy = _Copy(run, note["store"], run.manifest.get("config", {}), {})
    copy.status = run.manifest["status"]
    try:
        copy.bring_up_to_date()
    except Exception as error:  # whatever MLflow raises, the local directory stands
        if say:
            say(f"the MLflow copy of {run.path} is still behind: {one_line(error)}")
        return False
    return True


def _store_is_gone(note: Mapping) -> bool:
    database = sqlite_path(note["store"])
    return bool(note["run_id"]) and database is not None and not database.exists()


def _find_run(client, run_id: str | None):
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None  # another store: it gets a copy of its own
        raise


def _last_steps(client, known) -> dict[str, int]:
    """The last step in MLflow of each kind of record."""
    last: dict[str, int] = {}
    for key in known.data.metrics:
        kind = key.partition("/")[0]
        steps = [metric.step for metric in client.get_metric_history(known.info.run_id, key)]
        last[kind] = max([last.get(kind, -1), *steps])
    return last


def _tags_of(run: RunDir) -> dict[str, str]:
    manifest = run.manifest
    tags = {f"xtrain.{key}": str(manifest[key]) for key in ("run", "phase", "id")}
    tags["xtrain.directory"] = str(run.path)
    for prefix, part in (("system", "facts"), ("fingerprint", "fingerprints")):
        tags |= {f"{prefix}.{key}": str(v) for key, v in _flat(manifest.get(part, {})).items()}
    return tags


def _flat(values: Mapping) -> dict[str, object]:
    return flatten(plain(values))
