"""Run directories: `outputs/<run>/<phase>/<id>/` with manifest.json, config.yaml, metrics.jsonl.

The directory is the source of truth; MLflow (`xtrain.track.mirror`) only reads it.

- manifest.json: what ran, on what, and how it ended. Status is RUNNING, FINISHED, FAILED or KILLED;
  a RUNNING run whose process is gone was killed, which `xtrain.track.resume` finds out.
- .spare: room for the last manifest on a disk that has become full.
- .lock: held by the process whose run it is (`xtrain.track.ownership`).
- metrics.jsonl: `{"step": 10, "kind": "train", "time": ..., "loss": ...}`, one line a record, each
  written by one unbuffered write, so that a SIGKILL loses at most the line being written. Floats
  are written by `repr` and read back bit for bit; NaN and infinities are the strings "NaN",
  "Infinity" and "-Infinity", because JSON has no other spelling for them.

Every other file is written to a temporary name, synced and renamed.
"""

import contextlib
import errno
import glob
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from xtrain.disk import sync
from xtrain.errors import UsageError, WriteError, is_of_the_disk, write_error
from xtrain.track.machine import identity
from xtrain.track.ownership import acquire
from xtrain.typed_json import (
    COUNT,
    NAME,
    TIME,
    Matching,
    OneOf,
    Within,
    checked,
    open_regular,
    parse,
    read_json,
)

ABANDONED_S = 3600
SPARE = ".spare"
SPARE_BYTES = 1 << 15  # a manifest has a third of it; random, so that no file system shrinks it
RUNNING = "RUNNING"
ENDED = ("FINISHED", "FAILED", "KILLED")
MANIFEST = {
    "id": Matching(r"[A-Za-z0-9_.-]{1,100}", "the name of a run directory"),
    "run": NAME,
    "phase": NAME,
    "status": OneOf(RUNNING, *ENDED),
    "pid?": COUNT,
    "process?": (str, None),
    "host?": str,
    "started": TIME,
    "ended?": (TIME, None),
    "resumes?": [{"time": TIME, "from_step": COUNT, "was": OneOf(RUNNING, *ENDED), "facts": dict}],
    "fingerprints?": {str: str},
    "facts?": dict,
    "config?": dict,
}
_FIXED = {
    "step": COUNT,
    "kind": Matching(r"[A-Za-z0-9_.-]{1,60}", "the kind of a record"),
    "time?": Within(0, 253402300799),  # the year 9999
}
_SPELLED = ("NaN", "Infinity", "-Infinity")


