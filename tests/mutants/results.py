"""What has been found of each mutant, kept in a JSON file between runs."""

import hashlib
import json
from pathlib import Path

from .mutant import Mutant

CAUGHT, SURVIVED, NO_CONTROL, TIMED_OUT = "caught", "SURVIVED", "no control", "timed out"


class Results:
    """Results by mutant; one that rests on a file that has changed since is forgotten."""

    def __init__(self, root: Path, file: Path):
        self.root, self.file = root, file
        self.known = json.loads(file.read_text()) if file.exists() else {}

    def of(self, mutant: Mutant) -> dict[str, str]:
        """What was found by `test` and by `gate`, as far as they were asked."""
        found = self.known.get(mutant.name, {})
        return found.get("found", {}) if found.get("files") == self._files(mutant) else {}

    def add(self, mutant: Mutant, kind: str, verdict: str) -> None:
        """Keep a result."""
        found = {**self.of(mutant), kind: verdict}
        self.known[mutant.name] = {"files": self._files(mutant), "found": found}
        self.file.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")

    def _files(self, mutant: Mutant) -> str:
        names = (mutant.file, mutant.test.split(" ")[0].partition("::")[0])
        contents = b"".join((self.root / name).read_bytes() for name in names)
        named = f"{mutant.test} {mutant.gate}".encode()
        return hashlib.sha256(contents + named).hexdigest()[:16]
