"""The copy of one run directory in MLflow: what of it is there, and the rest on its way.

What MLflow holds is asked of MLflow itself (the last step of each kind of record, the run that says
which directory it is of), so a copy that was interrupted goes on and nothing is doubled.

mirror.json in the run directory names the MLflow run, its store, and what is still owed to it. A
run directory may be someone else's, so it is data: it is copied only to the store that this process
was told, and of its files only those that lie inside it. No credential is written.
MLflow stores NaN as 0, so values that are not finite are left out, and counted.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from xtrain.config.identity import flatten_tree
from xtrain.errors import UsageError
from xtrain.track.database import refuse_locked
from xtrain.track.mlflow_store import experiment_id, open_store
from xtrain.track.run_dir import ENDED, RUNNING, RunDir, plain, read_record, write_atomically
from xtrain.track.store_address import sqlite_path, without_credentials
from xtrain.typed_json import Matching, OneOf, open_regular, read_json

BATCH_METRICS = 1000  # MLflow's limit for one log_batch
BATCH_PARAMS = 100  # likewise
PARAM_LENGTH = 6000  # likewise, in characters
TAG_LENGTH = 5000  # likewise
BEHIND = "BEHIND"
ID = "xtrain.id"  # the tag that says which run directory an MLflow run is of
NOTE = {
    "run_id": (Matching(r"[A-Za-z0-9][\w-]{0,255}", "the id of an MLflow run"), None),
    "store": str,
    "status": OneOf(BEHIND, RUNNING, *ENDED),
    "tags": {str: str},
    "artifacts": [{"path": str, "folder": str, "is_sent": bool}],
}

Say = Callable[[str], None]


@dataclass
class Artifact:
    """A file or directory of a run, by its path in the run directory, and where MLflow has it."""

    path: str
    folder: str
    is_sent: bool = False


class Copy:
    """What of a run directory is in MLflow, and the rest on its way there."""

    def __init__(self, run: RunDir, uri: str, params: Mapping, tags: Mapping[str, str], say: Say):
        note = _note_or_line(run.path, say)
        self.run = run
        self.run_id: str | None = note.get("run_id")
        self.params = {key: str(value)[:PARAM_LENGTH] for key, value in _flat(params).items()}
        self.tags = {**_tags_of(run), **note.get("tags", {}), **tags}
        self.artifacts = [Artifact(**_known_fields(each)) for each in note.get("artifacts", [])]
        self.status: str | None = None
        self._uri = uri
        self._say = say
        self._own_tags: dict[str, str] = _tags_of(run)
        self._sent_tags: dict[str, str] = {}
        self._client = None
        self._held: dict[str, int] = {}
        self._offset = 0
        self._copied = self._skipped = 0
        self._damaged: set[int] = set()

    def bring_up_to_date(self) -> None:
        """Copy what is not in MLflow yet; raises what MLflow raises, and can be called again."""
        status = self.status  # read first: what was logged before it is then copied before it
        if self._client is not None and not self._has_news():
            return
        database = sqlite_path(self._uri)
        if database is not None:
            refuse_locked(database)
        if self._client is None:
            self._connect()
        self._copy_metrics()
        for key, value in list(self.tags.items()):
            if self._sent_tags.get(key) != value:
                self._client.set_tag(self.run_id, key, value[:TAG_LENGTH])
                self._sent_tags[key] = value
        for artifact in list(self.artifacts):
            if not artifact.is_sent:
                self._send_artifact(artifact)
        if status in ENDED:
            self._client.set_terminated(self.run_id, status)
            self.write_note(status)
            self.status = None

    def write_note(self, status: str) -> None:
        """Write mirror.json: the MLflow run, its status there, the tags and artifacts owed."""
        note = {
            "run_id": self.run_id,
            "store": without_credentials(self._uri),
            "status": status,
            "tags": {k: v for k, v in self.tags.items() if self._own_tags.get(k) != v},
            "artifacts": [asdict(each) for each in self.artifacts],
        }
        write_atomically(self.run.path / "mirror.json", json.dumps(note, indent=2) + "\n")

    def lines_behind(self) -> int:
        """Lines of metrics.jsonl that are not in MLflow."""
        path = self.run.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") - self._copied if path.exists() else 0

    def left_out(self) -> str:
        """ "" or a line that counts the values that MLflow cannot hold, and names bad records."""
        parts = []
        if self._skipped:
            parts.append(
                f"{self._skipped} values that are not finite are only in metrics.jsonl, not in "
                "MLflow"
            )
        if self._damaged:
            lines = sorted(self._damaged)
            more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
            shown = ", ".join(map(str, lines[:3]))
            path = self.run.path / "metrics.jsonl"
            parts.append(f"{path} line {shown}{more} is damaged, and not in MLflow")
        return "; ".join(parts)

    def _has_news(self) -> bool:
        path = self.run.path / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        is_owed = self.status in ENDED or not all(each.is_sent for each in self.artifacts)
        return is_owed or size > self._offset or self.tags != self._sent_tags

    def _connect(self) -> None:
        client = open_store(self._uri, self._say)
        manifest = self.run.manifest
        experiment = experiment_id(client, self._uri, f"xtrain-{manifest['run']}")
        known = _find_run(client, experiment, self.run_id, self.run.id)
        if known is None or known.info.run_id != self.run_id:
            for artifact in self.artifacts:  # that run, if any, is another copy
                artifact.is_sent = False
        if known is None:
            known = client.create_run(
                experiment, run_name=f"{manifest['phase']}/{self.run.id}", tags={ID: self.run.id}
            )
        self.run_id = known.info.run_id
        self.write_note(RUNNING)
        if known.info.status != RUNNING:
            client.update_run(self.run_id, status=RUNNING)
        self._held = _last_steps(client, known)
        self._copy_params(client, known.data.params)
        self._client = client

    def _send_artifact(self, artifact: Artifact) -> None:
        try:
            send_files(self._client, self.run_id, self.run.path, artifact.path, artifact.folder)
        except FileNotFoundError:
            self.artifacts.remove(artifact)  # what was owed by an earlier process may be gone
        except UsageError as error:
            self.artifacts.remove(artifact)
            self._say(f"{error}; it is not copied to MLflow")
        else:
            artifact.is_sent = True

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
            if record is None:
                self._damaged.add(self._copied + lines + 1)
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

    def _lines(self) -> Iterator[tuple[dict | None, int]]:
        """(record, offset after it) of the complete lines past the offset; None for a bad one."""
        path = self.run.path / "metrics.jsonl"
        if not path.exists():
            return
        with open_regular(path) as file:
            file.seek(self._offset)
            content = file.read()
        end = self._offset
        for line in content.split(b"\n")[:-1]:
            end += len(line) + 1
            try:
                yield read_record(line), end
            except ValueError:
                yield None, end

    def _metrics(self, record: dict | None) -> tuple[list, int]:
        """MLflow metrics of a record that MLflow does not hold, and how many were not finite."""
        from mlflow.entities import Metric

        if record is None:
            return [], 0
        step, kind = record["step"], record["kind"]
        if step <= self._held.get(kind, -1):
            return [], 0
        values = {k: v for k, v in record.items() if k not in ("step", "kind", "time")}
        finite = {k: v for k, v in values.items() if isinstance(v, int | float)}
        stamp = int(record.get("time", 0) * 1000)
        metrics = [Metric(f"{kind}/{key}", float(v), stamp, step) for key, v in finite.items()]
        return metrics, sum(isinstance(value, str) for value in values.values())


def send_files(client, run_id: str, root: Path, path: str, folder: str) -> None:
    """Copy a file or directory of a run directory to the artifacts of an MLflow run.

    Raises FileNotFoundError, and UsageError when it, or a file in it, is not inside `root`.
    """
    source = root / path
    if not source.exists():
        raise FileNotFoundError(source)
    for each in (source, *source.rglob("*")):
        if not _is_inside(each, root) or not (each.is_file() or each.is_dir()):
            raise UsageError(f"{each} leads out of the run directory")
    copy = client.log_artifacts if source.is_dir() else client.log_artifact
    copy(run_id, str(source), folder or None)


def read_note(path: Path) -> dict:
    """The mirror.json of a run directory: run_id, store, status; {} when it was never mirrored.

    Raises UsageError when it is damaged.
    """
    try:
        return read_json(path / "mirror.json", NOTE)
    except FileNotFoundError:
        return {}


def _note_or_line(path: Path, say: Say) -> dict:
    """The note; a damaged one is said and left, for MLflow itself tells which run is a copy."""
    try:
        return read_note(path)
    except UsageError as error:
        say(f"{error}; it is made anew")
        return {}


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # links in a circle
        return False


def _known_fields(artifact: Mapping) -> dict:
    return {name: artifact[name] for name in ("path", "folder", "is_sent")}


def _find_run(client, experiment: str, run_id: str | None, id: str):
    """The MLflow run that is the copy of a run directory, or None.

    The note's run id counts only for a run that says itself which directory it is of: a note may
    be someone else's. Without one, the copy is found by that.
    """
    known = get_run(client, run_id) if run_id else None
    if known is not None and known.data.tags.get(ID) == id:
        return known if known.info.lifecycle_stage == "active" else None
    found = client.search_runs([experiment], f"tags.`{ID}` = '{id}'", max_results=1)
    return client.get_run(found[0].info.run_id) if found else None


def get_run(client, run_id: str):
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
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
    return flatten_tree(plain(values))
