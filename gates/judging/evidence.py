"""Committed evidence: `gates/evidence/<id>.json`, what was measured on a device that CI lacks.

A list of ledger entries, one a device class. It is judged again by the bars of today, counts only
on the device class that it names, and only while its code fingerprint is that of the code. Where
trusted keys are configured (`gates.judging.signing`) it counts only if one of them signed it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from gates.judging.ledger import VERDICT, refuse_passes_without_value
from gates.judging.signing import is_believed, signed, trusted_keys
from xtrain.errors import UsageError
from xtrain.track.run_dir import write_atomically
from xtrain.typed_json import read_json

HERE = Path(__file__).resolve().parents[1] / "evidence"


def read_evidence(gate: str, device: str, directory: Path = HERE) -> dict | None:
    """The committed entry of a gate on a device class that counts, or None.

    Raises UsageError on a bad file.
    """
    trusted = trusted_keys()
    entries = (each for each in _read(gate, directory) if each["device"] == device)
    return next((each for each in entries if is_believed(each, trusted)), None)


def write_evidence(entry: Mapping, directory: Path = HERE) -> Path:
    """Put a verdict entry in the gate's file, in place of the one of the same device class."""
    kept = [e for e in _read(entry["gate"], directory) if e["device"] != entry["device"]]
    chain = ("previous", "hash", "kind", "signed_by", "signature")
    fresh = {key: value for key, value in entry.items() if key not in chain}
    fresh["facts"] = _without_paths(entry.get("facts", {}))
    entries = sorted([*kept, signed(fresh)], key=lambda each: each["device"])
    return write_atomically(_path(entry["gate"], directory), json.dumps(entries, indent=1) + "\n")


def unbelieved_evidence(trusted: frozenset[str], directory: Path = HERE) -> list[str]:
    """A line for each committed entry that none of these keys signed."""
    return [
        f"{path}: the entry of {entry['device']} is not signed by a trusted key"
        for path in sorted(directory.glob("*.json"))
        for entry in _read(path.stem, directory)
        if not is_believed(entry, trusted)
    ]


def _without_paths(facts: Mapping) -> dict:
    """The facts with the program of the command by its name: where it lay is nobody's business."""
    program, space, arguments = str(facts.get("command", "")).partition(" ")
    path = Path(program)
    name = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    return {**facts, "command": f"{name}{space}{arguments}"} if "command" in facts else dict(facts)


def _path(gate: str, directory: Path) -> Path:
    return directory / f"{gate.lower()}.json"


def _read(gate: str, directory: Path) -> list[dict]:
    path = _path(gate, directory)
    try:
        entries = read_json(path, [VERDICT])
        for entry in entries:
            refuse_passes_without_value(entry)
    except FileNotFoundError:
        return []
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    return entries
