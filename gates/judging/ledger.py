"""The ledger: `outputs/ledger.jsonl`, append-only, hash-chained; it decides what is promoted.

One JSON object a line. Every entry carries `previous`, the hash of the entry before, and `hash`,
the sha256 of its own canonical JSON without that field, so an edited, inserted, removed or
reordered line is found by `verify`. A chain cannot show entries cut off the end, which
`gates.judging.audit` finds by the heads that MLflow keeps, nor a file that was rewritten with its
hashes: that takes signatures (`gates.judging.signing`), and where trusted keys are configured only
entries signed by one of them count.

Kinds of entry: `verdict` (a gate was measured), `promotion` (granted or refused), `waiver` (who,
why, until when). A line without its newline is the append that a kill interrupted: it was never
acknowledged, so readers pass over it and the next append removes it.
"""

import errno
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path

from gates.judging.gate import Failed, Measured, NotMeasured
from gates.judging.judge import (
    ERROR,
    FAIL,
    NOT_MEASURED,
    PASS,
    REPORTED,
    STALE,
    CheckResult,
    verdict_of,
)
from gates.judging.signing import (
    content_hash,
    is_believed,
    signed,
    trusted_keys,
    why_not_signed,
)
from xtrain.config.check import DEVICES, OPS, Check
from xtrain.config.check import REPORTED as WITHOUT_BAR
from xtrain.errors import UsageError, is_of_the_disk, write_error
from xtrain.typed_json import TIME, Matching, OneOf, checked, parse

FILE = "ledger.jsonl"
_START = "0" * 64
_HASH = Matching(r"[0-9a-f]{64}", "a sha256")
_NUMBER = (float, OneOf("NaN", "Infinity", "-Infinity"), None)
CHECKS = [
    {
        "name": str,
        "value": _NUMBER,
        "op": OneOf(*OPS, WITHOUT_BAR),
        "bar": (float, None),
        "original": str,
        "verdict": OneOf(PASS, FAIL, ERROR, STALE, NOT_MEASURED, REPORTED),
        "unit?": str,
        "device?": OneOf(*DEVICES),
        "reason?": str,
    }
]
VERDICT = {
    "date": TIME,
    "gate": str,
    "verdict": str,
    "device": str,
    "fingerprint": {str: str},
    "facts?": dict,
    "checks": CHECKS,
}
_CHAINED = {
    "kind": str,
    "date": TIME,
    "previous": _HASH,
    "hash": _HASH,
    "signed_by?": str,
    "signature?": str,
}
_KINDS = {
    "verdict": VERDICT,
    "promotion": {
        "gate": str,
        "verdict": str,
        "device": str,
        "id?": str,
        "bars?": str,
        "fingerprint?": {str: str},
        "requires?": {str: str},
    },
    "waiver": {
        "gate": str,
        "who": str,
        "why": str,
        "until": Matching(r"\d{4}-\d\d-\d\d", "a date"),
    },
}


class Ledger:
    """The ledger file at `path`; it is created by the first append."""

    def __init__(self, path: Path):
        self.path = Path(path)

    @classmethod
    def of(cls, out: str | Path) -> "Ledger":
        """The ledger of an outputs root."""
        return cls(Path(out) / FILE)

    def append(self, entry: Mapping) -> dict:
        """Chain, write and fsync one entry; return it with date, previous and hash.

        Appends of several processes are serialised by a lock on the file. Raises WriteError when
        the disk refuses it, and then nothing of the entry is left; UsageError when the file cannot
        be opened or its last entry is not readable.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        except OSError as error:
            if is_of_the_disk(error):
                raise write_error(self.path, error) from error
            raise UsageError(f"cannot write {self.path}: {error.strerror}") from error
        try:
            _require_file(descriptor, self.path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return self._append_locked(descriptor, entry)
        finally:
            os.close(descriptor)

    def entries(self) -> list[dict]:
        """All complete entries, oldest first. Raises UsageError when the chain is broken."""
        broken = self.verify()
        if broken:
            raise UsageError(broken)
        return list(self._lines())

    def verify(self) -> str | None:
        """None when the chain holds, else one line that names the first broken line."""
        previous = _START
        for number, line in enumerate(_complete_lines(self._bytes()), 1):
            reason = _why_broken(line, previous)
            if reason:
                return f"{self.path} line {number} is broken: {reason}"
            previous = json.loads(line)["hash"]
        return None

    def believed(self) -> list[dict]:
        """The entries that count: all, or those that a configured trusted key signed."""
        trusted = trusted_keys()
        return [entry for entry in self.entries() if is_believed(entry, trusted)]

    def head(self) -> tuple[int, str]:
        """(how many entries there are, the hash of the last), (0, 64 zeros) of an empty ledger."""
        entries = self.entries()
        return len(entries), entries[-1]["hash"] if entries else _START

    def latest(self, gate: str, device: str) -> dict | None:
        """The last verdict of a gate on a device class that counts, or None."""
        for entry in reversed(self.believed()):
            same_gate = str(entry.get("gate", "")).lower() == gate.lower()
            if entry["kind"] == "verdict" and same_gate and entry["device"] == device:
                return entry
        return None

    def waive(self, gate: str, *, who: str, why: str, until: date) -> dict:
        """Record that a gate's missing PASS is accepted up to and including a day."""
        if not who.strip() or not why.strip():
            raise UsageError("a waiver says who accepts it and why")
        return self.append(
            {"kind": "waiver", "gate": gate, "who": who, "why": why, "until": until.isoformat()}
        )

    def waiver(self, gate: str, today: date) -> dict | None:
        """The last waiver of a gate that counts, if it holds on that day, else None."""
        for entry in reversed(self.believed()):
            if entry["kind"] == "waiver" and entry["gate"].lower() == gate.lower():
                return entry if date.fromisoformat(entry["until"]) >= today else None
        return None

    def _append_locked(self, descriptor: int, entry: Mapping) -> dict:
        content = _read_all(descriptor)
        complete = content.rfind(b"\n") + 1
        lines = _complete_lines(content)
        previous = _START
        if lines:
            try:
                previous = _entry(lines[-1])["hash"]
            except ValueError as error:
                message = f"{self.path} line {len(lines)} is broken: not a ledger entry: {error}"
                raise UsageError(message) from error
        chained = signed({"date": _now(), **entry, "previous": previous})
        chained["hash"] = content_hash(chained)
        line = json.dumps(chained, sort_keys=True, allow_nan=False).encode() + b"\n"
        os.ftruncate(descriptor, complete)
        os.lseek(descriptor, complete, os.SEEK_SET)
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, complete)
            raise write_error(self.path, error) from error
        return chained

    def _lines(self) -> Iterator[dict]:
        return (json.loads(line) for line in _complete_lines(self._bytes()))

    def _bytes(self) -> bytes:
        try:
            with _shared_lock(self.path) as descriptor:
                return b"" if descriptor is None else _read_all(descriptor)
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror}") from error