class RunDir:
    """An open run directory. Made by `open_run` and `xtrain.track.resume.continue_run`."""

    def __init__(self, path: Path, manifest: dict):
        self.path = Path(path)
        self.manifest = manifest
        self._metrics: int | None = None
        self._lock: int | None = None

    @property
    def id(self) -> str:
        """The directory's own name, unique among the runs of a run and phase."""
        return self.manifest["id"]

    def log(self, step: int, values: Mapping[str, object], *, kind: str = "train") -> None:
        """Append one record to metrics.jsonl; values are numbers (NumPy's too) or None.

        Raises TypeError for any other value and WriteError when the disk is full; the file then
        still ends with the last complete record.
        """
        record = {"step": int(step), "kind": kind, "time": time.time()}
        record |= {name: _number(name, value) for name, value in values.items()}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        if self._metrics is None:
            self._metrics = self._open_metrics()
        try:
            _append(self._metrics, line)
        except OSError as error:
            raise write_error(self.path / "metrics.jsonl", error) from error

    def sync(self) -> None:
        """Make every record so far survive a power cut: before a checkpoint that relies on them."""
        if self._metrics is None:
            return
        try:
            os.fsync(self._metrics)
            sync(self.path)
        except OSError as error:
            raise write_error(self.path / "metrics.jsonl", error) from error

    def sound_records(self) -> tuple[list[dict], str]:
        """The records before the first damaged line, and a line that names that one, or ""."""
        found: list[dict] = []
        try:
            for record, _ in _records(self.path / "metrics.jsonl"):
                found.append(record)
        except FileNotFoundError:
            return [], ""
        except UsageError as error:
            return found, f"{error}; it and what follows it are dropped"
        return found, ""

    def truncate_after(self, step: int) -> None:
        """Drop every record after a step, so that none is doubled when it is redone.

        What follows a damaged line is dropped too.
        """
        self._close_metrics()
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            kept = []
            with contextlib.suppress(UsageError):
                for record, line in _records(metrics):
                    kept += [line] if record["step"] <= step else []
            self.write_text("metrics.jsonl", "".join(kept))

    def write_text(self, name: str, text: str) -> Path:
        """Write a file of the run atomically; name may be a relative path."""
        if not self.path.is_dir():  # it would be made anew, with this one file
            raise WriteError(f"cannot write {self.path / name}: the run directory is gone")
        return write_atomically(self.path / name, text)

    def write_json(self, name: str, value: object) -> Path:
        """Write a JSON file of the run atomically."""
        return self.write_text(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def update(self, **fields: object) -> None:
        """Set fields of the manifest, e.g. fingerprints that are known only later."""
        self.manifest = {**self.manifest, **fields}
        self.write_json("manifest.json", self.manifest)

    def set_status(self, status: str) -> None:
        """Set RUNNING, FINISHED, FAILED or KILLED; the last three also set the end time.

        A run that has ended is nobody's: another process may go on with it.
        """
        if status != RUNNING and status not in ENDED:
            raise ValueError(f"status {status!r}: choose one of {RUNNING}, {', '.join(ENDED)}")
        ended = None if status == RUNNING else now()
        try:
            self.update(status=status, ended=ended)
        except OSError as error:
            if not is_of_the_disk(error):
                raise
            (self.path / SPARE).unlink(missing_ok=True)  # what it held is enough for a manifest
            self.update(status=status, ended=ended)
        if status != RUNNING:
            (self.path / SPARE).unlink(missing_ok=True)
            self.release()

    def own(self) -> None:
        """Make the directory this process's until `release`, its end, or that of the process.

        Raises UsageError when another process has it, or OSError.
        """
        if self._lock is None:
            self._lock = acquire(self.path)
            with contextlib.suppress(OSError):  # without it a full disk leaves the run RUNNING
                (self.path / SPARE).write_bytes(os.urandom(SPARE_BYTES))

    @property
    def is_owned(self) -> bool:
        """Whether `own` holds it; False where the file system has no locks."""
        return self._lock is not None

    def release(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sweep(self) -> None:
        """Delete what a process that died left half-written. The caller has the run to itself."""
        for pattern in (".*.tmp", ".*.writing-*", "checkpoints/.writing-*"):
            for leftover in self.path.glob(pattern):
                if leftover.is_dir() and not leftover.is_symlink():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the metrics file and let go of the directory; `log` and `own` take them again."""
        self._close_metrics()
        self.release()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None

    def _open_metrics(self) -> int:
        path = self.path / "metrics.jsonl"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.ftruncate(descriptor, content.rfind(b"\n") + 1)  # a torn line would spoil the next
        except OSError as error:
            raise write_error(path, error) from error
        return descriptor


def open_run(
    root: str | Path,
    run: str,
    phase: str,
    config: Mapping,
    *,
    config_text: str,
    fingerprints: Mapping[str, str],
    facts: Mapping[str, object],
) -> RunDir:
    """Make the directory of a run that starts now.

    config: the resolved config as plain values; config_text: the same as YAML, for config.yaml.
    fingerprints: hex digests by `config`, `code`, `data`; facts: device, versions, counts.
    Raises UsageError when the directory cannot be written.
    """
    try:
        path = _make_directory(Path(root).resolve() / run / phase)
        manifest = {
            "id": path.name,
            "run": run,
            "phase": phase,
            "status": RUNNING,
            **identity(),
            "started": now(),
            "ended": None,
            "resumes": [],
            "fingerprints": dict(fingerprints),
            "facts": dict(facts),
            "config": plain(config),
        }
        opened = RunDir(path, manifest)
        opened.own()
        opened.write_text("config.yaml", config_text)
        opened.write_json("manifest.json", manifest)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"out={root}: cannot write a run there: {reason}") from error
    return opened


def read_metrics(path: str | Path, kind: str | None = None) -> list[dict]:
    """The complete records of a metrics.jsonl, non-finite values as floats.

    A torn last line is passed over. Raises UsageError naming the line for one broken before it, and
    when the file is missing.
    """
    try:
        wanted = [record for record, _ in _records(Path(path)) if kind in (None, record["kind"])]
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing") from error
    return [{key: _from_json(key, value) for key, value in record.items()} for record in wanted]


def read_record(line: bytes) -> dict:
    """One complete line of a metrics.jsonl. Raises ValueError with what is wrong."""
    record = checked(parse(line), _FIXED)
    for name, value in record.items():
        if name not in ("step", "kind", "time") and not _is_metric(value):
            raise ValueError(f"{name} is no number")
    return record


def value_of(record: Mapping, name: str) -> float:
    """A value of a record; NaN when it has none."""
    value = record.get(name)
    return value if isinstance(value, int | float) else math.nan


def read_run(path: str | Path) -> RunDir:
    """Open an existing run directory. Raises UsageError when it has no readable manifest.json."""
    path = Path(path)
    try:
        manifest = read_json(path / "manifest.json", MANIFEST)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not a run directory: it has no manifest.json") from error
    return RunDir(path.resolve(), manifest)


def all_runs(
    root: str | Path, run: str = "*", phase: str = "*", say: Callable[[str], None] | None = None
) -> list[RunDir]:
    """Every run below the root with a readable manifest, oldest first.

    say receives a line for each that is passed over because its manifest is damaged.
    """
    found = []
    for manifest in sorted(Path(root).glob(f"{run}/{phase}/*/manifest.json")):
        try:
            found.append(read_run(manifest.parent))
        except UsageError as error:
            if say is not None:
                say(f"{error}; that run is passed over")
    return sorted(found, key=lambda each: (each.manifest["started"], each.id))


def plain(value: object) -> object:
    """A config value as JSON holds it: mappings, lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return _spell(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def write_atomically(path: Path, text: str) -> Path:
    """Write a text file so that a reader or a kill sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_older(path)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # of a file system that became read-only
            temporary.unlink(missing_ok=True)
        raise write_error(path, error) from error
    return path


def _sweep_older(path: Path) -> None:
    """Delete what processes that died left of this file: nobody writes one for an hour."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            if time.time() - leftover.stat().st_mtime > ABANDONED_S:
                leftover.unlink()


def now() -> str:
    """The time in UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _make_directory(parent: Path) -> Path:
    """A directory that nobody else has: random digits end its name, an existing one is refused."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = parent / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def _append(descriptor: int, line: bytes) -> None:
    """Write all of the line or none of it."""
    status = os.fstat(descriptor)
    if status.st_nlink == 0:  # deleted: what is written goes nowhere
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    size = status.st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _records(path: Path) -> Iterable[tuple[dict, str]]:
    """(record, its line) for every complete line; what follows the last newline is torn."""
    try:
        with open_regular(path) as file:
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = read_record(line)
        except ValueError as error:
            reason = "NUL bytes, as a power cut leaves them" if b"\0" in line else error
            raise UsageError(f"{path} line {number} is damaged: {reason}") from error
        yield record, line.decode() + "\n"


def _is_metric(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and -(2**63) <= value < 2**64
    return value is None or isinstance(value, float) or value in _SPELLED


def _number(name: str, value: object) -> float | int | str | None:
    if name in ("step", "kind", "time"):
        raise TypeError(f"metric {name!r}: the record has a field of that name")
    if hasattr(value, "item"):
        value = value.item()
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"metric {name!r}: {value!r} is not a number")
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else _spell(value)


def _spell(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _from_json(key: str, value: object) -> object:
    return float(value) if key != "kind" and isinstance(value, str) else value