def verdict_entry(
    gate: str,
    results: Sequence[CheckResult],
    *,
    device: str,
    fingerprint: Mapping[str, str],
    facts: Mapping[str, object],
) -> dict:
    """A ledger or evidence entry of kind `verdict`.

    fingerprint: hex digests by `code`, and for a trained run `config`, `data`, `checkpoint`.
    facts: device, driver and version facts of the machine it was measured on.
    """
    return {
        "kind": "verdict",
        "date": _now(),
        "gate": gate,
        "verdict": verdict_of(results),
        "device": device,
        "fingerprint": dict(fingerprint),
        "facts": dict(facts),
        "checks": [check_record(result) for result in results],
    }


def check_record(result: CheckResult) -> dict:
    """A check result as JSON; a value that is not finite becomes a string, none becomes null."""
    return {
        "name": result.check.name,
        "value": _to_json(result.value),
        "op": result.check.op,
        "bar": result.check.bar,
        "original": result.check.original,
        "verdict": result.verdict,
        "unit": result.check.unit,
        "device": result.check.device,
        "reason": result.reason,
    }


def recorded_values(entry: Mapping) -> dict[str, Measured]:
    """The measured values of an entry, as `judge` takes them, to judge by the bars of today."""
    return {record["name"]: _from_record(record) for record in entry["checks"]}


def refuse_passes_without_value(entry: Mapping) -> None:
    """Raise ValueError for a verdict entry with a check that passed on no value."""
    for record in entry["checks"]:
        if record["value"] is None and record["verdict"] == PASS:
            raise ValueError(f"check {record['name']} is PASS and has no value")


def recorded_results(entry: Mapping) -> list[CheckResult]:
    """The check results of an entry as they were judged then."""
    return [
        CheckResult(
            Check(
                name=record["name"],
                op=record["op"],
                bar=record["bar"],
                original=record["original"],
                device=record.get("device", "any"),
                unit=record.get("unit", ""),
            ),
            _from_json(record["value"]),
            record["verdict"],
            record.get("reason", ""),
        )
        for record in entry["checks"]
    ]


def _from_record(record: Mapping) -> Measured:
    value = _from_json(record["value"])
    reason = record.get("reason", "")
    if value is not None:
        return value
    if record["verdict"] in (NOT_MEASURED, STALE):
        return NotMeasured(reason)
    if record["verdict"] in (ERROR, FAIL):
        return Failed(reason)
    raise AssertionError(record)  # refuse_passes_without_value has seen to it


def _to_json(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")


def _from_json(value: float | str | None) -> float | None:
    return value if value is None else float(value)


def _why_broken(line: bytes, previous: str) -> str | None:
    try:
        entry = _entry(line)
    except ValueError as error:
        return f"not a ledger entry: {error}"
    if entry["previous"] != previous:
        return "the entry before it is not the one that it was chained to"
    if entry["hash"] != content_hash(entry):
        return "its content does not match its hash"
    if "signed_by" in entry or "signature" in entry:
        return why_not_signed(entry)
    return None


def _entry(line: bytes) -> dict:
    """One line as an entry of its kind. Raises ValueError naming what is wrong."""
    entry = checked(parse(line), _CHAINED)
    checked(entry, _KINDS.get(entry["kind"], {}))
    match entry["kind"]:
        case "verdict":
            refuse_passes_without_value(entry)
        case "waiver":
            date.fromisoformat(entry["until"])  # the 31st of February is a ValueError too
    return entry


def _complete_lines(content: bytes) -> list[bytes]:
    return content.split(b"\n")[:-1]


def _require_file(descriptor: int, path: Path) -> None:
    """A pipe would be waited for, and a device never ends."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise UsageError(f"{path} is not a regular file")


def _read_all(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


@contextmanager
def _shared_lock(path: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        _require_file(descriptor, path)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield descriptor
    finally:
        os.close(descriptor)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
